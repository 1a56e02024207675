package engine

import (
	"slices"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// A limiter is superseded by another configuration of its bucket while its callers wait. The process owns time of the bucket for them, and goes on
// owning it: from now on that time has as many permits as the new configuration makes of it ([schedule.Schedule.Recut]). The waiters keep their order.
//
// The naive way leaves the waiters what they have. Then a rate that was lowered from 100/s to 1/s lets a hundred calls pass in the next second.
// Or what they have goes back, and the store is asked again. Then all is lost behind which another process has taken permits, up to a horizon's.
//
// It does go back where the time of before means nothing under the new configuration, see keeps. Then no waiter asks again before all have given up:
// those that are last to give up would hold the permits that the first to ask again should get.

// Supersede puts the configuration of another limiter of the same coordinator in force for the calls of a limiter, the waiting ones included.
// Operations, and reservations that were granted, keep what they have. prepare is called without the lock before the waiters ask again; it may be nil.
func (c *Coordinator) Supersede(from, to *Limiter, prepare func()) {
	waiters := c.change(from, to)
	if prepare != nil {
		prepare()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.Now()
	c.queue.rejoinAll(waiters, now)
	c.dispatch(now)
}

// change makes another limiter the one of the calls of a limiter. It returns the waiters that have given up their places in the queue.
func (c *Coordinator) change(from, to *Limiter) (waiters []*Call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if from == to || from.successor != nil || from.recalled != nil {
		return nil
	}
	from.successor = to
	from.Replaced.Store(true)
	c.dropLeases(from)
	now := c.Now()
	c.queue.release(now)
	for _, q := range c.outbox.aside {
		if q.limiter == from && q.asksAnew() {
			q.limiter = to
		}
	}
	all := c.queue.waiters(func(*Call) bool { return true })
	for _, q := range all {
		if q.limiter == from {
			q.limiter = to
		}
	}
	if c.queue.recut(from, to, now) { // it ends those that would be too late: they may be calls of others by now
		c.detach(c.queue.waiters(func(*Call) bool { return true }), from.Rarer(to))
	} else {
		waiters = c.takeBack(all, now)
	}
	c.View.drop()
	c.dispatch(now) // an Immediate store has the permits back when the waiters ask again
	return waiters
}

// recut puts the bucket's time that the process owns under the configuration of a limiter's successor. It reports false, and changes nothing, if that
// time does not serve the waiters. The bucket is of another kind, and is reset. Or calls become rarer, and are those of a quota, whose windows a stretch
// of the former one may cross, or reservations are among them, which keep their due times.
func (q *queue) recut(from, to *Limiter, now int64) bool {
	inForce := q.view.grantedBy(to, to.Effective())
	firm := q.line.Firm() || slices.ContainsFunc(q.old, (*schedule.Schedule[*Call]).Firm)
	if from.Own.WarmsUp != inForce.WarmsUp || (inForce.WarmsUp || from.Rarer(to)) && (firm || to.Quota) {
		return false
	}
	convert := func(t schedule.Terms, at permit.Balance, now int64) (schedule.Terms, permit.Balance) {
		g := t.(*granted)
		if g.Same(inForce.Terms) || g.WarmsUp != inForce.WarmsUp {
			return t, at
		}
		if g.WarmsUp { // it is as cold as before
			at.Stored = min(inForce.Max, at.Stored*inForce.Max/g.Max)
		}
		at.Next = max(at.Next, now-int64(inForce.Interval)) // of what has passed no more than one permit is due at once
		return inForce, at
	}
	q.pace.Forget()
	if q.view.terms != nil {
		q.view.terms = inForce // so that the next grants continue what is owned
	}
	q.line.Recut(now, convert)
	for _, s := range q.old {
		s.Recut(now, convert)
	}
	q.refuseExpired(now)
	return true
}

// Rarer reports whether permits fall due more rarely under the configuration of a limiter's successor than those that were granted before.
func (l *Limiter) Rarer(to *Limiter) bool {
	return to.Effective().Interval > min(l.Own.Interval, l.Effective().Interval)
}

// Recall ends the waits of a limiter's callers with an error: no configuration of this coordinator decides about them any longer. If it is
// for good, later calls of the limiter end in the same way. Operations, and reservations that were granted, keep what they have.
func (c *Coordinator) Recall(from *Limiter, err error, forGood bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if forGood && from.successor == nil {
		from.recalled = err
		from.Replaced.Store(true)
		c.dropLeases(from)
	}
	now := c.Now()
	c.queue.release(now)
	recalled := c.queue.waiters(func(q *Call) bool { return q.limiter == from })
	recalled = c.takeBack(recalled, now)
	asks := func(q *Call) bool { return q != nil && q.limiter == from && q.line == nil && q.asksAnew() }
	for _, q := range c.outbox.aside { // reservations. They stay until their turn, as those whose callers have left
		if asks(q) {
			recalled = append(recalled, q)
		}
	}
	if f := c.inFlight.flight; f != nil {
		for i, q := range f.calls {
			if asks(q) && q.flight == f {
				f.calls[i], f.returns = nil, true
				recalled = append(recalled, q)
			}
		}
	}
	for _, q := range recalled {
		q.state = left // for the batch
	}
	c.View.drop()
	c.dispatch(now)
	for _, q := range recalled { // as late as possible: they ask again, and an Immediate store has the permits back
		q.state = pending
		c.callers.end(q, failed, err)
	}
}

// Reinstate lets a limiter that was superseded or recalled decide again.
func (c *Coordinator) Reinstate(l *Limiter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.successor, l.recalled = nil, nil
	l.Replaced.Store(false)
}

// dropLeases ends the leases of a limiter, which takes no more of them. mu must be held.
func (c *Coordinator) dropLeases(l *Limiter) {
	if l.Prefetch == 0 {
		return
	}
	l.Closed.Store(true)
	var sent []*refund
	if f := c.inFlight.flight; f != nil {
		sent = f.refunds
	}
	c.leases.close(l, sent)
}

// waiters returns the waiters that match, in order. Reservations are none.
func (q *queue) waiters(match func(*Call) bool) (all []*Call) {
	for _, s := range append(q.old[:len(q.old):len(q.old)], q.line) {
		for w := s.Head(); w != nil; w = w.Following() {
			if call := w.Value; !call.reserves() && !call.state.over() && match(call) {
				all = append(all, call)
			}
		}
	}
	return all
}

// detach removes waiters from the flight that asks for them. What it is granted for them goes back when it lands, or is for all waiters. mu must be held.
func (c *Coordinator) detach(waiters []*Call, returns bool) {
	for _, w := range waiters {
		f := w.flight
		if f == nil {
			continue
		}
		for i := range f.calls {
			if f.calls[i] == w {
				f.calls[i], f.returns = nil, f.returns || returns
			}
		}
		w.flight = nil
	}
}

// takeBack removes waiters from the queue, and returns them. The permits that the process owns for them go back to the bucket with the next batch,
// if they are at its tail. Waiters whose time ends meanwhile are not returned: dispatch refuses them, and their callers may reuse them. mu must be held.
func (c *Coordinator) takeBack(waiters []*Call, now int64) (removed []*Call) {
	if len(waiters) == 0 {
		return nil
	}
	c.detach(waiters, true)
	for _, w := range slices.Backward(waiters) { // each of them leaves the end of the line, so the waiters behind it do not move up
		if w.Waits() {
			w.line.Leave(&w.Waiter, now)
			w.line = nil
			removed = append(removed, w)
		}
	}
	slices.Reverse(removed)
	q := &c.queue
	q.pace.Forget()
	if q.refunder() != nil {
		c.outbox.giveBack(q.refund())
	}
	return removed
}

// rejoinAll adds waiters to the queue, in order and in front of those that have come since. Permits that the process owns are not for them.
func (q *queue) rejoinAll(waiters []*Call, now int64) {
	if len(waiters) == 0 {
		return
	}
	if q.line.Last() != 0 {
		q.split()
	}
	for w := q.line.Uncovered(); w != nil; w = q.line.Uncovered() {
		q.line.Leave(w, now)
		waiters = append(waiters, w.Value)
	}
	for _, w := range waiters {
		if w.state.over() { // its caller has left meanwhile
			continue
		}
		w.sent = clock.Mono()
		q.line.Join(&w.Waiter)
		w.line = q.line
	}
	q.line.AskNow()
}

// followed moves a newcomer to the limiter that has superseded its own. It returns the error of a newcomer whose limiter was recalled. mu must be
// held.
func (c *Coordinator) followed(q *Call) error {
	if q.operation != nil || q.charges() {
		return nil
	}
	q.limiter = q.limiter.inForce()
	return q.limiter.recalled
}

// inForce returns the limiter that has superseded another, or that itself.
func (l *Limiter) inForce() *Limiter {
	for l.successor != nil {
		l = l.successor
	}
	return l
}

// asksAnew reports whether the call is one that a Supersede or Recall ends or changes: it takes permits that it has not been granted yet.
func (q *Call) asksAnew() bool {
	return q.operation == nil && !q.charges() && q.state == pending
}

// giveBack refunds what a batch was granted for a call that no longer waits for it.
func (r *reply) giveBack(request *permit.Request) {
	r.outbox.giveBack(&refund{limiter: r.flight.limiter, give: request.Grant.Place.Refund(r.Bucket.Terms, 0)})
}
