package tokenbucket

import (
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// sending is the state of a bucket's batches on their way to the store and back, one batch at a time (Q1). It outlives each flight.
type sending struct {
	flying   bool             // somebody is about to build the next batch, or waits for an answer
	since    time.Duration    // since when callers wait for the store: its last answer, or the first batch after a pause; see mono; 0: none do
	flight   *flight          // under way
	overdue  []*flight        // that were given up, and may still come back
	spare    *flight          // for reuse
	cached   permit.Session   // what the store remembers of the bucket: it travels with the batch (M1)
	answered *[]chan struct{} // while an answer is dealt with: who is let go after it
	buffer   []chan struct{}  // for answered
	observe  func()           // calls the observer's Trip once the lock is released; nil if there is nothing to observe
}

// flight is one batch under way, with the callers and the refunds in it.
type flight struct {
	batch   permit.Batch
	refunds []*refund // the first requests
	calls   []*call   // those of the next requests; then those who only read
	limiter *limiter
	given   int           // so many of the first requests are refunds
	leased  int64         // so many permits are asked for a lease, by the last request; 0: none
	began   time.Duration // see mono
	local   int64         // the limiter's clock then
	late    bool          // given up: another may have come back before it
}

// refund is permits on their way back to the store.
type refund struct {
	limiter *limiter
	give    permit.Refund
	line    *schedule.Schedule[*call] // whose they are; nil: a lease's
	done    chan struct{}             // closed when the store has answered; nil: nobody waits for that
	err     error
}

// settle tells what became of a refund.
func (r *refund) settle(accepted bool, err error, now int64) {
	if r.line != nil {
		r.line.Refunded(accepted, err == nil, now)
	}
	if r.err = err; r.done != nil {
		close(r.done)
	}
}

// kept tells that a lock is kept for the next batch.
func (t *sending) kept() bool { return t.cached != nil && t.cached.Kept() }

// release gives up a lock that was kept for a next batch which does not come.
func (t *sending) release() {
	if t.cached != nil {
		t.cached.Release()
	}
}

// begin notes that somebody is about to build a batch.
func (c *coordinator) begin() {
	c.sending.flying = true
	if c.sending.since == 0 { // it has not failed just now
		c.sending.since = mono()
	}
	c.startTimeouts()
}

// Depart implements [transport.Source].
func (c *coordinator) Depart() (b *permit.Batch, deadline time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.build(c.now())
	c.sending.flight, c.sending.flying = f, f != nil
	c.setAlarm()
	if f == nil {
		c.sending.since = 0
		c.sending.release()
		return nil, time.Time{}, false
	}
	return &f.batch, clock.At(f.began + c.timeout), true
}

// build makes the next batch: refunds first, then those whose turn it is. All of a batch come from one configuration. It returns nil
// when there is nothing to send.
func (c *coordinator) build(now int64) *flight {
	if !c.ready(now) {
		return nil
	}
	f := c.sending.spare
	if f == nil {
		f = &flight{}
	}
	c.sending.spare = nil
	limiter := c.first(now)
	f.limiter, f.given, f.leased, f.late, f.local, f.began = limiter, 0, 0, false, now, 0
	f.batch = permit.Batch{
		Name: c.label(), Key: c.key, Terms: &limiter.own.terms, Known: &limiter.effective().terms, Initial: limiter.initial,
		Transient: limiter.transient,
		Epoch:     newEpoch(), Requests: f.batch.Requests[:0],
		LocalMicros: c.micros,
		Session:     c.sending.cached, Keep: true,
	}
	if c.heard.server.Known() {
		micros, received := c.heard.server.Last()
		f.batch.ServerMicros, f.batch.ServerRead = micros, clock.At(received)
	}
	if c.sending.cached = nil; f.batch.Session == nil {
		f.batch.Session = new(redisbucket.Session)
	}
	if c.addRefunds(f) && c.addCalls(f, now) {
		c.addLease(f, now)
	}
	if len(f.batch.Requests)+len(f.calls) == 0 {
		c.sending.spare, c.sending.cached = f, f.batch.Session
		return nil // no lease is wanted any more
	}
	if !c.inline() {
		f.began = mono()
		f.deadline(c.timeout)
	}
	return f
}

// first is the limiter whose batch comes next.
func (c *coordinator) first(now int64) *limiter {
	if len(c.refunds) > 0 {
		return c.refunds[0].limiter
	}
	if r := c.waiters.line.Refundable(); r != nil {
		return r.Terms.(*terms).limiter
	}
	if q := c.nextCall(c.waiters.asker(now)); q != nil {
		return q.limiter
	}
	return c.leases.current.Load().limiter // for the next one
}

// addRefunds puts what goes back into a batch, and tells whether all of it fits.
func (c *coordinator) addRefunds(f *flight) (all bool) {
	n := 0
	for ; n < len(c.refunds) && len(f.batch.Requests) < permit.MaxBatch && c.refunds[n].limiter.agrees(f.limiter); n++ {
		f.addRefund(c.refunds[n])
	}
	all = n == len(c.refunds)
	c.refunds = slices.Delete(c.refunds, 0, n)
	line := c.waiters.line
	next := line.Refundable()
	if next == nil || !all {
		return all
	}
	if !next.Terms.(*terms).limiter.agrees(f.limiter) {
		return false
	}
	r := c.waiters.confirm
	if c.waiters.confirm = nil; r == nil {
		r = new(refund)
	}
	back := line.Refund()
	t := back.Terms.(*terms)
	r.line, r.limiter = line, t.limiter
	r.give = permit.Refund{Epoch: back.Epoch, Tag: back.Tag, Tail: back.Tail, Version: t.Version, To: back.To, End: back.End.Next}
	f.addRefund(r)
	return true
}

func (f *flight) addRefund(r *refund) {
	f.given++
	f.refunds = append(f.refunds, r)
	f.batch.Requests = append(f.batch.Requests, permit.Request{Op: permit.GiveBack, Back: r.give})
}

// nextCall is whose turn it is of the first order and the first of the waiters that are to be asked for: who came first. nil: nobody's.
func (c *coordinator) nextCall(w *schedule.Waiter[*call]) *call {
	c.dropLeft()
	if len(c.aside) == 0 {
		if w == nil {
			return nil
		}
		return w.Value
	}
	if q := c.aside[0]; w == nil || q.Came <= w.Came {
		return q
	}
	return w.Value
}

// addCalls puts those whose turn it is into a batch, and tells whether that is everybody.
func (c *coordinator) addCalls(f *flight, now int64) (all bool) {
	var reads []*call
	ask := asking{horizon: f.limiter.effective().horizon()}
	w := c.waiters.asker(now)
	if w != nil {
		ask.ahead, ask.stored = c.waiters.line.Ahead(now, 4*ask.horizon), c.heard.stored
	}
	q := c.nextCall(w)
	for ; q != nil && len(f.batch.Requests) < permit.MaxBatch && q.limiter.agrees(f.limiter); q = c.nextCall(w) {
		if q.verb == penalize && len(f.calls) > 0 || q.verb == reset && len(f.batch.Requests) > 0 {
			break // a penalty begins a batch, so that what an answer says of times is the whole of it; a reset, for the rest may not fit
		}
		r := permit.Request{Permits: q.Permits, MaxWaitMicros: q.remaining(now)}
		if q.line != nil {
			if w = w.Following(); !ask.more(q, &r) {
				w = nil
			}
			q.flight, q.sent = f, c.asked(q)
			f.calls = append(f.calls, q)
			f.batch.Requests = append(f.batch.Requests, r)
			continue
		}
		c.aside[0] = nil
		c.aside = c.aside[1:]
		if q.flight = f; q.verb == read {
			f.batch.Read = true
			reads = append(reads, q)
			continue
		}
		switch q.verb {
		case setRate:
			r.Op, r.Rate = permit.SetRate, q.rate
		case setRateAndBurst:
			r.Op, r.Rate, r.MaxPermits = permit.SetRateAndBurst, q.rate, q.most
		case penalize:
			r.Op, r.HoldMicros = permit.Hold, q.micros
		case reset:
			r.Op = permit.Reset
		}
		f.calls = append(f.calls, q)
		f.batch.Requests = append(f.batch.Requests, r)
	}
	f.calls = append(f.calls, reads...)
	return q == nil
}

// asked is since when a waiter waits for the store: not as long as it waits for others in front of it, or for the bucket.
func (c *coordinator) asked(q *call) time.Duration {
	if q.decided != 0 {
		return mono()
	}
	return max(q.sent, c.sending.since)
}

// asking is how much of the bucket's time a process may still ask for.
type asking struct {
	horizon int64
	stored  int64 // permits that the bucket had saved up when it was last seen: they take no time
	ahead   int64 // that the process owns, or asks for
	counted int64 // of ahead when reach was computed
	permits int64 // for which it was
	reach   int64
}

// more bounds the wait of one more request by the process's reach, and tells whether there is any use in asking for another. The reach is
// computed anew in steps, so that most requests of a batch are equal, and travel as a count.
func (a *asking) more(q *call, r *permit.Request) bool {
	s := q.limiter.effective()
	if a.permits != q.Permits || a.ahead-a.counted > a.horizon/16 {
		a.permits, a.counted, a.reach = q.Permits, a.ahead, s.reach(q.Permits, a.ahead)
	}
	q.bounded = r.MaxWaitMicros < a.reach
	r.MaxWaitMicros = min(r.MaxWaitMicros, a.reach)
	if q.promised() {
		q.bounded = false
	}
	if a.stored -= q.Permits; a.stored < 0 {
		a.ahead += s.costFromCold(min(-a.stored, q.Permits))
	}
	return a.ahead <= 2*a.horizon
}

// addLease asks for the next lease, if one is wanted.
func (c *coordinator) addLease(f *flight, now int64) {
	if len(f.batch.Requests) == 0 && !c.leases.refill {
		return
	}
	c.leases.refill = false
	if f.leased = c.wanted(f.limiter, now); f.leased > 0 {
		f.batch.Requests = append(f.batch.Requests, permit.Request{Op: permit.TakeStored, Permits: f.leased})
	}
}

// deadline is when the last of the batch's callers gives up: run later, the batch must take nothing.
func (f *flight) deadline(timeout time.Duration) {
	until := f.began
	if len(f.refunds) > 0 || f.leased > 0 {
		until = f.began + timeout
	}
	for _, q := range f.calls {
		last := q.sent + timeout
		if q.deadline != 0 {
			last = min(last, q.deadline)
		}
		until = max(until, last)
	}
	f.batch.Until = clock.At(until)
}
