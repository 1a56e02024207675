package engine

import (
	"time"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// Land implements [transport.Source]. Callers are woken after the lock is released, so that they do not find it held when they ask again,
// and all of them see everything that the reply has brought. The observer is called without the lock too: it may block, or panic.
func (c *Coordinator) Land(b *permit.Batch, out *permit.Outcome, err error, late bool) {
	answered, observe := c.settled(b, out, err, late)
	defer func() {
		for _, ready := range answered {
			close(ready)
		}
		clear(answered)
	}()
	if observe != nil {
		observe()
	}
}

// settled delivers the result of a batch. It returns the channels of the callers to wake, and the call of the observer; nil if there is
// none.
func (c *Coordinator) settled(b *permit.Batch, out *permit.Outcome, err error, late bool) (answered []chan struct{}, observe func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	answered = c.inFlight.buffer[:0]
	if late {
		answered = nil // another flight may land meanwhile
	}
	c.callers.answered = &answered
	at := c.moment()
	if f := c.inFlight.landed(b, late); err == transport.ErrLate { // not errors.Is: the error of a store may wrap the ErrLate of another trip
		c.expireFlight(f, at.mono)
	} else {
		c.deliver(f, out, err, at)
	}
	c.callers.answered = nil
	c.dispatch(at.local)
	if !late {
		c.inFlight.buffer = answered
	}
	observe, c.inFlight.observe = c.inFlight.observe, nil
	return answered, observe
}

// deliver hands out the reply to a batch, which arrived at a moment. mu must be held.
func (c *Coordinator) deliver(f *flight, out *permit.Outcome, err error, at moment) {
	now := at.local
	c.inFlight.keep(f)
	c.view.at = now
	if err == nil && !f.late {
		c.view.inTime = now
		c.inFlight.since = at.mono
	}
	if !c.Immediate {
		if !f.late {
			c.report(f, out, err, at.mono-f.began)
		}
		c.expireCalls(f, at.mono) // the timer may be late: this process was stopped
	}
	if err != nil {
		c.failFlight(f, err, now)
	} else {
		c.settle(f, out, at)
	}
	f.reset()
	c.inFlight.spare = f
}

// failFlight fails the calls of a flight. mu must be held.
func (c *Coordinator) failFlight(f *flight, err error, now int64) {
	for _, r := range f.refunds {
		r.settle(false, err, now)
	}
	for _, q := range f.calls {
		if q != nil {
			q.arrived(f)
			c.fail(q, err)
		}
	}
}

// settle hands out the decisions of the store. mu must be held.
func (c *Coordinator) settle(f *flight, out *permit.Outcome, at moment) {
	now, received := at.local, at.local
	if out.Local != 0 {
		received = out.Local
	}
	c.observe(f, out, received, at)
	requests := f.batch.Requests
	for i, r := range f.refunds {
		r.settle(requests[i].Grant.OK, nil, now)
	}
	requests = requests[f.given:]
	var first *Call // to be refused for now
	beyond := int64(0)
	for i, q := range f.calls {
		if q != nil {
			q.arrived(f)
		}
		switch {
		case q == nil:
			if requests[i].Grant.OK {
				c.keep(f, &requests[i], out, now)
			}
		case q.operation != nil:
			c.carriedOut(q, i, requests, out)
		case requests[i].Grant.OK:
			c.grant(f, q, &requests[i], out, received, now)
		default:
			if c.refuseOrKeep(q, &requests[i], out, received, now) && first == nil {
				first, beyond = q, requests[i].Grant.WaitMicros-requests[i].MaxWaitMicros
			}
		}
	}
	if f.leased > 0 {
		if g := &requests[len(requests)-1].Grant; g.OK {
			c.leases.add(f, g, out, c.Now())
		}
	}
	switch {
	case f.late:
	case first != nil:
		c.queue.refused(first, beyond, received, now)
	default:
		c.queue.askSooner(out, now)
	}
	c.queue.release(now)
	if !c.Immediate && !f.late {
		c.view.show(f, out, c.queue.line.Spare())
	}
}

// carriedOut ends an operation. mu must be held.
func (c *Coordinator) carriedOut(q *Call, i int, requests []permit.Request, out *permit.Outcome) {
	switch {
	case q.operation.Read:
		q.operation.State = out.State
		c.callers.end(q, done, nil)
	case requests[i].Grant.OK:
		c.callers.end(q, done, nil)
	default:
		c.callers.end(q, refused, nil)
	}
}

// grant hands out the permits that the store has granted to a call. If the caller has left, they serve other waiters or are refunded.
// received is the time of the decision by the limiter's clock, or later, in limiter microseconds. mu must be held.
func (c *Coordinator) grant(f *flight, q *Call, r *permit.Request, out *permit.Outcome, received, now int64) {
	g := &r.Grant
	if c.refundLate(f, g, out) {
		return
	}
	c.leases.asked += q.Permits
	line := c.queue.line
	if q.decided == 0 {
		q.decided = received
	}
	reserved := q.reserves() && q.state == pending
	if reserved {
		q.note(&out.Bucket, out.NowMicros)
	}
	if g.WaitMicros == 0 && q.state == pending && (reserved && line.Idle() || !reserved && line.Serve(&q.Waiter)) {
		if q.due = received; reserved {
			back := g.Place.Refund(out.Bucket.Terms, 0, out.NowMicros)
			q.promise.unused = &back
		}
		c.callers.end(q, done, nil)
		return
	}
	// If the store wrote a prediction, it decided as of an earlier time. By this process's clock that may be before the call arrived.
	grant := c.scheduled(f, r, out)
	asked := out.NowMicros + grant.Offset
	if !reserved {
		q.Came = min(q.Came, asked)
		c.queue.grant(q, grant, now)
		return
	}
	c.queue.grantReserved(q, grant, min(f.local, asked))
}

// keep adds permits to those that the process owns, for a call that no longer waits for the flight. mu must be held.
func (c *Coordinator) keep(f *flight, r *permit.Request, out *permit.Outcome, now int64) {
	if !c.refundLate(f, &r.Grant, out) {
		c.queue.line.Grant(&schedule.Waiter[*Call]{Permits: r.Permits}, c.scheduled(f, r, out), now)
	}
}

// refundLate refunds a late grant that cannot be used, and reports whether it did. If no reply has been in time yet, its due time cannot be
// converted to the local clock. If a newer reply has shown another epoch, the due time has changed since. mu must be held.
func (c *Coordinator) refundLate(f *flight, g *permit.Grant, out *permit.Outcome) bool {
	if !f.late || c.view.terms != nil && g.Place.Epoch == c.view.epoch {
		return false
	}
	c.outbox.giveBack(&refund{limiter: f.limiter, give: g.Place.Refund(out.Bucket.Terms, 0, out.NowMicros)})
	return true
}

// scheduled returns a grant for the schedule. mu must be held.
func (c *Coordinator) scheduled(f *flight, r *permit.Request, out *permit.Outcome) *schedule.Grant {
	p := &r.Grant.Place
	return &schedule.Grant{
		Terms: c.view.grantedBy(f.limiter, out.Bucket.Terms), Before: p.Before, Permits: r.Permits,
		Epoch: p.Epoch, Tag: p.Tag, Prev: p.Prev, Offset: c.view.offset.Micros(),
	}
}

// refuseOrKeep ends a call that the store has refused. It reports whether the call waits instead, because its permits lie beyond the
// look-ahead. mu must be held.
func (c *Coordinator) refuseOrKeep(q *Call, r *permit.Request, out *permit.Outcome, received, now int64) (waits bool) {
	switch {
	case q.state.over(), q.covered():
	case r.Grant.Overflow:
		c.fail(q, q.limiter.Overflow(q.Permits))
	case q.line != nil && !q.bounded:
		if q.decided == 0 {
			q.decided = received
		}
		return true
	default:
		if q.note(&out.Bucket, out.NowMicros); q.line != nil {
			q.line.Leave(&q.Waiter, now)
		}
		wait := r.Grant.WaitMicros
		if q.decided != 0 { // the timeout counts from the arrival of the call
			wait += received - q.Came
		}
		q.decided = received
		c.callers.refuse(q, wait)
	}
	return false
}

// report records the result of a batch for the monitor and the observer. out is nil if there was no reply. mu must be held.
func (c *Coordinator) report(f *flight, out *permit.Outcome, err error, elapsed time.Duration) {
	lockWait := time.Duration(0)
	if out != nil {
		lockWait = out.LockWait
	}
	if err == nil {
		c.Health.Answered(elapsed - lockWait)
	} else if c.Away(err) || c.NotAsked(err) {
		c.Health.Suspect(c)
	}
	if observe := f.limiter.OnTrip; observe != nil {
		trip := Trip{Requests: len(f.batch.Requests), Elapsed: elapsed, LockWait: lockWait, Err: err}
		c.inFlight.observe = func() { observe(trip) }
	}
}

// observe updates the view by a reply. Then it applies what the view shows to the queue and the leases: another configuration, a penalty, a
// new epoch. mu must be held.
func (c *Coordinator) observe(f *flight, out *permit.Outcome, received int64, at moment) {
	v, b := &c.view, &out.Bucket
	before := v.terms
	v.update(f, out, received, at)
	c.share.served = true
	if f.late {
		return
	}
	if before != nil && !before.Same(v.terms.Terms) {
		c.queue.pace.Forget()
	}
	c.heldBack(b, out.NowMicros, at.local)
	if b.Epoch != v.epoch {
		c.queue.begunAnew(b.Epoch, f.begins(out))
		v.epoch = b.Epoch
	}
	v.learn(b.Terms)
	c.logConflict(f, out)
	c.logOverruled(f, b.Terms)
}

// heldBack moves what this process owns if a reply shows a penalty, or the early end of one. serverNow is the time of the reply by the
// store's clock. mu must be held.
func (c *Coordinator) heldBack(b *permit.Bucket, serverNow, now int64) {
	shorter, longer, held := c.view.penalty.Observe(b.PausedMicros, b.HeldUntilMicros, serverNow)
	if shorter > 0 {
		c.queue.resume(shorter, now)
	}
	if held {
		c.queue.release(now) // pause moves the permits that are left, so those due before the penalty are handed out first
		c.view.drop()
		c.leases.drop()
		c.queue.pause(longer, b.HeldUntilMicros+c.view.offset.Micros(), now)
		c.queue.dropHopeless(c.view.terms.Terms, now)
	}
}

// logConflict logs once that two configurations have the same version. mu must be held.
func (c *Coordinator) logConflict(f *flight, out *permit.Outcome) {
	inForce := out.Bucket.Terms
	if !out.Conflict || c.view.conflict == inForce.Version {
		return
	}
	c.view.conflict = inForce.Version
	logAside(f.limiter, "tokenbucket: two configurations have the same version; the one with the larger hash is in force",
		"bucket", c.Name, "version", inForce.Version, "in force", inForce.Text)
}

// logOverruled logs once that the configuration in force differs from that of a limiter without a version: it was set by SetRate, or by a
// limiter with a version. SetRate in this process is not logged. mu must be held.
func (c *Coordinator) logOverruled(f *flight, inForce *permit.Terms) {
	own := f.limiter.Own
	if c.view.overruled || own.Version > 0 || inForce.Version == 0 || own.SameContent(inForce) {
		return
	}
	c.view.overruled = true
	if f.sets() {
		return
	}
	logAside(f.limiter, "tokenbucket: the configuration of this limiter has no version, and another that has one is in force; "+
		"Reset puts the limiter's own in force, WithVersion a newer one", "bucket", c.Name, "own", own.Text, "in force", inForce.Text)
}

// logAside logs a warning in a goroutine of its own, because a log handler may block, call the limiter, or panic.
func logAside(l *Limiter, message string, args ...any) {
	log := &l.Logger
	go func() {
		defer log.Recovered()
		log.Get().Warn(message, args...)
	}()
}
