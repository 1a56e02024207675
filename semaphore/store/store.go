// Package store is the seam between the semaphores of package semaphore, which queue and wait in a process, and the place where the permits
// of a fleet are kept. semaphore.NewRedis has a store in Redis, the module postgres one in PostgreSQL. The author of another store needs this
// package; callers of a semaphore do not. semaphore.New makes semaphores of a store, and the package semaphoretest holds the conformance
// suite that every store must pass.
package store

import (
	"context"
	"fmt"
	"time"
)

// Store keeps the state that a fleet shares of one semaphore.
//
// All times are microseconds since 1970 by the store's own clock, which it reads once per batch. Ids are made by the process, so every
// request may be sent again, and is then answered as before.
//
// Errors that mean that the store cannot serve now wrap semaphore.ErrStoreUnavailable. A state that cannot be read is a
// semaphore.ErrCorruptState.
type Store interface {
	// Apply decides a batch as one atomic step, in the order below. If thousands of waiters are too many for one step, a store may take
	// several (see [Batch.InSteps]). Each must leave a valid state, and Enter must come with the last.
	//
	//  1. Clock. If the clock is up to two seconds behind the latest time seen, that time counts. If it is further behind, it was set back:
	//     all expiries are moved back with it.
	//  2. Leases that have expired end.
	//  3. Limit replaces the stored limit if its version is higher. Then SetPermits and AddPermits make the next version.
	//  4. Leave removes its ids, whether they wait or hold. Renew prolongs leases.
	//  5. Patience. If PatienceMicros is not 0, the process has waiters, and this is a sign of life. Otherwise it has none any more.
	//  6. If the limit has changed, all waiters that want more permits than there are in all get TooMany.
	//  7. Admission. Waiters are admitted in the order of their tickets, as long as the first one fits and its process is alive. A process
	//     is alive for AliveMicros after its last sign of life. A waiter of a silent process stays until the patience of its process is
	//     over, and no waiter behind it is admitted; then it is dropped. The limit in force decides whether a waiter fits or, if that has no
	//     number, the Permits of the waiter's process. A waiter gets the lease of its own process.
	//  8. If no permit is held, the requests that wait for that (Permits 0) are admitted.
	//  9. Enter: no request passes those that wait.
	//
	// Grants to waiters of other processes are sent through Listen; those to waiters of the batch's own process are in the Report.
	//
	// ctx always has a deadline. After an error it is unknown whether the batch was decided, unless the error is a [Partial].
	Apply(ctx context.Context, b *Batch) (*Report, error)
	// Listen calls wake for each grant to a waiter of the process until ctx ends, from one goroutine. It calls ready each time it begins to
	// receive, also after it has lost its connection and has made another: grants may have been missed before. It returns ctx's error,
	// or why it cannot go on; it is then called again.
	Listen(ctx context.Context, process string, ready func(), wake func(Grant)) error
	// Holders returns the holders of permits, the oldest first.
	Holders(ctx context.Context) ([]Holder, error)
	// Stats returns the use of the semaphore. Permits is 0 if the limit in force has no number. Stats changes nothing.
	Stats(ctx context.Context) (Stats, error)
}

// Batch holds the requests of one process to one semaphore that are decided in one atomic step.
type Batch struct {
	// Process is the unique, random name of the process; Label is what Holders shows of it.
	Process, Label string
	// LeaseMicros is the lease of permits that are granted or renewed in this batch, and of those that are granted later to waiters that
	// enter with it. PatienceMicros is how long the waiters of the process stay in the queue if no other batch follows. AliveMicros is how
	// long they may be admitted.
	LeaseMicros, PatienceMicros, AliveMicros int64
	// Permits is the number that the process is configured with. It decides the requests of the process while the limit in force has no
	// number.
	Permits int
	// Limit is the newest limit that the process knows. It restores one that the store has lost.
	Limit Limit
	// SetPermits, if not 0, sets the number for the fleet; with OwnPermits each process uses the number that it is configured with.
	// AddPermits, if not 0, is added to the number in force. If the sum is below 1 or above 2^31, nothing changes, and the Report is
	// Unchanged. At most one of the two is set.
	SetPermits, AddPermits int
	// Deadline is the latest time at which the batch may be decided. After it the batch changes nothing, and its Report is Late. If it is 0, there is none.
	Deadline int64
	// Leave and Renew are ids of requests.
	Leave, Renew []string
	Enter        []Entry
}

// OwnPermits is the value of Batch.SetPermits that puts the numbers that the processes are configured with in force again.
const OwnPermits = -1

// Limit is the number of permits for the whole fleet.
type Limit struct {
	// Permits, or 0: as many as each process is configured with.
	Permits int
	// Version: the highest is in force. If it is 0, no limit was set, and Permits is 0.
	Version int64
}

// Entry is one request for permits.
type Entry struct {
	ID string
	// Permits wanted. A request for 0 waits until no permit is held, and takes none.
	Permits int
	// Ticket is the place that the request had in the queue before; 0 if it had none.
	Ticket int64
	// Wait: the request queues if it cannot be granted now. Otherwise it is refused.
	Wait bool
	// Label of the permit; if empty, the batch's.
	Label string
}

// Report holds the results of a batch.
type Report struct {
	// Now is the time of the decision.
	Now int64
	// Late: the Deadline had passed, and nothing was done.
	Late bool
	// Fresh: the store knew of no waiters of the process. If it had any, they must enter again.
	Fresh bool
	// Permits in force for the process, and the limit that sets them.
	Permits int
	Limit   Limit
	// Unchanged: the number with AddPermits would be out of range.
	Unchanged bool
	// Earliest is when the next lease expires; 0 if no permit is held.
	Earliest int64
	// Notified counts the grants that were sent to the process through Listen since it was Fresh.
	Notified int64
	// Left, Renewed and Entered are the results of Leave, Renew and Enter, in their order.
	Left    []Standing
	Renewed []bool
	Entered []Result
	// Grants to waiters of the process itself in this batch.
	Grants []Grant
}

// Standing is the state of an id before it left.
type Standing uint8

// The standings.
const (
	Gone Standing = iota // unknown: never entered, expired, or left before
	Waiting
	Holding
)

// String returns gone, waiting or holding.
func (s Standing) String() string { return name(s, "gone", "waiting", "holding") }

// Outcome is the decision about an Entry.
type Outcome uint8

// The outcomes.
const (
	Refused Outcome = iota // it cannot be granted now
	Queued
	Granted
	TooMany // it wants more permits than there are in all
)

// String returns refused, queued, granted or too many.
func (o Outcome) String() string { return name(o, "refused", "queued", "granted", "too many") }

func name[T ~uint8](value T, names ...string) string {
	if int(value) < len(names) {
		return names[value]
	}
	return fmt.Sprintf("unknown (%d)", uint8(value))
}

// Result is the result of an Entry.
type Result struct {
	Outcome Outcome
	// Fence of a grant. It is higher than those of all grants before, of the same semaphore.
	Fence int64
	// Ticket of a queued request.
	Ticket int64
}

// Grant ends the wait of a request in the queue.
type Grant struct {
	ID      string
	Outcome Outcome // Granted or TooMany
	Fence   int64
	// Expires is when the lease ends.
	Expires int64
}

// Holder is one holder of permits.
type Holder struct {
	ID      string
	Permits int
	Fence   int64
	// Since and Expires are when the permits were granted, and when the lease ends.
	Since, Expires time.Time
	// Label of the permit or, if it has none, of its process.
	Label string
}

// Stats is the use of a semaphore.
type Stats struct {
	// Permits of the limit in force, and its version. Both are 0 if none was set.
	Permits int
	Version int64
	// Used permits are held, by the whole fleet.
	Used int
	// Waiting is the number of requests in the queue, of the whole fleet.
	Waiting int
}
