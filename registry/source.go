package registry

import (
	"context"
	"fmt"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// Source loads the table of limits: from a database (package sqlsource), a file, a service or a fixed list (Static).
//
// Load returns all limits, or an error if it cannot read them. An error never means that there are none. One goroutine at a time calls
// Load, and ctx always has a deadline.
type Source interface {
	Load(ctx context.Context) (Table, error)
}

// Table is the result of Source.Load.
type Table struct {
	// Limits of all rows. Of several with one name, the one with the latest Version is in force; if these are equal, the one with the larger Row, as a number
	// if both are numbers. In a file, the first one is. The others are rejected.
	Limits []Limit
	// Rejected has the rows that the source could not read: see WithBadRows.
	Rejected []RowError
	// Lines of the limits in a file, for messages; nil if the source is none. Only its name identifies a row of a file from one load to the next. Otherwise
	// Row does, so that a row whose name cannot be read any more keeps its last valid limit. In a file that holds for all limits whose rows are gone meanwhile.
	Lines []int
}

// Limit is the configuration of one bucket: a row of the table.
type Limit struct {
	// Name of the bucket, 1 to 512 bytes of UTF-8. A name with a * at its end matches all names with that prefix and without a row of their
	// own; the longest match counts. A * elsewhere is invalid. See also WithParts.
	Name string
	// Row identifies the row in messages, usually by its primary key.
	Row string
	// Disabled lets every call pass at once.
	Disabled bool
	// Rate in permits per second, 1e-9 to 2^53; with Quota, a whole number of calls in any second. If it is 0, no call passes.
	Rate float64
	// Quota is for an upstream that counts calls in any sliding second, so that nothing may be saved up (tokenbucket.NewQuota).
	Quota bool
	// Jitter is the variation of the time from a grant to the call's arrival at the upstream, up to 1 s; only with Quota.
	Jitter time.Duration
	// Burst is the size of the bucket; nil means one second's worth, at least 1. Beside a Concurrent, less than 1 counts as 1: calls still
	// begin one at a time, an interval of the rate apart, but none holds its place for an interval that has passed already.
	Burst *float64
	// Warmup is the warm-up period of a cold upstream; 0 means none (a bursty limiter).
	Warmup time.Duration
	// ColdFactor of a warm-up, above 1; 0 means 3.
	ColdFactor float64
	// MaxWait is the longest wait of a call for its permits, 0 to 2^53 microseconds; 0 means no wait. It sets tokenbucket.WithMaxWait.
	MaxWait time.Duration
	// At most WindowLimit calls may begin in any time of length Window, which is counted in hundredths (package slidingwindow). Window is in
	// whole milliseconds, up to 100 years. 0 in both means no window.
	Window      time.Duration
	WindowLimit int
	// Concurrent is the number of calls that may be in flight at once (package semaphore); 0 means any number.
	//
	// A row with a window or a concurrency needs a function that makes it (WithWindows, WithSemaphores). A call passes if all limits of the
	// row grant it: see Registry.Enter.
	//
	// If a change of the row lowers it, calls that run are not ended, and none begins until fewer run. If a change raises it, the calls that wait in this
	// process begin before those that come later.
	Concurrent int
	// ConcurrentWait is the longest wait of a call for a place among the calls in flight, up to 2^53 microseconds; 0 means no wait. A
	// call in shadow does not wait. See Registry.Enter.
	ConcurrentWait time.Duration
	// NoRate reports that the row has no rate, so that a window or a concurrency limits alone. Rate is 0 then. Without NoRate, a Rate of 0
	// lets no call pass.
	NoRate bool
	// Version decides which of two contents of one name is in force in the whole fleet: the higher one. It is usually the time of the last
	// modification, in microseconds since 1970, UTC; 0 means unknown. A lower version than this process or another has loaded does not take effect: see
	// Stats.Outdated. Times within a millisecond count as one.
	Version int64
	// PerKey gives each key a bucket of its own, with this limit. A key is the part of a name that the row's name leaves open: the further
	// parts (WithParts), or the text that the * matches. With PerKey the row's name has at most 256 bytes.
	PerKey bool
	// Penalty selects the replies of an upstream that hold the bucket back: see Registry.Penalizes.
	Penalty Penalty
	// Priority of the row's calls for its rate; the zero value is tokenbucket.Normal. A call may have a lower one (gate.WithPriority), which
	// then counts, and no higher one. A row without a rate has none.
	Priority tokenbucket.Priority
	// Shadow evaluates and counts every call, and then lets it pass (WithShadow). It does so for a bad row, too.
	Shadow bool
}

// maxName is the most bytes that a bucket's name may have.
const maxName = 512

// RowError is the error of a rejected row. Nothing of the row is in force: see [WithBadRows].
type RowError struct {
	// Row identifies the row. Name is the name of its bucket, if that could be read.
	Row, Name string
	// Field is the wrong field, by its name in the table or file, and Value its value.
	Field, Value string
	// Other is another name of the same field, if the row has different values under both. It is empty otherwise.
	Other string
	// Want has the values that are accepted.
	Want string
	// Err is the error of the limiter's constructor, if that rejected the row. Field, Value and Want are empty then.
	Err error
	// Shadow reports whether the row is in shadow (Limit.Shadow), if that could be read.
	Shadow bool
	// Consequence is the outcome for calls of the name, in words. The Registry sets it.
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

// Switch turns all limits on or off. Every call asks Enabled, so it must be fast and safe for concurrent use.
type Switch interface {
	Enabled() bool
}

// Static is a Source with a fixed list of limits. [WithStrict] makes New fail if one of them is bad.
type Static []Limit

// Load implements Source.
func (s Static) Load(context.Context) (Table, error) { return Table{Limits: s}, nil }
