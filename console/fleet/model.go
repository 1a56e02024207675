package fleet

import "time"

// What an instance publishes about itself and its limits, and what a Reader returns. Counters count since the instance
// started. Times that a Reader returns are by Redis' clock, whatever the instances' clocks show.

// Bounds of what an instance publishes. The rest is omitted and counted in the fields More….
const (
	// MostLimits bounds the limits of an instance.
	MostLimits = 10_000
	// The same for rejected rows, refused keys, refusals, priorities, faults, holders of a semaphore, semaphores and windows.
	MostRejected   = 100
	MostKeys       = 100
	MostRefusals   = 200
	MostPriorities = 200
	MostFaults     = 100
	MostHolders    = 100
	MostSemaphores = 200
	MostWindows    = 200
	// MostEvents bounds the events kept for the fleet.
	MostEvents = 1000
)

// Times.
const (
	// BeatEvery is the interval at which an instance publishes.
	BeatEvery = 2 * time.Second
	// SilentAfter is how long after its last beat an instance counts as gone: see Instance.Silent.
	SilentAfter = 7 * time.Second
	// ForgottenAfter is how long Redis keeps what an instance has published.
	ForgottenAfter = 10 * time.Minute
	// Day is how far back History and Events go. Minute is the step of History.
	Day    = 24 * time.Hour
	Minute = time.Minute
)

// Counters count calls by their outcome. Through is the sum of those that went on to the upstream. WouldRefuse are calls that
// a shadow limit would have refused; they are not in Refused.
type Counters struct {
	// Granted by the bucket, by a lease or by the failure policy. Waited of them had to wait, for WaitSum in total.
	Granted int64
	Waited  int64
	WaitSum time.Duration
	// Refused by the bucket, or without one: a rate of 0, a rejected row, an unknown name.
	Refused int64
	// Failed without a decision.
	Failed int64
	// Passed without a bucket: the switch is off, the row is disabled, or the name is unknown.
	Passed int64
	// WouldRefuse counts calls that passed only because the limit is in shadow.
	WouldRefuse int64
	// Waits is the distribution of the waits counted by Waited.
	Waits Histogram
}

// Histogram counts waits. Element i has those above WaitBounds[i-1] and up to WaitBounds[i]; the last one those above all
// bounds.
type Histogram [len(waitBounds) + 1]int64

var waitBounds = [...]time.Duration{
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond,
	10 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second,
}

// WaitBounds returns the upper bounds of a Histogram.
func WaitBounds() []time.Duration { return waitBounds[:] }

// Kind is the kind of a limit's bucket.
type Kind string

// Kinds of limits. NoLimit is that of a limit without a bucket (a rate of 0, a rejected row).
const (
	Bursty  Kind = "bursty"
	WarmUp  Kind = "warmup"
	Quota   Kind = "quota"
	NoLimit Kind = ""
)

// Config is the row of a limit, as the instance has read it.
type Config struct {
	Row  string `json:"row,omitempty"`
	Kind Kind   `json:"kind,omitempty"`
	// Rate of the row, in permits per second, and MaxPermits of the row; 0 for the default.
	Rate       float64 `json:"rate,omitempty"`
	MaxPermits float64 `json:"max,omitempty"`
	// Warmup and ColdFactor of a WarmUp limit: see Curve.
	Warmup     time.Duration `json:"warmup,omitempty"`
	ColdFactor float64       `json:"cold,omitempty"`
	// Wait is how long a call may wait for its permit.
	Wait time.Duration `json:"wait,omitempty"`
	// At most WindowLimit calls begin in any Window, and at most Concurrent calls are in progress at once; 0 for no bound.
	Window      time.Duration `json:"window,omitempty"`
	WindowLimit int           `json:"window_limit,omitempty"`
	Concurrent  int           `json:"concurrent,omitempty"`
	// ConcurrentWait is how long a call may wait for a place among them.
	ConcurrentWait time.Duration `json:"concurrent_wait,omitempty"`
	// NoRate is set if the row has no rate, PerKey if each key has a bucket of its own.
	NoRate  bool  `json:"no_rate,omitempty"`
	PerKey  bool  `json:"per_key,omitempty"`
	Version int64 `json:"version,omitempty"`
	Shadow  bool  `json:"shadow,omitempty"`
}

// Bucket is the last state of a bucket that the instance has read. It reads buckets that are in use.
type Bucket struct {
	// At is when it was read; zero if it never was, and then only Rate may be set.
	At time.Time
	// Rate in force, in permits per second; 0 if not known.
	Rate float64
	// Stored permits, and their maximum.
	Stored, Max float64
	// HeldUntil is when a penalty ends; zero or past without one.
	HeldUntil time.Time
}

// Waiting counts the waiters of this instance.
type Waiting struct {
	Count int
	// Since is when the oldest began to wait; zero without waiters.
	Since time.Time
}

// Limit is the state of one limit in one instance.
type Limit struct {
	Name string
	// Decider is what decides about its calls, as returned by gate.Decider.String: limit, switch, disabled, zero, bad_row,
	// unknown, shadow, window, concurrency.
	Decider string
	Counters
	Config  Config
	Bucket  Bucket
	Waiting Waiting
}

// Info is what an instance publishes about itself.
type Info struct {
	Host    string `json:"host,omitempty"`
	PID     int    `json:"pid,omitempty"`
	Version string `json:"version,omitempty"` // of the program
	// Started is by Redis' clock when read by a Reader.
	Started time.Time `json:"-"`
	Loads   Loads     `json:"loads,omitzero"`
	Switch  Switch    `json:"switch,omitzero"`
	Store   Store     `json:"store,omitzero"`
	// Rejected rows, and the number of those omitted.
	Rejected     []Rejected `json:"rejected,omitempty"`
	MoreRejected int        `json:"more_rejected,omitempty"`
	// Refused keys, the most refused first.
	Refused []Key `json:"refused,omitempty"`
	// Refusals of limits by what refuses, the most frequent first. Instances of older versions have none.
	Refusals []Refusal `json:"refusals,omitempty"`
	// Priorities of limits that have calls below Normal, those with the most calls first. Instances of older versions have none.
	Priorities []Priority  `json:"priorities,omitempty"`
	Semaphores []Semaphore `json:"semaphores,omitempty"`
	Windows    []Window    `json:"windows,omitempty"`
	// Faults that last (registry.Fault).
	Faults []Fault `json:"faults,omitempty"`
	// Others counts calls of names without a limit of their own. They have no history.
	Others Counters `json:"others,omitzero"`
	// MoreLimits is the number of limits beyond MostLimits, which are not published.
	MoreLimits int `json:"more_limits,omitempty"`
	// Crowded is set if new names are counted in Others, because too many names of limits came and went since the instance
	// started.
	Crowded bool `json:"crowded,omitempty"`
	// Missed is what could not be published and never will be.
	Missed Missed `json:"missed,omitzero"`
}

// Loads describes the loads of limits.
type Loads struct {
	Tried  int `json:"tried,omitempty"`
	Failed int `json:"failed,omitempty"`
	// Last is when limits were last loaded. Err is why loads have failed since.
	Last time.Time `json:"last,omitzero"`
	Err  string    `json:"err,omitempty"`
	// Limits in force, Bad rows, and Held limits whose rows are gone.
	Limits int `json:"limits,omitempty"`
	Bad    int `json:"bad,omitempty"`
	Held   int `json:"held,omitempty"`
	// Gone of the Before limits have vanished from the table since Lost: more than half, without confirmation. Names has some
	// of them. They are still in force if Held is positive.
	Gone   int       `json:"gone,omitempty"`
	Before int       `json:"before,omitempty"`
	Lost   time.Time `json:"lost,omitzero"`
	Names  string    `json:"names,omitempty"`
}

// Switch is the fleet's switch as an instance has read it.
type Switch struct {
	// Known is set if there is a switch. Off means that every call passes, since Since.
	Known  bool      `json:"known,omitempty"`
	Off    bool      `json:"off,omitempty"`
	Since  time.Time `json:"since,omitzero"`
	Origin string    `json:"origin,omitempty"`
	// Read is when it was last read. Err is why it could not be read since.
	Read time.Time `json:"read,omitzero"`
	Err  string    `json:"err,omitempty"`
}

// Store is the state of an instance's store.
type Store struct {
	// Kind is script, lock or memory. Policy is the failure policy: closed, open or share.
	Kind   string `json:"kind,omitempty"`
	Policy string `json:"policy,omitempty"`
	// Down since Since, because of Err.
	Down  bool      `json:"down,omitempty"`
	Since time.Time `json:"since,omitzero"`
	Err   string    `json:"err,omitempty"`
	// Outages since the instance started, the present one included, and the total length of those that have ended.
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
	Err         string `json:"err,omitempty"` // set if no single field is wrong
	Consequence string `json:"consequence,omitempty"`
}

// Key is a refused key of a limit; Key is empty if it is the limit's name. The true count is at most Count, and at least
// Count − Error.
type Key struct {
	Limit string `json:"limit,omitempty"`
	Key   string `json:"key,omitempty"`
	Count int64  `json:"count"`
	Error int64  `json:"error,omitempty"`
}

// Refusal counts the calls of a limit that one of its bounds has refused. By is a name of gate.Decider: limit is the rate.
// Calls in shadow are not refused.
type Refusal struct {
	Limit string `json:"limit"`
	By    string `json:"by"`
	Count int64  `json:"count"`
}

// Priority counts the calls of a limit that the rate has decided with one priority below tokenbucket.Normal. They are in the Counters of the
// Limit, too. Name is that of the priority: low or lowest.
type Priority struct {
	Limit    string   `json:"limit"`
	Name     string   `json:"priority"`
	Counters Counters `json:"counters"`
	// Waiting is the number of its waiters.
	Waiting int `json:"waiting,omitempty"`
}

// Fault is a bucket, window or concurrency that cannot be used until a person repairs it. Calls have failed since Since.
type Fault struct {
	Limit  string    `json:"limit,omitempty"`
	Bucket string    `json:"bucket,omitempty"`
	By     string    `json:"by"` // limit, window or concurrency
	Err    string    `json:"err,omitempty"`
	Since  time.Time `json:"since,omitzero"`
	Calls  int64     `json:"calls"`
}

// Semaphore is the use of a semaphore in the whole fleet.
type Semaphore struct {
	Name    string `json:"name"`
	Permits int    `json:"permits"`
	Used    int    `json:"used,omitempty"`
	Waiting int    `json:"waiting,omitempty"`
	Version int64  `json:"version,omitempty"`
	// Holders, the longest-holding first, and the number of those omitted.
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

// Window is the use of a sliding window.
type Window struct {
	Name   string        `json:"name"`
	Limit  int64         `json:"limit"`
	Used   int64         `json:"used,omitempty"`
	Length time.Duration `json:"length,omitempty"`
}

// Missed counts what an instance could not publish.
type Missed struct {
	// Beats that failed, and the error of the last one.
	Beats int64  `json:"beats,omitempty"`
	Err   string `json:"err,omitempty"`
	// Gap is the total time whose calls are in the counters but in no minute of the history.
	Gap time.Duration `json:"gap,omitempty"`
	// Events dropped because there were too many at once.
	Events int64 `json:"events,omitempty"`
}

// Instance is one instance of the fleet, as of its last beat.
type Instance struct {
	ID string
	Info
	// Beat is when it last published, for the Beats-th time.
	Beat  time.Time
	Beats int64
	// Ended is set if it ended in an orderly way.
	Ended bool
	// Limits by name. Do not change them: snapshots share unchanged limits.
	Limits map[string]*Limit
}

// Snapshot is the state of the fleet at one time.
type Snapshot struct {
	// At is Redis' clock at the reading.
	At time.Time
	// Instances that have published in the last ten minutes, the oldest first, including those that have ended or died.
	Instances []Instance
	// Skipped has the data that could not be decoded, because no Publisher of this version wrote it.
	Skipped []*DataError
}

// Point is a minute of a limit's history.
type Point struct {
	// Minute is the beginning of the minute.
	Minute time.Time
	// Published is set if at least one instance has published in this minute. Otherwise the point has no data.
	Published bool
	// Sums over all instances.
	Granted, Waited, Refused, Failed, Passed, WouldRefuse int64
	WaitSum                                               time.Duration
	// Rate in force, in permits per second; 0 if not known.
	Rate float64
}

// EventKind is the kind of an event.
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

// noticed reports whether the event is one that an instance noticed about itself or its upstream. Event.Host is then that
// instance's.
func (k EventKind) noticed() bool {
	switch k {
	case Penalized, StoreDown, StoreBack, LoadFailed, LoadedAgain:
		return true
	}
	return false
}

// Event is a change, shown as a mark on a chart. An event of the whole fleet is recorded once, even if several instances
// report it.
type Event struct {
	At   time.Time `json:"-"`
	Kind EventKind `json:"kind"`
	// Limit is the limit concerned; empty for all.
	Limit string `json:"limit,omitempty"`
	// Instance that noticed it; empty if it concerns the whole fleet.
	Instance string `json:"instance,omitempty"`
	Host     string `json:"host,omitempty"`
	// Version of the row, and the row before and after a change (5/s, saves up 5, waits up to 500 ms).
	Version int64  `json:"version,omitempty"`
	From    string `json:"from,omitempty"`
	To      string `json:"to,omitempty"`
	// For is how long a penalty holds, or an outage lasted.
	For time.Duration `json:"for,omitempty"`
	// Err is the error; for the switch, its origin.
	Err string `json:"err,omitempty"`
	// Who is the person at a console who did it, and Why the reason (Announce); empty otherwise.
	Who string `json:"who,omitempty"`
	Why string `json:"why,omitempty"`
}

// DataError is data in Redis that could not be decoded, because no Publisher wrote it.
type DataError struct {
	// Key is the key, and Field its field; empty for the whole key.
	Key, Field string
	// Why is the error.
	Why string
}

func (e *DataError) Error() string {
	if e.Field == "" {
		return "fleet: key " + quote(e.Key) + ": " + e.Why
	}
	return "fleet: key " + quote(e.Key) + ", field " + quote(e.Field) + ": " + e.Why
}
