package engine

import (
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
		c.deadlines.expireFlight(f, at.mono)
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
	c.View.at = now
	if err == nil && !f.late {
		c.View.inTime = now
		c.inFlight.since = at.mono
	}
	if !c.Immediate {
		if !f.late {
			c.inFlight.report(f, out, err, at.mono-f.began)
		}
		c.deadlines.expireCalls(f, at.mono) // the timer may be late: this process was stopped
	}
	if err != nil {
		f.fail(&c.queue, err, now)
	} else {
		c.share.served = true
		r := reply{flight: f, Outcome: out, at: at, received: at.local, queue: &c.queue, view: &c.View, leases: &c.leases, outbox: &c.outbox}
		if out.Local != 0 {
			r.received = out.Local
		}
		r.settle()
		if !c.Immediate && !f.late {
			c.View.show(f, out, c.queue.line.Spare())
		}
	}
	f.reset()
	c.inFlight.spare = f
}

// reply is a reply in hand, and what it does to the parts of the coordinator. The coordinator's mu must be held for all methods.
//
// Invariant: the view is updated first, so what the calls get is converted by the clock offset and the epoch of this reply. A late reply
// leaves the view as it is.
type reply struct {
	*permit.Outcome
	flight   *flight
	at       moment // of the arrival
	received int64  // the time of the decision by the limiter's clock, or later, in limiter microseconds
	penalty  bool   // it shows a penalty that this process had not heard of
	changed  bool   // it shows another configuration or epoch than the reply before

	queue  *queue
	view   *View
	leases *leases
	outbox *outbox
}

// settle hands out the decisions of the store.
func (r *reply) settle() {
	f, now := r.flight, r.at.local
	r.observe()
	requests := f.batch.Requests
	for i, back := range f.refunds {
		back.settle(requests[i].Grant.OK, nil, now)
	}
	requests = requests[f.given:]
	var first *permit.Request // to be refused for now
	var waiter *Call          // for which first asked
	for i, q := range f.calls {
		if q != nil {
			q.arrived(f)
		}
		switch {
		case q == nil:
			if granted := requests[i].Grant.OK; granted && f.returns {
				r.giveBack(&requests[i])
			} else if granted {
				r.keep(&requests[i])
			}
		case q.operation != nil && q.operation.Read:
			q.operation.State = r.State
			r.queue.callers.end(q, done, nil)
		case q.operation != nil:
			r.carriedOut(q, &requests[i])
		case requests[i].Grant.OK:
			r.grant(q, &requests[i])
		default:
			if r.refuseOrKeep(q, &requests[i]) && first == nil {
				first, waiter = &requests[i], q
			}
		}
	}
	if r.penalty { // what the reply has granted counts first: its permits may be stored since a penalty that has ended
		r.queue.dropHopeless(r.view.terms.Terms, now)
	}
	if f.leased > 0 {
		if g := &requests[len(requests)-1].Grant; g.OK {
			r.leases.add(f, g, r.Outcome, r.view.clock.Now())
		}
	}
	switch {
	case f.late:
	case first != nil:
		r.queue.refused(waiter, first.Grant.WaitMicros-first.MaxWaitMicros, r.received, now)
	default:
		r.queue.askSooner(r.Outcome, now)
	}
	if f.limiter.Quota && (r.changed || f.late || len(f.refunds) > 0) {
		r.queue.recall(now)
	}
	r.queue.release(now)
	if to := f.limiter.inForce(); to != f.limiter {
		r.queue.recut(f.limiter, to, now)
	}
}

// carriedOut ends an operation that changes the bucket.
func (r *reply) carriedOut(q *Call, request *permit.Request) {
	s := refused
	if request.Grant.OK {
		s = done
	}
	if s == done && request.Op == permit.Settle && !r.flight.late {
		r.queue.line.Settled(&request.Grant.Place, r.view.grantedBy(r.flight.limiter, r.Bucket.Terms), r.at.local)
	}
	r.queue.callers.end(q, s, nil)
}

// grant hands out the permits that the store has granted to a call. If the caller has left, they serve other waiters or are refunded.
func (r *reply) grant(q *Call, request *permit.Request) {
	g := &request.Grant
	if r.refundLate(g) {
		return
	}
	r.leases.asked += q.Permits
	if !q.reserves() { // see Coordinator.LookAhead
		r.queue.floor.Spend(q.Permits)
	}
	line := r.queue.line
	if q.decided == 0 {
		q.decided = r.received
	}
	reserved := q.reserves() && q.state == pending
	if reserved {
		q.note(&r.Bucket, r.NowMicros)
	}
	if g.WaitMicros == 0 && q.state == pending && (reserved && line.Idle() || !reserved && r.queue.serve(q)) {
		q.Origin = g.Place.Origin()
		if q.due = r.received; reserved {
			back := g.Place.Refund(r.Bucket.Terms, 0)
			q.promise.unused = &back
		}
		r.queue.callers.end(q, done, nil)
		return
	}
	// If the store wrote a prediction, it decided as of an earlier time. By this process's clock that may be before the call arrived.
	grant := r.scheduled(request)
	asked := r.NowMicros + grant.Offset
	if !reserved {
		q.Came = min(q.Came, asked)
		r.queue.grant(q, grant, r.at.local)
		return
	}
	r.queue.grantReserved(q, grant, min(r.flight.local, asked))
}

// keep adds permits to those that the process owns, for a call that no longer waits for the flight.
func (r *reply) keep(request *permit.Request) {
	if !r.refundLate(&request.Grant) {
		r.queue.keep(request.Permits, r.scheduled(request), r.at.local)
	}
}

// refundLate refunds a late grant that cannot be used, and reports whether it did. If no reply has been in time yet, its due time cannot be
// converted to the local clock. If a newer reply has shown another epoch, the due time has changed since.
func (r *reply) refundLate(g *permit.Grant) bool {
	if !r.flight.late || r.view.terms != nil && g.Place.Epoch == r.view.epoch {
		return false
	}
	r.outbox.giveBack(&refund{limiter: r.flight.limiter, give: g.Place.Refund(r.Bucket.Terms, 0)})
	return true
}

// scheduled returns a grant for the schedule.
func (r *reply) scheduled(request *permit.Request) *schedule.Grant {
	p := &request.Grant.Place
	return &schedule.Grant{
		Terms: r.view.grantedBy(r.flight.limiter, r.Bucket.Terms), Before: p.Before, Permits: request.Permits,
		Epoch: p.Epoch, ID: p.ID, Tag: p.Tag, Prev: p.Prev, Returned: p.Returned, Offset: r.view.offset.Micros(),
	}
}

// refuseOrKeep ends a call that the store has refused. It reports whether the call waits instead, because its permits lie beyond the
// look-ahead.
func (r *reply) refuseOrKeep(q *Call, request *permit.Request) (waits bool) {
	switch {
	case q.state.over(), q.covered():
	case request.Grant.Overflow:
		r.queue.fail(q, q.limiter.Overflow(q.Permits), r.at.local)
	case q.line != nil && (!q.bounded || !r.queue.final(q, r.at.local)):
		if q.decided == 0 {
			q.decided = r.received
		}
		return true
	default:
		if q.note(&r.Bucket, r.NowMicros); q.line != nil {
			q.line.Leave(&q.Waiter, r.at.local)
		}
		wait := request.Grant.WaitMicros
		if q.decided != 0 { // the timeout counts from the arrival of the call
			wait += r.received - q.Came
		}
		q.decided = r.received
		r.queue.callers.refuse(q, wait)
	}
	return false
}

// observe updates the view. Then it applies what the view shows to the queue and the leases: another configuration, a penalty, a new epoch.
func (r *reply) observe() {
	f, v, b := r.flight, r.view, &r.Bucket
	before := v.terms
	v.update(f, r.Outcome, r.received, r.at)
	if f.late {
		return
	}
	if before != nil && !before.Same(v.terms.Terms) {
		r.queue.pace.Forget()
		r.changed = true
	}
	r.holdBack()
	if b.Epoch != v.epoch {
		r.changed = true
		r.queue.begunAnew(b.Epoch, f.begins(r.Outcome))
		v.epoch = b.Epoch
	}
	v.learn(b.Terms)
	v.differences.log(f, r.Outcome)
}

// holdBack moves what this process owns if the reply shows a penalty, or the early end of one.
func (r *reply) holdBack() {
	b, now := &r.Bucket, r.at.local
	shorter, longer, held := r.view.penalty.Observe(b.PausedMicros, b.HeldUntilMicros, r.NowMicros)
	if shorter > 0 {
		r.queue.resume(shorter, now)
	}
	if held {
		r.queue.release(now) // pause moves the permits that are left, so those due before the penalty are handed out first
		r.view.drop()
		r.leases.drop()
		r.queue.pause(longer, b.HeldUntilMicros+r.view.offset.Micros(), now)
		r.penalty = true
	}
}
