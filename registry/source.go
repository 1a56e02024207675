package registry

import (
	"context"
	"fmt"
	"math"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// Source is where limits come from: a database table (package sqlsource), a file, a service, a fixed list (Static).
//
// Load returns all limits there are, or an error if they cannot be known: an error never means that there are none. It is
// called by one goroutine at a time, and ctx always has a deadline.
type Source interface {
	Load(ctx context.Context) (Table, error)
}

// Table is what a Source has loaded.
type Table struct {
	// Limits, one for each name.
	Limits []Limit
	// Rejected rows, which the source itself could not read: see WithBadRows.
	Rejected []RowError
}

// Limit is the configuration of one bucket: a row of the table.
type Limit struct {
	// Name of the bucket, 1 to 512 bytes of UTF-8. One with a * at its end holds for all names that begin as it does, and have no row
	// of their own; the longest counts. A * elsewhere is refused. See also WithParts.
	Name string
	// Row names where the limit comes from, for messages: the primary key, say.
	Row string
	// Disabled lets every call pass at once. The zero value limits.
	Disabled bool
	// Rate in permits per second; with Quota, a whole number of calls in any second. 0: nothing passes.
	Rate float64
	// Quota: the upstream counts calls in any sliding second, so nothing is saved up (tokenbucket.ForQuota).
	Quota bool
	// Jitter is how much later a call may arrive than it was let go; only with Quota.
	Jitter time.Duration
	// MaxPermits is the size of the bucket; nil: one second's worth, at least 1.
	MaxPermits *float64
	// Warmup is the period in which a cold upstream gets warm; 0: none (a bursty limiter).
	Warmup time.Duration
	// ColdFactor is for Warmup, above 1; 0: the default, 3.
	ColdFactor float64
	// WaitShare is the share of a second that a call may wait for its permit, 0 to 9.99: 0.5 is half a second, 0 is not at all. It
	// is the table's word for what a limiter calls its longest wait (tokenbucket.WithMaxWait).
	WaitShare float64
	// Window: at most WindowLimit calls may begin in any window of this length, whole milliseconds up to 90 days, in which they are counted
	// in hundredths (package slidingwindow). 0: there is none.
	Window      time.Duration
	WindowLimit int
	// Concurrent is how many calls may be under way at once (package semaphore). 0: any number.
	//
	// A row with a window or a concurrency needs a place where it is counted (WithWindows, WithSemaphores), and all that it names must
	// agree for a call to pass: see Registry.Enter.
	Concurrent int
	// NoRate: there is no rate, and Rate is 0; a window or a concurrency limits alone. Without it a Rate of 0 lets nothing pass.
	NoRate bool
	// Version: of two contents of one name the one with the higher version wins in the whole fleet. Usually the time of the
	// last modification, in microseconds since 1970, UTC. 0: unknown.
	Version int64
	// PerKey gives each value of what the row's name leaves open a bucket of its own, with this limit: of the further parts of a name
	// (WithParts), or else of what the * at its end stands for. The name has at most 256 bytes then.
	PerKey bool
	// Penalty is which answers of an upstream hold the bucket back: see Registry.Penalizes.
	Penalty Penalty
	// Shadow decides and counts, and lets every call pass (WithShadow). A bad row refuses nothing either.
	Shadow bool
}

// maxName is the most bytes that a bucket's name may have.
const maxName = 512

// wait is how long a call may wait: the cache is a share of a second.
func (c *Limit) wait() time.Duration {
	return time.Duration(math.Round(c.WaitShare * float64(time.Second)))
}

// RowError tells which row was rejected, and why. Nothing of the row is in force: see [WithBadRows].
type RowError struct {
	// Row names the row; Name is the bucket that it is for, if that could be read.
	Row, Name string
	// Field and Value are what is wrong.
	Field, Value string
	// Want says what would be right.
	Want string
	// Err is why no limiter can be made of the row; Field, Value and Want are empty then.
	Err error
	// Shadow: the row says that it refuses nothing (Limit.Shadow), as far as that could be read.
	Shadow bool
	// Consequence says what happens to the calls of the name; the Registry fills it in.
	Consequence string
}

// Unwrap returns Err; if a field is wrong, tokenbucket.ErrInvalidConfig.
func (e *RowError) Unwrap() error {
	if e.Err == nil {
		return tokenbucket.ErrInvalidConfig
	}
	return e.Err
}

func (e *RowError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("registry: row %.80s: %v", e.Row, e.Err)
	}
	return fmt.Sprintf("registry: row %.80s: bucket %.80q: %s %.80s: want %s", e.Row, e.Name, e.Field, e.Value, e.Want)
}

// Switch is the global on and off of limiting. Enabled is asked at every call: it must be fast, and safe for concurrent use.
type Switch interface {
	Enabled() bool
}

// Static is a Source with a fixed list of limits. [WithStrict] makes New fail if one of them is bad.
type Static []Limit

// Load implements Source.
func (s Static) Load(context.Context) (Table, error) { return Table{Limits: s}, nil }
