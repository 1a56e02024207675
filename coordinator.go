package tokenbucket

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jonboulle/clockwork"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// A coordinator is this process's end of one bucket. All limiters of one name, store, clock and store timeout share one.
//
// What must hold: first come, first served, whatever the verb, except Reserve (Q2); one atomic decision of the store for every permit.
// The naive way, a round trip for each call, makes a hot bucket as slow as its store. So calls line up here: at most one batch is
// under way (Q1), and the calls that come meanwhile share the next one. If nothing is under way, a call is sent at once. Each batch is
// one atomic decision, so sharing is exact.
//
// No goroutine lives longer than a batch is under way. Each caller waits on a channel of its own. One timer, the alarm, serves all of
// them, so thousands of callers may wait at no cost.
type coordinator struct {
	target
	transport.Place

	// Read without the lock, written under it.
	known    atomic.Pointer[setting]      // the newest versioned configuration that an answer brought; nil: none
	snapshot atomic.Pointer[snapshot]     // the bucket as last seen, for refusing without asking; nil: not known
	slot     atomic.Pointer[memoryBucket] // the bucket in a MemoryStore; nil: not looked for yet
	occupied atomic.Uint32                // what who comes would find: see occupancy
	leases   leases

	mu       sync.Mutex
	calls    int     // that were made and have not ended
	aside    []*call // calls that do not stand in the line: what takes nothing, and reservations. One whose caller has left stays until its turn
	waiters  waiters
	refunds  []*refund // of leases, and what somebody waits for
	heard    heard
	listens  bool // it is counted in listeners
	sending  sending
	alarm    alarm
	timeouts timeouts
	fallback fallback
}

// heard is what the store's answers have told.
type heard struct {
	at       int64 // when it answered last, or was to; by the limiter's clock, as all times here
	told     int64 // when an answer told of the bucket and its configuration last: a late one does not
	epoch    int64 // the bucket's
	penalty  schedule.Penalty
	heldTill int64        // until when it is held back
	free     int64        // from when on it owes nothing
	stored   int64        // permits that it had saved up; 0 if it is not bursty, for then they take time, too
	offset   clock.Offset // of the limiter's clock to the store's
	server   clock.Remote
	terms    *terms // under which it granted last
	conflict int64  // the version whose disagreement was reported

	overruled bool // reported that a limiter's own configuration is not in force, or SetRate in this process is why
}

// submit lines a call up. Its channels tell when it is answered. A caller whose context cannot be cancelled may take the batch to the
// store itself.
func (c *coordinator) submit(ctx context.Context, q *call) {
	if c.accept(ctx, q) {
		c.trips.Take(ctx, c.route(), c)
	}
}

// accept puts a call into the line of waiters or aside, and tells whether its caller is to take the batch to the store.
func (c *coordinator) accept(ctx context.Context, q *call) (take bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls >= q.limiter.maxWaiters && q.verb.takes() { // an upstream's Retry-After comes when many wait
		c.calls++
		c.end(q, failed, q.limiter.crowded())
		return false
	}
	c.calls++
	at := c.moment()
	now := at.local
	q.sent, q.Came = at.mono, now
	if q.verb.takes() && (q.verb != reserve || c.waiters.line.Spare()) {
		c.join(q, now)
	}
	if q.state == pending && q.line == nil {
		c.aside = append(c.aside, q)
	}
	if c.traits.trips != nil && !c.sending.flying && ctx.Done() == nil && c.alone(q) && c.ready(now) {
		c.begin()
		return true
	}
	c.dispatch(now)
	return false
}

// alone tells that a call is the only one here.
func (c *coordinator) alone(q *call) bool {
	first := c.waiters.line.Head()
	return q.state == pending && (first == nil && len(c.aside) == 1 || first == &q.Waiter && q.Following() == nil && len(c.aside) == 0)
}

// dispatch sends what there is to send, unless somebody is about to, and sets the alarm for what comes next.
func (c *coordinator) dispatch(now int64) {
	if c.inline() {
		for f := c.build(now); f != nil; f = c.build(c.now()) {
			err := c.traits.memory.decide(&f.batch)
			c.deliver(f, &f.batch.Outcome, err, c.moment())
		}
	} else if o := c.down(); c.sending.flying && o != nil {
		c.failAll(o) // whoever has come since need not wait for what is under way
		c.advance(now)
	} else if c.sending.flying {
		c.advance(now)
	} else if c.ready(now) || c.sending.kept() { // a Depart that finds nothing to send releases the lock
		c.begin()
		c.trips.Ready(c.route(), c)
	} else {
		c.sending.since = 0
	}
	c.setAlarm()
}

// ready lets everybody go on who can without the store, and tells whether there is anything left to send.
func (c *coordinator) ready(now int64) bool {
	c.advance(now)
	c.dropLeft()
	if o := c.down(); o != nil {
		c.failAll(o)
		return false
	}
	c.serveFromLease(now)
	c.listen(now)
	some := len(c.aside) > 0 || len(c.refunds) > 0 || c.leases.refill || c.waiters.asks(now) || c.waiters.line.Refundable() != nil
	c.refuseExpired(now) // to find what can go back shows who comes too late
	return some
}

// advance lets go who is due, hands out what is left over, and reviews the leases.
func (c *coordinator) advance(now int64) {
	c.release(now)
	if c.offerSpare(now) {
		c.release(now) // they may be due first
	}
	c.reviewLeases(now)
}

// offerSpare lets the reservations that are to leave with the next batch have what this process owns and nobody wants, in order: who
// comes next would get it before them. It tells whether any joined the line.
func (c *coordinator) offerSpare(now int64) (joined bool) {
	for len(c.aside) > 0 && c.waiters.line.Spare() {
		if q := c.aside[0]; !q.state.over() {
			if q.verb != reserve {
				break
			}
			if c.join(q, now); q.line == nil && q.state == pending {
				break
			}
			joined = true
		}
		c.aside[0] = nil
		c.aside = c.aside[1:]
	}
	return joined
}

// dropLeft forgets the calls aside whose callers have gone.
func (c *coordinator) dropLeft() {
	n := 0
	for n < len(c.aside) && c.aside[n].state.over() {
		c.aside[n] = nil
		n++
	}
	c.aside = c.aside[n:]
}

const (
	// listenMicros is how long a process that holds permits of a later time, or waits for them, goes without an answer, before it
	// looks whether the bucket is held back, or was begun anew.
	listenMicros = 500_000

	// listenShare times the number of such buckets in the process is how long that is if it is longer. So a process asks at most 2,000 times a
	// second; for 10,000 buckets it would ask 20,000 times.
	listenShare = 500
)

// listeners is how many buckets of this process listen.
var listeners atomic.Int64

// listenInterval returns after what time without an answer a bucket is asked for its state, in microseconds.
func listenInterval() int64 { return max(listenMicros, listenShare*listeners.Load()) }

// countListening keeps the number of listeners. While a batch is under way it may wait: the next reply counts.
func (c *coordinator) countListening() {
	listens := c.listening() != nil
	switch {
	case listens && !c.listens:
		listeners.Add(1)
	case !listens && c.listens:
		listeners.Add(-1)
	}
	c.listens = listens
}

// listen asks for the bucket's state if nothing was heard of it for long.
func (c *coordinator) listen(now int64) {
	if len(c.aside) > 0 || c.waiters.asks(now) || now-c.heard.at < listenInterval() {
		return
	}
	if limiter := c.listening(); limiter != nil {
		c.calls++
		c.aside = append(c.aside, &call{limiter: limiter, verb: read, order: new(order), sent: mono(), ready: make(chan struct{})})
	}
}

// listening is the limiter for which permits of a later time are held, or waited for; nil: none, or the store is no other process's.
func (c *coordinator) listening() *limiter {
	if c.inline() {
		return nil
	}
	if q := c.waiters.any(); q != nil {
		return q.limiter
	}
	if e := c.leases.current.Load(); e != nil {
		return e.limiter
	}
	return nil
}

// leave takes a caller out who gives up, wherever it is. Those behind it move up. What it is granted meanwhile, and what nobody
// behind it wants, goes back. It reports false if the call was answered before.
func (c *coordinator) leave(q *call, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if q.state.over() {
		return false
	}
	now := c.now()
	c.release(now)
	if q.state.over() {
		return false
	}
	c.abandon(q, now)
	q.err = err
	c.dispatch(now)
	return true
}

// cancel gives back what a reservation holds, if its time has not come, and returns the refund if the caller is to wait for it.
func (c *coordinator) cancel(q *call) *refund {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	c.release(now)
	if q.state != waiting {
		return nil
	}
	c.abandon(q, now) // and ready stays open: a cancelled reservation never falls due
	var r *refund
	if c.sending.flight == nil && q.line == c.waiters.line && c.waiters.line.Refundable() != nil {
		r = c.waiters.confirmation()
	}
	c.dispatch(now)
	return r
}

// returnUnused sends the permits of a reservation back that were due at once, and returns the refund. It returns nil if they were not, or
// were sent back before.
func (c *coordinator) returnUnused(q *call) *refund {
	c.mu.Lock()
	defer c.mu.Unlock()
	if q.unused == nil {
		return nil
	}
	r := &refund{limiter: q.limiter, give: *q.unused, done: make(chan struct{})}
	q.unused = nil
	c.refunds = slices.Insert(c.refunds, 0, r)
	c.dropSnapshot() // the next caller may have them
	c.dispatch(c.now())
	return r
}

// confirmed waits until the store has answered a refund, but no longer than it may take to.
func (c *coordinator) confirmed(ctx context.Context, r *refund, verb string) error {
	if r == nil {
		return nil
	}
	select {
	case <-r.done:
		return c.failure(r.err)
	default:
	}
	timeout := time.NewTimer(c.timeout)
	defer timeout.Stop()
	select {
	case <-r.done:
		return c.failure(r.err)
	case <-ctx.Done():
		return ctx.Err()
	case <-timeout.C:
		return c.failure(fmt.Errorf("%w: bucket %q: %s was not answered within %v", ErrStoreTimeout, c.label(), verb, c.timeout))
	}
}

// abandon takes a call out whose caller has gone.
func (c *coordinator) abandon(q *call, now int64) {
	c.calls--
	q.state = left
	if q.line != nil {
		if q.Waits() && !q.Covered() {
			c.served(q, now, now) // those behind it come sooner
		}
		q.line.Leave(&q.Waiter, now)
	}
	c.dropSnapshot()
}

// end tells a caller what its call has come to.
func (c *coordinator) end(q *call, s callState, err error) {
	if q.state.over() {
		return
	}
	c.calls--
	q.state, q.err, q.shared = s, err, q.flight != nil
	q.tellDecided()
	if c.sending.answered != nil {
		*c.sending.answered = append(*c.sending.answered, q.ready)
	} else {
		close(q.ready)
	}
}

// tellDecided lets the caller of a reservation go on.
func (q *call) tellDecided() {
	if q.promise != nil && q.answer != nil {
		close(q.answer)
		q.answer = nil
	}
}

// refuse ends a call that will not be granted.
func (c *coordinator) refuse(q *call, wait int64) {
	q.wait = wait
	c.end(q, refused, nil)
}

// fail ends a call that the store has failed, unless it must ask once more.
func (c *coordinator) fail(q *call, err error) {
	if q.promised() {
		if now := c.now(); !q.covered() && !away(err) && !notAsked(err) { // the others need not wait for what may never be
			q.line.Leave(&q.Waiter, now)
			q.line.Join(&q.Waiter)
		}
		c.waiters.line.AskAfter(c.now() + retryMicros)
		return
	}
	if q.state.over() || q.covered() {
		return
	}
	if q.line != nil {
		q.line.Leave(&q.Waiter, c.now())
	}
	c.end(q, failed, c.failure(err))
}

// retryMicros is how long reservations wait that were promised permits, and have asked for them in vain.
const retryMicros = 100_000

// What a new caller would find.
const (
	lineFree  uint32 = iota // nobody waits, nothing is owned and nothing goes back: the bucket may decide at once
	lineBusy                // it gets nothing before what the bucket has next
	lineSpare               // it may get what this process owns or gives back, or must wait for an order: it lines up
)

// alarm is the timer for whatever comes first: somebody is due, asks again, listens, or a lease ends.
type alarm struct {
	timer clockwork.Timer
	at    int64 // 0: not set
}

// setAlarm sets it, and lets newcomers know what they would find.
func (c *coordinator) setAlarm() {
	if c.waiters.line.Spare() { // somebody was refused, perhaps, for whom it came too late: the next caller may have it
		c.dropSnapshot()
	}
	occupied := c.occupancy()
	if occupied != c.occupied.Load() {
		c.occupied.Store(occupied)
	}
	next := c.waiters.due
	sooner := func(at int64) {
		if at != 0 && (next == 0 || at < next) {
			next = at
		}
	}
	if !c.sending.flying {
		if at, ok := c.waiters.line.AskAt(); ok {
			sooner(max(1, at))
		}
		if c.countListening(); c.listens {
			sooner(c.heard.at + listenInterval())
		}
	}
	sooner(c.leases.review)
	a := &c.alarm
	if next == a.at {
		return
	}
	a.at = next
	switch wait := time.Duration(next-c.now()) * time.Microsecond; {
	case next == 0:
		a.timer.Stop()
	case a.timer == nil:
		a.timer = c.clock.AfterFunc(wait, c.onAlarm)
	default:
		a.timer.Reset(wait)
	}
	if !c.time.System() && next != 0 && c.now() >= next {
		a.timer.Reset(0) // a clock that jumps, as a test's does, may have passed by the timer before it was set
	}
}

// onAlarm lets go whoever is due, and sends the batch of those who ask again.
func (c *coordinator) onAlarm() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.alarm.at = 0
	c.dispatch(c.now())
}
