package engine

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Coordinator is this process's side of one bucket, for callers of one class. All limiters of one name, store, clock, store timeout and
// priority share one.
//
// Invariants:
//   - Waiters are served first come, first served; in turns, those of one tenant are. Only reservations do not wait behind waiters (Q2).
//   - The store alone decides whether a request is granted, in one atomic step with the rest of its batch.
//   - Every caller has a result within the store timeout after it began to wait for the store (Q5).
//
// Goroutines exist only while a batch is in flight. Each caller waits on a channel of its own; the alarm serves all of them.
//
// It is safe for concurrent use. mu guards all parts; each part says which of its fields are read without it.
type Coordinator struct {
	Config
	clocks
	transport.Place

	View      View
	newcomers atomic.Uint32 // a Passage, and wants
	leases    leases

	mu        sync.Mutex
	callers   callers
	queue     queue
	outbox    outbox
	inFlight  inFlight
	alarm     alarm
	listening listening
	deadlines deadlines
	share     localShare
}

// New returns the coordinator of a bucket.
func New(config Config) *Coordinator {
	c := &Coordinator{Config: config, clocks: clocks{clock.New(config.Clock), config.Immediate}}
	c.View.init(c.Local, config.Timing)
	c.callers.config = &c.Config
	c.queue.init(c.System(), c.Class, &c.callers, &c.View)
	if c.Order == InTurns {
		c.queue.serveInTurns()
	}
	c.inFlight.init(&c.Config, &c.View, c.Micros)
	c.outbox = outbox{queue: &c.queue, leases: &c.leases, view: &c.View}
	c.leases.queue, c.leases.view, c.leases.outbox = &c.queue, &c.View, &c.outbox
	if c.Immediate {
		return c
	}
	c.deadlines = deadlines{config: &c.Config, clock: c.Local, queue: &c.queue, outbox: &c.outbox, inFlight: &c.inFlight}
	c.listening = listening{queue: &c.queue, outbox: &c.outbox, leases: &c.leases, view: &c.View}
	if c.Trips == nil {
		c.Trips = &Trips{Send: c.decideOne, Max: 1, Parallel: 1, Panicked: c.panicked}
	}
	c.Health.serves(c.Timeout)
	return c
}

// Submit queues a call. The returned channel is closed when the call ends: its permits are due, or it was refused or failed. For a
// reservation it is closed as soon as the store has decided. If the context cannot be cancelled, the batch may be sent in the goroutine of the caller.
func (c *Coordinator) Submit(ctx context.Context, q *Call) (answered <-chan struct{}) {
	answered = q.ready
	if q.promise != nil {
		answered = q.promise.answer
	}
	if c.accept(ctx, q) {
		c.Trips.Take(ctx, c.route(), c)
	}
	return answered
}

// accept adds a call to the queue or the outbox. It reports whether the caller is to send the batch itself.
func (c *Coordinator) accept(ctx context.Context, q *Call) (take bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.callers.count++
	if err := c.followed(q); err != nil {
		c.callers.end(q, failed, err)
		return false
	}
	if c.callers.count > q.limiter.MaxWaiters && q.operation == nil && !q.charges() {
		c.callers.end(q, failed, q.limiter.tooManyWaiters())
		return false
	}
	if n, full := c.queue.turns.full(q, q.limiter.MaxWaiters-c.callers.count); full {
		c.callers.end(q, failed, q.limiter.tooManyOfTenant(q.turn.Tenant, n))
		return false
	}
	at := c.moment()
	now := at.local
	q.sent, q.Came = at.mono, now
	if q.operation == nil && (!q.reserves() || c.queue.offers()) {
		c.queue.join(q, now)
	}
	if q.state == pending && q.line == nil {
		c.outbox.aside = append(c.outbox.aside, q)
	}
	if !c.inFlight.busy && ctx.Done() == nil && !c.Immediate && c.outbox.only(q) && c.ready(now) {
		c.inFlight.begin()
		c.deadlines.start(c)
		return true
	}
	c.dispatch(now)
	return false
}

// dispatch sends what there is to send, unless a batch is in flight, and sets the alarm. mu must be held.
func (c *Coordinator) dispatch(now int64) {
	if c.Immediate {
		for f := c.build(now); f != nil; f = c.build(c.Now()) {
			c.decide(f)
		}
	} else if o := c.Down(); c.inFlight.busy && o != nil {
		c.failAll(o) // callers that have arrived since need not wait for the flight
		c.advance(now)
	} else if c.inFlight.busy {
		c.advance(now)
	} else if c.ready(now) || c.inFlight.kept() { // if a lock is kept, Depart is called even with nothing to send, and releases it
		c.inFlight.begin()
		c.deadlines.start(c)
		c.Trips.Ready(c.route(), c)
	} else {
		c.inFlight.since = 0
	}
	c.setAlarm()
}

// decide has an Immediate store decide a flight. mu must be held. Callers are woken after the whole reply is settled, because a call is reused once
// its caller has the result, and the reply may still name it.
func (c *Coordinator) decide(f *flight) {
	err := c.Store.Decide(context.Background(), &f.batch)
	answered := c.inFlight.buffer[:0]
	c.callers.answered = &answered
	c.deliver(f, &f.batch.Outcome, err, c.moment())
	c.callers.answered = nil
	for _, ready := range answered {
		close(ready)
	}
	clear(answered)
	c.inFlight.buffer = answered
}

// ready serves all callers that need no batch. It reports whether there is anything to send. mu must be held.
func (c *Coordinator) ready(now int64) bool {
	c.advance(now)
	c.outbox.dropLeft()
	if o := c.Down(); o != nil {
		c.failAll(o)
		return false
	}
	c.leases.serve(now)
	some := c.outbox.holds(now) || c.listening.due(now) != nil
	c.queue.refuseExpired(now) // holds may prepare a refund and take permits from waiters, which are then too late
	return some
}

// advance ends the calls that are due, grants spare permits, and reviews the leases. mu must be held.
func (c *Coordinator) advance(now int64) {
	c.queue.release(now)
	if c.outbox.offerSpare(now) {
		c.queue.release(now) // the reservations may be due first
	}
	c.leases.reviewNow(now)
	c.queue.yields = c.queue.line.Yield(now)
}

// setAlarm sets the alarm, and what newcomers may do. mu must be held.
func (c *Coordinator) setAlarm() {
	if c.queue.line.Spare() { // a waiter may have left it that was refused because it came too late; the next caller may take it
		c.View.drop()
	}
	p := uint32(c.outbox.passage())
	if c.queue.line.Uncovered() != nil {
		p |= wants
	}
	if p != c.newcomers.Load() {
		c.newcomers.Store(p)
	}
	r := reasons{due: c.queue.due, review: c.leases.review, yield: c.queue.yields}
	if !c.inFlight.busy {
		if at, ok := c.queue.line.AskAt(); ok {
			r.ask = max(1, at)
		}
		r.listen = c.listening.next()
	}
	c.alarm.set(c, r)
}

// Ring is called by the alarm.
func (c *Coordinator) Ring() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.alarm.at = 0
	c.dispatch(c.Now())
}

// Passage is what a newcomer may do without the queue.
type Passage uint32

const (
	// Free: the bucket may decide at once. There are no waiters, the process owns no permits, and there are no refunds (S2).
	Free Passage = iota
	// Refusals: waiters are ahead, so the bucket may refuse at once, but not grant.
	Refusals
	// Queue: the newcomer may get permits that the process owns or refunds, or must wait for an operation.
	Queue
)

// String returns free, refusals or queue.
func (p Passage) String() string { return [...]string{"free", "refusals", "queue"}[p] }

// wants is set in newcomers while there are uncovered waiters.
const wants = 1 << 8

// Passage returns what a newcomer may do without the queue.
func (c *Coordinator) Passage() Passage { return Passage(c.newcomers.Load() &^ wants) }

// Wants reports whether callers wait for whom the process owns no permits. It takes no lock.
func (c *Coordinator) Wants() bool { return c.newcomers.Load()&wants != 0 }

// Yields reports whether callers of a higher class want permits of the bucket in this process, so that stored permits are left to them. It
// takes no lock. During an outage the bucket has nothing to leave.
func (c *Coordinator) Yields() bool {
	for higher := Normal; higher < c.Class; higher++ {
		if h := c.Peer(higher); h != nil && h.Wants() {
			return c.Down() == nil
		}
	}
	return false
}

// Wait waits for the result of a call that was submitted. If the context ends first, the call is abandoned.
func (c *Coordinator) Wait(ctx context.Context, q *Call, answered <-chan struct{}) Result {
	if cancelled := ctx.Done(); cancelled == nil {
		<-answered
	} else {
		select {
		case <-answered:
		default:
			select {
			case <-answered:
			case <-cancelled:
				if c.leave(q, ctx.Err()) {
					return Result{Err: ctx.Err()}
				}
			}
		}
	}
	if q.promise != nil { // its permits may lapse meanwhile
		c.mu.Lock()
		defer c.mu.Unlock()
	}
	return q.result()
}

// Seen returns the bucket after the last decision about a reservation. It is not part of the Result, which is returned in registers.
func (c *Coordinator) Seen(q *Call) Seen {
	c.mu.Lock()
	defer c.mu.Unlock()
	return q.promise.seen
}

// leave abandons a call. Waiters behind it move up; what is granted to it later and no waiter wants is refunded. It reports false if the
// call has ended before.
func (c *Coordinator) leave(q *Call, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if q.state.over() {
		return false
	}
	now := c.Now()
	c.queue.release(now)
	if q.state.over() {
		return false
	}
	c.queue.abandon(q, now)
	q.err = err
	c.dispatch(now)
	return true
}

// Cancel gives back the permits of a reservation that are not due yet, unless it has ended. It waits for the store's reply if they are refunded.
func (c *Coordinator) Cancel(ctx context.Context, q *Call) error {
	c.mu.Lock()
	r := c.cancel(q)
	c.mu.Unlock()
	return r.confirmed(ctx, &c.Config, "cancel")
}

// cancel gives up a reservation and returns its refund; nil if none is sent now. mu must be held.
func (c *Coordinator) cancel(q *Call) *refund {
	now := c.Now()
	c.queue.release(now)
	if q.state != waiting || !q.promise.end.Claim(permit.GivenBack) { // permits that are due are used, and may be settled
		return nil
	}
	c.queue.abandon(q, now) // ready stays open, because a cancelled reservation never falls due
	return c.sendBack(q, now)
}

// sendBack sends permits back that a reservation has given up, and returns their refund; nil if none is sent now. mu must be held.
func (c *Coordinator) sendBack(q *Call, now int64) (r *refund) {
	if c.inFlight.flight == nil && q.line == c.queue.line && c.queue.line.Refundable() != nil {
		r = c.queue.confirmation()
	}
	c.dispatch(now)
	return r
}

// Return gives back the permits of a reservation even if they were due at once, for a call that did not begin.
func (c *Coordinator) Return(ctx context.Context, q *Call) error {
	return c.returned(q).confirmed(ctx, &c.Config, "cancel")
}

// returned gives up a reservation and returns its refund; nil if none is sent now.
func (c *Coordinator) returned(q *Call) (r *refund) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := q.promise
	switch {
	case p.lease == nil && p.unused == nil:
		return c.cancel(q)
	case !p.end.Claim(permit.GivenBack):
		return nil
	case p.lease != nil:
		p.lease.putBack(q.Permits)
		return nil
	}
	r = &refund{limiter: q.limiter, give: *p.unused, done: make(chan struct{})}
	c.outbox.giveBack(r)
	c.View.drop() // the next caller may have the permits
	c.dispatch(c.Now())
	return r
}

// FromLease takes permits of a lease, unless there are waiters. It returns nil if there is no lease that has them.
func (c *Coordinator) FromLease(l *Limiter, n int64) *Leased {
	e := c.leases.current.Load()
	if e == nil || l.Prefetch == 0 || c.Passage() != Free || e.limiter != l && !e.limiter.Own.Same(l.Own) {
		return nil
	}
	ok, low := e.take(n, c.Now())
	if low {
		c.mu.Lock()
		c.leases.refill = true
		c.dispatch(c.Now())
		c.mu.Unlock()
	}
	if !ok {
		return nil
	}
	return (*Leased)(e)
}

// Leased is a lease from which permits were taken.
type Leased lease

// Origin returns the origin of its permits.
func (e *Leased) Origin() permit.Origin { return e.place.Origin() }

// Reserved returns a reservation of n permits that were taken, and the bucket after that.
func (e *Leased) Reserved(l *Limiter, n int64) (*Call, Seen) {
	q := Reserved(l, e.Origin(), nil)
	q.Permits, q.promise.lease = n, (*lease)(e)
	return q, (*lease)(e).seen(l.Coordinator.Now())
}

// CloseLeases gives back the leases of a limiter, and waits for the reply. It reports whether another lease may be on its way.
func (c *Coordinator) CloseLeases(ctx context.Context, l *Limiter) (coming bool, err error) {
	l.Closed.Store(true)
	last, coming := c.closeLeases(l)
	return coming, last.confirmed(ctx, &c.Config, "close")
}

func (c *Coordinator) closeLeases(l *Limiter) (last *refund, coming bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var sent []*refund
	if f := c.inFlight.flight; f != nil {
		coming = f.leased > 0 && f.limiter == l
		sent = f.refunds
	}
	last = c.leases.close(l, sent)
	c.dispatch(c.Now())
	return last, coming
}

// HeardLately reports whether this process knows the configuration in force: the last reply is younger than SnapshotAge, or the store is
// unavailable.
func (c *Coordinator) HeardLately() bool {
	if c.Down() != nil {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.View.heardLately(c.Now())
}

// Delay returns how long after its decision the permits of a reservation are due, in microseconds.
func (c *Coordinator) Delay(q *Call) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	due := q.due
	if q.state == waiting {
		if at, covered := q.line.DueOf(&q.Waiter); covered {
			due = at
		}
	}
	return max(0, due-q.decided)
}

// Ready returns the channel that is closed when the permits of a reservation are due.
func (q *Call) Ready() <-chan struct{} { return q.ready }

// Coordinator returns the coordinator of the call.
func (q *Call) Coordinator() *Coordinator { return q.limiter.Coordinator }

// State is the state of a coordinator, for gauges and tests. Times are in limiter microseconds.
type State struct {
	Calls     int           // in progress
	Waiting   bool          // the queue is not empty
	Longest   time.Duration // for which the head of the queue has waited; in turns, the tenant's head that came first
	HeadDue   int64         // when the permits of the head are due; 0 if the process owns none for it
	LastDue   int64         // when the last permit that the process owns is due; 0 if it owns none
	Uncovered int           // waiters for which the process owns no permits
	Idle      bool          // nothing waits, is owned or is refunded
	Epochs    int           // earlier epochs with waiters
	Busy      bool          // a batch is about to be built, or in flight
	InFlight  bool          // a batch is in flight
	Overdue   int           // batches without a reply by their deadline
	Refunds   int           // of leases and of Return that wait for a batch
	AlarmAt   int64         // when the alarm rings; 0 if it is not set
	Lease     bool          // there is a lease
	LeaseUsed float64       // share of its permits that are used
	Leased    int64         // permits of leases that are not used
	InUse     int64         // of these, permits of the current lease
	leases    *leases
	now       int64
	Overruled bool // see differences
}

// Inspect calls f with the state, while the coordinator is locked: nothing happens in it before f returns.
func (c *Coordinator) Inspect(f func(State)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now, q, lease := c.Now(), &c.queue, c.leases.current.Load()
	s := State{
		Calls: c.callers.count, LastDue: q.last(), Idle: q.line.Idle(), Epochs: len(q.old), Busy: c.inFlight.busy,
		InFlight: c.inFlight.flight != nil, Overdue: len(c.inFlight.overdue), Refunds: len(c.outbox.refunds), AlarmAt: c.alarm.at,
		Lease: lease != nil, Leased: lease.unused(now) + c.leases.next.unused(now), InUse: lease.unused(now), Overruled: c.View.differences.overruled,
		leases: &c.leases, now: now,
	}
	if lease != nil {
		s.LeaseUsed = float64(lease.used.Load()) / float64(lease.permits)
	}
	if first := q.head(); first != nil && !first.state.over() { // a charge at the head is nobody's wait
		s.Waiting, s.Longest = true, time.Duration(now-q.longest(first))*time.Microsecond
		s.HeadDue, _ = first.line.DueOf(&first.Waiter)
	}
	for w := q.line.Uncovered(); w != nil; w = w.Following() {
		s.Uncovered++
	}
	f(s)
}

// LeasedFor returns how many permits of the leases of a limiter are not used.
func (s State) LeasedFor(l *Limiter) (unused int64) {
	for _, e := range []*lease{s.leases.current.Load(), s.leases.next} {
		if e != nil && e.limiter == l {
			unused += e.unused(s.now)
		}
	}
	return unused
}

// Result returns the result of a call, and whether the call is over.
func (c *Coordinator) Result(q *Call) (r Result, over bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return q.result(), q.state.over()
}

// LapseOverdue makes permits lapse that are overdue by more than 100 ms, as they do by the system's clock. It is for tests whose clock does
// not jump.
func (c *Coordinator) LapseOverdue() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue.line.Strict = true
}
