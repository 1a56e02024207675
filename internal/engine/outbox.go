package engine

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// refund is permits on their way back to the store.
type refund struct {
	limiter *Limiter
	give    permit.Refund
	line    *schedule.Schedule[*Call] // that the permits are from; nil for those of a lease or of Return
	done    chan struct{}             // closed when the store has replied; nil if no caller waits for that
	err     error
}

// settle ends a refund.
func (r *refund) settle(accepted bool, err error, now int64) {
	if r.line != nil {
		r.line.Refunded(accepted, err == nil, now)
	}
	if r.err = err; r.done != nil {
		close(r.done)
	}
}

// confirmed waits for the store's reply to a refund, but not for longer than the store timeout. verb names the call in the error. A nil
// refund needs no confirmation.
func (r *refund) confirmed(ctx context.Context, c *Config, verb string) error {
	if r == nil {
		return nil
	}
	select {
	case <-r.done:
		return c.failure(r.err)
	default:
	}
	timeout := time.NewTimer(c.Timeout)
	defer timeout.Stop()
	select {
	case <-r.done:
		return c.failure(r.err)
	case <-ctx.Done():
		return ctx.Err()
	case <-timeout.C:
		return c.failure(fmt.Errorf("%w: bucket %q: %s was not answered within %v", permit.ErrStoreTimeout, c.Name, verb, c.Timeout))
	}
}

// outbox is what leaves with the next batch, besides the waiters of the queue. The coordinator's mu must be held for all methods.
//
// Invariants of a batch: all its requests have one configuration. Refunds come first, then calls in the order of their arrival. A penalty is
// the first call of its batch, so that the whole reply is from after it. So is a change of the rate, because the permits in the reply have its terms; that
// of a quota is the last one, too. A reset is the first request, because the refunds before it may not
// fit its configuration (Q2).
type outbox struct {
	aside   []*Call   // operations, and reservations that are not granted yet. Calls whose callers have left stay until their turn
	refunds []*refund // of leases and of Return
	queue   *queue
	leases  *leases
	view    *View
}

// giveBack adds a refund. It is sent first, because the permits that were granted last are at the bucket's tail.
func (o *outbox) giveBack(r *refund) { o.refunds = slices.Insert(o.refunds, 0, r) }

// holds reports whether there is anything to send.
func (o *outbox) holds(now int64) bool {
	return len(o.aside) > 0 || len(o.refunds) > 0 || o.leases.refill || o.queue.asks(now) || o.queue.line.Refundable() != nil
}

// passage returns what a newcomer may do without the queue.
func (o *outbox) passage() Passage {
	switch {
	case len(o.aside) > 0 || len(o.refunds) > 0 || len(o.queue.old) > 0 || o.queue.line.Spare():
		return Queue
	case o.queue.line.Idle():
		return Free
	case o.queue.turns.on(): // its turn may come before those of the waiters
		return Queue
	}
	return Refusals
}

// only reports whether q is the only call here.
func (o *outbox) only(q *Call) bool {
	first := o.queue.line.Head()
	return q.state == pending && (first == nil && len(o.aside) == 1 || first == &q.Waiter && q.Following() == nil && len(o.aside) == 0)
}

// offerSpare gives the spare permits of the queue to the reservations of the next batch, in order. Otherwise newcomers would get them. It
// reports whether any reservation was granted.
func (o *outbox) offerSpare(now int64) (some bool) {
	for len(o.aside) > 0 && o.queue.offers() {
		if q := o.aside[0]; !q.state.over() {
			if !q.reserves() {
				break
			}
			if o.queue.join(q, now); q.line == nil && q.state == pending {
				break
			}
			some = true
		}
		o.removeFirst()
	}
	return some
}

func (o *outbox) removeFirst() {
	o.aside[0] = nil
	o.aside = o.aside[1:]
}

// dropLeft removes the first calls of aside as long as their callers have left.
func (o *outbox) dropLeft() {
	for len(o.aside) > 0 && o.aside[0].state.over() {
		o.removeFirst()
	}
}

// first returns the limiter of the next batch. There must be something to send, or listener must not be nil.
func (o *outbox) first(now int64, listener *Limiter) *Limiter {
	if len(o.refunds) > 0 {
		return o.refunds[0].limiter
	}
	if l := o.queue.refunder(); l != nil {
		return l
	}
	if q := o.nextCall(o.queue.asker(now)); q != nil {
		return q.limiter
	}
	if e := o.leases.current.Load(); e != nil { // for the next lease
		return e.limiter
	}
	return listener
}

// nextCall returns the next call of the batch: the first call of aside or the waiter w, whichever arrived first. It returns nil if there is
// neither.
func (o *outbox) nextCall(w *schedule.Waiter[*Call]) *Call {
	o.dropLeft()
	if len(o.aside) == 0 {
		if w == nil {
			return nil
		}
		return w.Value
	}
	if q := o.aside[0]; w == nil || q.Came <= w.Came {
		return q
	}
	return w.Value
}

// fill adds to a batch all that it has room for.
func (o *outbox) fill(f *flight, since time.Duration, now int64) {
	if o.addRefunds(f) && o.addCalls(f, since, now) {
		o.addLease(f, now)
	}
}

// addRefunds adds refunds to a batch. It reports whether all of them fit.
func (o *outbox) addRefunds(f *flight) (all bool) {
	n := 0
	for ; n < len(o.refunds) && len(f.batch.Requests) < permit.MaxBatch && o.refunds[n].limiter.agrees(f.limiter); n++ {
		f.addRefund(o.refunds[n])
	}
	all = n == len(o.refunds)
	o.refunds = slices.Delete(o.refunds, 0, n)
	l := o.queue.refunder()
	switch {
	case l == nil || !all:
		return all
	case !l.agrees(f.limiter):
		return false
	}
	f.addRefund(o.queue.refund())
	return true
}

// addCalls adds calls to a batch. It reports whether all of them fit. since is when callers began to wait for the store.
func (o *outbox) addCalls(f *flight, since time.Duration, now int64) (all bool) {
	var reads []*Call
	look := lookAhead{class: o.queue.class, floor: o.queue.floor, horizon: Horizon(f.limiter.Effective()), trip: o.view.offset.Trip()}
	w := o.queue.asker(now)
	if w != nil {
		look.ahead, look.stored = o.queue.owned(now, 4*look.horizon), o.view.stored
	}
	q := o.nextCall(w)
	for ; q != nil && len(f.batch.Requests) < permit.MaxBatch && q.limiter.agrees(f.limiter); q = o.nextCall(w) {
		if q.begins() && len(f.calls) > 0 || q.resets() && len(f.batch.Requests) > 0 {
			break
		}
		if q.line != nil {
			r := permit.Request{Permits: q.Permits, MaxWaitMicros: q.remaining(now)}
			if w = w.Following(); !look.bound(q, &r) {
				w = nil
			}
			q.flight, q.sent = f, q.waitsSince(since)
			f.add(q, r)
			continue
		}
		o.removeFirst()
		switch q.flight = f; {
		case q.operation == nil:
			f.add(q, permit.Request{Permits: q.Permits, MaxWaitMicros: q.remaining(now)})
		case q.operation.Read:
			f.batch.Read = true
			reads = append(reads, q)
		default:
			if f.add(q, q.operation.Request); q.limiter.Quota && f.sets() {
				return false // what is granted before the reply cannot go back behind later grants
			}
		}
	}
	f.calls = append(f.calls, reads...)
	return q == nil
}

// waitsSince returns since when a waiter waits for the store, rather than for the waiters ahead or the bucket.
func (q *Call) waitsSince(since time.Duration) time.Duration {
	if q.decided != 0 {
		return clock.Mono()
	}
	return max(q.sent, since)
}

// addLease adds a request for the next lease to a batch, if one is useful.
func (o *outbox) addLease(f *flight, now int64) {
	if len(f.batch.Requests) == 0 && !o.leases.refill {
		return
	}
	o.leases.refill = false
	if f.leased = o.leases.wanted(f.limiter, now); f.leased > 0 {
		f.batch.Requests = append(f.batch.Requests, permit.Request{Op: permit.TakeStored, Permits: f.leased})
	}
}

// fail fails the calls and drops the refunds, because the store is unavailable.
func (o *outbox) fail(err error, now int64) {
	for _, q := range o.aside {
		o.queue.fail(q, err, now)
	}
	o.aside = nil
	o.queue.failAskers(err, now)
	for _, r := range o.refunds {
		r.settle(false, err, now)
	}
	o.refunds = nil
	o.queue.refundFailed(err, now)
	o.leases.refill = false
}

// lookAhead bounds how much of the bucket's time a batch asks for.
type lookAhead struct {
	class   Class
	floor   Floor // the credit that is left
	horizon int64
	trip    int64 // duration of a round trip
	stored  int64 // stored permits of the bucket, which take no time
	ahead   int64 // time that the process owns, or asks for
	counted int64 // ahead when most was computed
	permits int64 // for which most was computed
	of      Class // for which most was computed
	most    int64 // the longest wait of a request
}

// bound limits the wait of a request by the look-ahead. It reports whether there is any use in asking for another waiter. The limit is
// computed again in steps, so most requests of a batch are equal and are sent as a count.
func (a *lookAhead) bound(q *Call, r *permit.Request) (more bool) {
	t := q.limiter.Effective()
	c := a.floor.Next(a.class, q.Permits)
	if a.permits != q.Permits || a.of != c || a.ahead-a.counted > a.horizon/16 {
		a.permits, a.of, a.counted, a.most = q.Permits, c, a.ahead, LookAhead(t, c, q.Permits, a.ahead, a.trip)
	}
	if q.recalled {
		q.bounded = false
		return true
	}
	q.bounded = r.MaxWaitMicros < a.most && !q.promised()
	r.MaxWaitMicros = min(r.MaxWaitMicros, a.most)
	if a.stored -= q.Permits; a.stored < 0 {
		a.ahead += CostFromCold(t, min(-a.stored, q.Permits))
	}
	return a.ahead <= 2*a.horizon
}
