package fleet

import "time"

// What one instance says of itself and of its limits, and what a Reader returns. Counters count since the instance
// started. Times that a Reader returns are by Redis' clock, whatever the clocks of the instances say.

// Bounds of what an instance says. What is beyond them is left out, and said to be: see the fields More….
const (
	// MostLimits of an instance are published.
	MostLimits = 10_000
	// MostRejected rows, MostKeys refused keys, MostRefusals, MostFaults, MostHolders of a semaphore, MostSemaphores and MostWindows are.
	MostRejected   = 100
	MostKeys       = 100
	MostRefusals   = 200
	MostFaults     = 100
	MostHolders    = 100
	MostSemaphores = 200
	MostWindows    = 200
	// MostEvents are kept for the fleet.
	MostEvents = 1000
)

// Times.
const (
	// BeatEvery is how often an instance publishes.
	BeatEvery = 2 * time.Second
	// SilentAfter is how long after its last beat an instance counts as gone: see Instance.Silent.
	SilentAfter = 7 * time.Second
	// ForgottenAfter is when what it said is no longer kept.
	ForgottenAfter = 10 * time.Minute
	// Day is how far back History and Events go, and Minute the step of History.
	Day    = 24 * time.Hour
	Minute = time.Minute
)

// Counters are what calls came to. An upstream has got Through of them. Calls that a limit in shadow would have refused are WouldRefuse,
// and not among Refused.
type Counters struct {
	// Granted by the bucket, by a lease or by the failure policy. Waited of them had to wait, WaitSum together.
	Granted int64
	Waited  int64
	WaitSum time.Duration
	// Refused by the bucket, or without one: a rate of 0, a bad row, an unknown name.
	Refused int64
	// Failed: no decision was possible.
	Failed int64
	// Passed without a bucket: the switch is off, the row is disabled, the name is unknown.
	Passed int64
	// WouldRefuse: refused in shadow, so that the call passed.
	WouldRefuse int64
	// Waits are the calls of Waited, by how long.
	Waits Histogram
}

// Histogram counts waits: element i those up to WaitBounds[i], and above the bound before; the last those beyond all.
type Histogram [len(waitBounds) + 1]int64

var waitBounds = [...]time.Duration{
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond,
	10 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second,
}

// WaitBounds are the upper bounds of a Histogram.
func WaitBounds() []time.Duration { return waitBounds[:] }

// Kind is which kind of limiter a limit has.
type Kind string

// Kinds of limits. A limit without a bucket (a rate of 0, a bad row) has none.
const (
	Bursty  Kind = "bursty"
	WarmUp  Kind = "warmup"
	Quota   Kind = "quota"
	NoLimit Kind = ""
)

// Config is the row of a limit, as this instance has read it.
type Config struct {
	Row  string `json:"row,omitempty"`
	Kind Kind   `json:"kind,omitempty"`
	// Rate of the row, in permits per second; MaxPermits of the row, 0: by default.
	Rate       float64 `json:"rate,omitempty"`
	MaxPermits float64 `json:"max,omitempty"`
	// Warmup and ColdFactor are for WarmUp: see Curve.
	Warmup     time.Duration `json:"warmup,omitempty"`
	ColdFactor float64       `json:"cold,omitempty"`
	// Wait is how long a call may wait for its permit.
	Wait time.Duration `json:"wait,omitempty"`
	// Window: at most WindowLimit calls begin in any such time. Concurrent calls may be under way at once. 0: any number.
	Window      time.Duration `json:"window,omitempty"`
	WindowLimit int           `json:"window_limit,omitempty"`
	Concurrent  int           `json:"concurrent,omitempty"`
	// NoRate: there is no rate. PerKey: each key has a bucket of its own.
	NoRate  bool  `json:"no_rate,omitempty"`
	PerKey  bool  `json:"per_key,omitempty"`
	Version int64 `json:"version,omitempty"`
	Shadow  bool  `json:"shadow,omitempty"`
}

// Bucket is what a bucket was like when this instance looked last. It looks at those that are in use.
type Bucket struct {
	// At is when it looked; zero: never, and only Rate may be set.
	At time.Time
	// Rate in force, in permits per second; 0: not known.
	Rate float64
	// Stored permits, of Max that can be.
	Stored, Max float64
	// HeldUntil is when a penalty ends; zero, or past: there is none.
	HeldUntil time.Time
}

// Waiting are those who wait in this instance now.
type Waiting struct {
	Count int
	// Since is when the oldest of them came; zero: nobody waits.
	Since time.Time
}

// Limit is what one instance says of one limit.
type Limit struct {
	Name string
	// Decider tells what decides about its calls, as gate.Decider.String does: limit, switch, disabled, zero,
	// bad_row, unknown, shadow, window, concurrency.
	Decider string
	Counters
	Config  Config
	Bucket  Bucket
	Waiting Waiting
}

// Info is what an instance says of itself.
type Info struct {
	Host    string `json:"host,omitempty"`
	PID     int    `json:"pid,omitempty"`
	Version string `json:"version,omitempty"` // of the program
	// Started by Redis' clock, once it is read.
	Started time.Time `json:"-"`
	Loads   Loads     `json:"loads,omitzero"`
	Switch  Switch    `json:"switch,omitzero"`
	Store   Store     `json:"store,omitzero"`
	// Rejected rows, and how many more there are.
	Rejected     []Rejected `json:"rejected,omitempty"`
	MoreRejected int        `json:"more_rejected,omitempty"`
	// Refused keys, those refused most first.
	Refused []Key `json:"refused,omitempty"`
	// Refusals of limits, by what refuses, the most frequent first. An instance of an older version has none.
	Refusals   []Refusal   `json:"refusals,omitempty"`
	Semaphores []Semaphore `json:"semaphores,omitempty"`
	Windows    []Window    `json:"windows,omitempty"`
	// Faults that last (registry.Fault).
	Faults []Fault `json:"faults,omitempty"`
	// Others are the calls of names that have no limit of their own here. They have no history.
	Others Counters `json:"others,omitzero"`
	// MoreLimits are not published: there are more than MostLimits.
	MoreLimits int `json:"more_limits,omitempty"`
	// Crowded: so many names of limits came and went since the instance started that new ones have no counters of their own, but are
	// counted with Others.
	Crowded bool `json:"crowded,omitempty"`
	// Missed is what could not be published, and no longer will be.
	Missed Missed `json:"missed,omitzero"`
}

// Loads tell how an instance reads its limits.
type Loads struct {
	Tried  int `json:"tried,omitempty"`
	Failed int `json:"failed,omitempty"`
	// Last is when limits were read last; Err is why they could not be since.
	Last time.Time `json:"last,omitzero"`
	Err  string    `json:"err,omitempty"`
	// Limits in force; Bad names, and Held limits whose rows are gone.
	Limits int `json:"limits,omitempty"`
	Bad    int `json:"bad,omitempty"`
	Held   int `json:"held,omitempty"`
	// Gone limits of the Before that the table had, since then: it has lost more than half of them, and that is not confirmed. Names
	// are some of them. They are in force if there are Held ones.
	Gone   int       `json:"gone,omitempty"`
	Before int       `json:"before,omitempty"`
	Lost   time.Time `json:"lost,omitzero"`
	Names  string    `json:"names,omitempty"`
}

// Switch is the fleet's switch as an instance has read it.
type Switch struct {
	// Known: there is one. Off: every call passes, since then.
	Known  bool      `json:"known,omitempty"`
	Off    bool      `json:"off,omitempty"`
	Since  time.Time `json:"since,omitzero"`
	Origin string    `json:"origin,omitempty"`
	// Read is when it was read last; Err is why it could not be since.
	Read time.Time `json:"read,omitzero"`
	Err  string    `json:"err,omitempty"`
}

// Store is how an instance finds the store of its buckets.
type Store struct {
	// Kind is script, lock or memory; Policy is what calls get while it is away: closed, open, share.
	Kind   string `json:"kind,omitempty"`
	Policy string `json:"policy,omitempty"`
	// Down since then, for that reason.
	Down  bool      `json:"down,omitempty"`
	Since time.Time `json:"since,omitzero"`
	Err   string    `json:"err,omitempty"`
	// Outages since the instance started, the present one included, and how long those took that have ended.
	Outages int           `json:"outages,omitempty"`
	Away    time.Duration `json:"away,omitempty"`
}

// Rejected is a row that an instance could not put in force.
type Rejected struct {
	Row         string `json:"row,omitempty"`
	Name        string `json:"name,omitempty"`
	Field       string `json:"field,omitempty"`
	Value       string `json:"value,omitempty"`
	Want        string `json:"want,omitempty"`
	Err         string `json:"err,omitempty"` // why, if no field is wrong by itself
	Consequence string `json:"consequence,omitempty"`
}

// Key is who was refused: the limit, and the key of the call if that is another word. Its count is at most Count, and at least
// Count − Error.
type Key struct {
	Limit string `json:"limit,omitempty"`
	Key   string `json:"key,omitempty"`
	Count int64  `json:"count"`
	Error int64  `json:"error,omitempty"`
}

// Refusal counts the calls of a limit that were refused By one of its bounds: as gate.Decider has it, limit is its rate. A call in
// shadow is not refused.
type Refusal struct {
	Limit string `json:"limit"`
	By    string `json:"by"`
	Count int64  `json:"count"`
}

// Fault is a bucket, a window or a concurrency that cannot be used until a person repairs it: its Calls have failed since then.
type Fault struct {
	Limit  string    `json:"limit,omitempty"`
	Bucket string    `json:"bucket,omitempty"`
	By     string    `json:"by"` // limit, window or concurrency
	Err    string    `json:"err,omitempty"`
	Since  time.Time `json:"since,omitzero"`
	Calls  int64     `json:"calls"`
}

// Semaphore is how a semaphore is used, in the whole fleet.
type Semaphore struct {
	Name    string `json:"name"`
	Permits int    `json:"permits"`
	Used    int    `json:"used,omitempty"`
	Waiting int    `json:"waiting,omitempty"`
	Version int64  `json:"version,omitempty"`
	// Holders, the longest first, and how many more there are.
	Holders     []Holder `json:"holders,omitempty"`
	MoreHolders int      `json:"more_holders,omitempty"`
}

// Holder holds permits of a semaphore.
type Holder struct {
	Fence   int64     `json:"fence"`
	Label   string    `json:"label,omitempty"`
	Permits int       `json:"permits"`
	Since   time.Time `json:"since,omitzero"`
	Expires time.Time `json:"expires,omitzero"`
}

// Window is how much of a sliding window is used.
type Window struct {
	Name   string        `json:"name"`
	Limit  int64         `json:"limit"`
	Used   int64         `json:"used,omitempty"`
	Length time.Duration `json:"length,omitempty"`
}

// Missed is what an instance could not publish.
type Missed struct {
	// Beats that failed, and why the last one did.
	Beats int64  `json:"beats,omitempty"`
	Err   string `json:"err,omitempty"`
	// Gap is the time whose calls are in the counters, but in no minute of the history.
	Gap time.Duration `json:"gap,omitempty"`
	// Events that were dropped since there were too many at once.
	Events int64 `json:"events,omitempty"`
}

// Instance is one instance of the fleet, as it was at its last beat.
type Instance struct {
	ID string
	Info
	// Beat is when it published last, for the Beats-th time.
	Beat  time.Time
	Beats int64
	// Ended: it said that it ends.
	Ended bool
	// Limits by name. They are not to be changed: snapshots share those that have not.
	Limits map[string]*Limit
}

// Snapshot is the fleet at a time.
type Snapshot struct {
	// At is Redis' clock when it was read.
	At time.Time
	// Instances that have published in the last ten minutes, the oldest first: also those that have ended, or died.
	Instances []Instance
	// Skipped is what could not be read: it was not written by a Publisher of this version.
	Skipped []*DataError
}

// Point is a minute of a limit's history.
type Point struct {
	// Minute begins then.
	Minute time.Time
	// Published: at least one instance has published in this minute. If none has, the point says nothing.
	Published bool
	// Counts of all instances.
	Granted, Waited, Refused, Failed, Passed, WouldRefuse int64
	WaitSum                                               time.Duration
	// Rate in force, in permits per second; 0: not known.
	Rate float64
}

// EventKind is what happened.
type EventKind string

// Kinds of events.
const (
	LimitAdded     EventKind = "added"
	LimitChanged   EventKind = "changed"
	LimitRemoved   EventKind = "removed"
	Penalized      EventKind = "penalty"
	StoreDown      EventKind = "store_down"
	StoreBack      EventKind = "store_back"
	SwitchOff      EventKind = "switch_off"
	SwitchOn       EventKind = "switch_on"
	LoadFailed     EventKind = "load_failed"
	LoadedAgain    EventKind = "loaded_again"
	InstanceBegins EventKind = "begins"
	InstanceEnds   EventKind = "ends"
	LimitReset     EventKind = "reset"
	LossConfirmed  EventKind = "confirmed"
)

// noticed tells whether it is something that one instance has noticed of itself or of its upstream, and Event.Host is that instance's.
func (k EventKind) noticed() bool {
	switch k {
	case Penalized, StoreDown, StoreBack, LoadFailed, LoadedAgain:
		return true
	}
	return false
}

// Event is what changed when, as a mark on a chart. What concerns the whole fleet is told once, whoever noticed.
type Event struct {
	At   time.Time `json:"-"`
	Kind EventKind `json:"kind"`
	// Limit that it is about; empty: all.
	Limit string `json:"limit,omitempty"`
	// Instance that noticed; empty: it concerns the whole fleet.
	Instance string `json:"instance,omitempty"`
	Host     string `json:"host,omitempty"`
	// Version, and From and To what the limit was changed (5/s, saves up 5, waits up to 500 ms).
	Version int64  `json:"version,omitempty"`
	From    string `json:"from,omitempty"`
	To      string `json:"to,omitempty"`
	// For is how long a penalty holds, or an outage lasted.
	For time.Duration `json:"for,omitempty"`
	// Err is what went wrong; of a switch, who turned it.
	Err string `json:"err,omitempty"`
	// Who did it, and Why, if that was a person at a console (Announce).
	Who string `json:"who,omitempty"`
	Why string `json:"why,omitempty"`
}

// DataError is content of a key in Redis that no Publisher has written.
type DataError struct {
	// Key, and the field of it; empty: all of it.
	Key, Field string
	// Why it cannot be read.
	Why string
}

func (e *DataError) Error() string {
	if e.Field == "" {
		return "fleet: key " + quote(e.Key) + ": " + e.Why
	}
	return "fleet: key " + quote(e.Key) + ", field " + quote(e.Field) + ": " + e.Why
}
