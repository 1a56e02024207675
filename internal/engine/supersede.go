package engine

import (
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// A limiter is superseded by another configuration of its bucket while its callers wait. They are judged anew: the permits that the process
// owns for them were granted under the former configuration, so they go back, and the store is asked again. The waiters keep their order.
//
// The naive way leaves the waiters what they have. Then a rate that was lowered from 100/s to 1/s lets a hundred calls pass in the next second.
// Or each caller gives up and asks again. Then the callers overtake each other, and those that are last to give up hold the permits that the
// first to ask again should get.

// Supersede puts the configuration of another limiter of the same coordinator in force for the calls of a limiter, the waiting ones included.
// Operations, and reservations that were granted, keep what they have. Permits that cannot go back to the bucket lapse. prepare is called without the
// lock before the waiters ask again; it may be nil.
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

// change makes another limiter the one of the calls of a limiter. It returns the waiters, without their places in the queue.
func (c *Coordinator) change(from, to *Limiter) (waiters []*Call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if from == to || from.successor != nil || from.recalled != nil {
		return nil
	}
	from.successor = to
	c.dropLeases(from)
	now := c.Now()
	c.queue.release(now)
	for _, q := range c.outbox.aside {
		if q.limiter == from && q.asksAnew() {
			q.limiter = to
		}
	}
	waiters = c.takeBack(func(*Call) bool { return true }, now)
	for _, q := range waiters {
		if q.limiter == from {
			q.limiter = to
		}
	}
	c.View.drop()
	c.dispatch(now) // an Immediate store has the permits back when the waiters ask again
	return waiters
}

// Recall ends the waits of a limiter's callers with an error: no configuration of this coordinator decides about them any longer. If it is
// for good, later calls of the limiter end in the same way. Operations, and reservations that were granted, keep what they have.
func (c *Coordinator) Recall(from *Limiter, err error, forGood bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if forGood && from.successor == nil {
		from.recalled = err
		c.dropLeases(from)
	}
	now := c.Now()
	c.queue.release(now)
	recalled := c.takeBack(func(q *Call) bool { return q.limiter == from }, now)
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

// takeBack removes the waiters that match from the queue, and returns them in order. The permits that the process owns for them go back to the
// bucket with the next batch, if they are at its tail. What a batch in flight is granted for them goes back when it lands. mu must be held.
func (c *Coordinator) takeBack(match func(*Call) bool, now int64) (waiters []*Call) {
	q := &c.queue
	for _, s := range append(q.old[:len(q.old):len(q.old)], q.line) {
		for w := s.Head(); w != nil; w = w.Following() {
			if call := w.Value; !call.reserves() && !call.state.over() && match(call) {
				waiters = append(waiters, call)
			}
		}
	}
	if len(waiters) == 0 {
		return nil
	}
	for i := len(waiters) - 1; i >= 0; i-- { // each of them leaves the end of the line, so the waiters behind it do not move up
		w := waiters[i]
		if f := w.flight; f != nil {
			for j := range f.calls {
				if f.calls[j] == w {
					f.calls[j], f.returns = nil, true
				}
			}
			w.flight = nil
		}
		w.line.Leave(&w.Waiter, now)
		w.line = nil
	}
	q.pace.Forget()
	if q.refunder() != nil {
		c.outbox.giveBack(q.refund())
	}
	return waiters
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
	for q.limiter.successor != nil {
		q.limiter = q.limiter.successor
	}
	return q.limiter.recalled
}

// asksAnew reports whether the call is one that a Supersede or Recall ends or changes: it takes permits that it has not been granted yet.
func (q *Call) asksAnew() bool {
	return q.operation == nil && !q.charges() && q.state == pending
}

// giveBack refunds what a batch was granted for a call that no longer waits for it.
func (r *reply) giveBack(request *permit.Request) {
	r.outbox.giveBack(&refund{limiter: r.flight.limiter, give: request.Grant.Place.Refund(r.Bucket.Terms, 0, r.NowMicros)})
}
