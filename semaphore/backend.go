package semaphore

import "context"

// Backend keeps what a fleet shares of one semaphore, and is the one seam between waiting, which is this package's, and
// where the state lives: [NewRedis] has one on Redis, the module postgres one on PostgreSQL. The package semaphoretest holds
// the conformance suite that every one must pass.
//
// All times are microseconds of the backend's one clock since 1970; it is read once per batch. Ids are made by the caller,
// so every request may be sent again: what has happened already is told again.
type Backend interface {
	// Apply decides a batch as one atomic step, in the order below. If thousands of waiters are too many for one step, a backend may take
	// several steps. Each must leave a valid state, and Enter must come with the last.
	//
	// If the clock is less than two seconds behind the latest time seen, that time counts. If it is further behind, it was set back, and
	// all expiries are moved back with it. Leases that have expired end. The batch's Limit replaces the stored one if its version is
	// higher; then SetPermits and AddPermits make the next version. Leave ends its ids, whether they wait or hold. Renew prolongs leases.
	// If PatienceMicros is not 0, the process is one that waits, for so long; else it is no longer one that waits.
	//
	// If the limit has changed, all waiters that want more permits than there are in all are told TooMany. Then waiters are admitted
	// in the order of their tickets, as long as the first one fits and its process is alive. A waiter is dropped if its process was not
	// heard of for longer than its patience. If the process was not heard of for longer than AliveMicros, but not that long, the waiter
	// stays, and neither it nor anybody behind it is admitted. Each waiter gets the lease of its own process. What fits is decided by the
	// limit in force or, if that has no number, by the Permits of the waiter's process. When nobody holds anything, those who wait for
	// that (Permits 0) are admitted. Then Enter: nobody passes those who wait. Grants of other processes are told through Listen; those
	// of the batch's own process are in the Report.
	//
	// On an error it is unknown whether the batch was decided. ctx always has a deadline.
	Apply(ctx context.Context, b *Batch) (*Report, error)
	// Listen calls wake for each grant of the process until ctx ends, from one goroutine; and ready each time when it has
	// begun to listen, also anew after it had lost the connection: what happened before that may have been missed. It
	// returns ctx's error, or why it cannot go on; it is then called again.
	Listen(ctx context.Context, process string, ready func(), wake func(Grant)) error
	// Holders lists who holds permits, the longest first.
	Holders(ctx context.Context) ([]Holder, error)
	// Stats tells how the semaphore is used. Permits is 0 if the limit in force has no number. It changes nothing.
	Stats(ctx context.Context) (Stats, error)
}

// Batch is what one process asks of one semaphore in one atomic step.
type Batch struct {
	// Process names the one that asks, unique and random; Label is what Holders shows of it.
	Process, Label string
	// LeaseMicros is how long a permit lasts that is granted or renewed in this batch, or is granted later to who begins to wait in
	// it. PatienceMicros is how long the process' waiters stay in the queue after this batch, should none follow, and AliveMicros
	// for how long they may be admitted.
	LeaseMicros, PatienceMicros, AliveMicros int64
	// Permits that the process is configured with. They count for its own requests while the limit in force has no number.
	Permits int
	// Limit is the newest that the process knows of: it restores one that was lost.
	Limit Limit
	// SetPermits, if not 0, sets the number for the fleet; OwnPermits: to each process that of its configuration. AddPermits, if
	// not 0, changes the number in force by so much, unless it would be below 1 or above 2^31: then the Report is Unchanged. Not
	// both.
	SetPermits, AddPermits int
	// Deadline: later than this the batch changes nothing and its Report is Late; 0: none.
	Deadline int64
	Leave    []string
	Renew    []string
	Enter    []Entry
}

// OwnPermits is the value of Batch.SetPermits that lets the configurations of the processes count again.
const OwnPermits = -1

// Limit is how many permits there are for the whole fleet.
type Limit struct {
	// Permits, or 0: as many as each process is configured with.
	Permits int
	// Version: the highest is in force. 0: nobody has set a limit, and Permits is 0.
	Version int64
}

// Entry is one request for permits.
type Entry struct {
	ID string
	// Permits wanted; 0: until nobody holds anything.
	Permits int
	// Ticket is the place in the queue that the request had before; 0: none yet.
	Ticket int64
	// Wait: if it cannot be granted now, it queues up. Otherwise it is refused.
	Wait bool
	// Label of the permit; empty: the batch's.
	Label string
}

// Report is what became of a batch.
type Report struct {
	// Now is the time of the decision.
	Now int64
	// Late: the Deadline had passed, and nothing was done.
	Late bool
	// Fresh: the process was not known as one that waits. If it was before, its waiters must enter again.
	Fresh bool
	// Permits in force for the process, and the limit that they come from.
	Permits int
	Limit   Limit
	// Unchanged: AddPermits was not possible.
	Unchanged bool
	// Earliest is when the next lease expires; 0: nobody holds one.
	Earliest int64
	// Told is how many grants the process was sent through Listen since it was Fresh.
	Told int64
	// Left, Renewed and Entered are the answers to Leave, Renew and Enter, in their order.
	Left    []Standing
	Renewed []bool
	Entered []Answer
	// Grants of the process' own waiters in this batch.
	Grants []Grant
}

// Standing is what an id was.
type Standing uint8

// The standings.
const (
	Gone Standing = iota // unknown: never there, expired, or ended before
	Waiting
	Holding
)

// Outcome is the answer to an Entry.
type Outcome uint8

// The outcomes.
const (
	Refused Outcome = iota // it cannot be granted now
	Queued
	Granted
	TooMany // it wants more permits than there are in all
)

// Answer is what became of an Entry.
type Answer struct {
	Outcome Outcome
	// Fence of a grant: it is higher than that of every grant before, of the same name.
	Fence int64
	// Ticket of who is queued.
	Ticket int64
}

// Grant tells that a waiter was admitted, or never can be.
type Grant struct {
	ID      string
	Outcome Outcome // Granted or TooMany
	Fence   int64
	// Expires is when the lease ends.
	Expires int64
}
