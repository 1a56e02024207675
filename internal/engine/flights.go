package engine

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// flight is a batch from its departure to its reply, with its calls and refunds.
type flight struct {
	batch   permit.Batch
	refunds []*refund // of the first requests
	calls   []*Call   // of the next requests; then those that only read. Nil for a call that no longer waits for the flight
	limiter *Limiter
	given   int           // number of requests that are refunds
	leased  int64         // permits that the last request asks for as a lease; 0 if it does not
	began   time.Duration // clock.Mono
	local   int64         // the limiter's clock at began
	late    bool          // its deadline has passed, so others may land before it
	returns bool          // what it was granted for calls that no longer wait for it goes back
}

func (f *flight) add(q *Call, r permit.Request) {
	f.calls = append(f.calls, q)
	f.batch.Requests = append(f.batch.Requests, r)
}

func (f *flight) addRefund(r *refund) {
	f.given++
	f.refunds = append(f.refunds, r)
	f.batch.Requests = append(f.batch.Requests, permit.Request{Op: permit.GiveBack, Back: r.give})
}

// empty reports whether the batch does nothing.
func (f *flight) empty() bool { return len(f.batch.Requests)+len(f.calls) == 0 }

// setDeadline sets when the last caller of the batch gives up. A batch that is decided later must take nothing.
func (f *flight) setDeadline(timeout time.Duration) {
	until := f.began
	if len(f.calls) == 0 || len(f.refunds) > 0 || f.leased > 0 {
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

// sets reports whether the batch changes the rate.
func (f *flight) sets() bool {
	return slices.ContainsFunc(f.calls, func(q *Call) bool { return q != nil && (q.does(permit.SetRate) || q.does(permit.SetRateAndBurst)) })
}

// begins returns from which balance the bucket grants, after a batch: that of the first grant, or else the one that the batch has left.
func (f *flight) begins(out *permit.Outcome) int64 {
	for i, q := range f.calls {
		if q != nil && q.operation != nil || i+f.given >= len(f.batch.Requests) {
			continue
		}
		if g := &f.batch.Requests[i+f.given].Grant; g.OK {
			return g.Place.Before.Next
		}
	}
	return out.Bucket.Next
}

// fail ends the refunds and the calls of a flight after an error.
func (f *flight) fail(queue *queue, err error, now int64) {
	for _, r := range f.refunds {
		r.settle(false, err, now)
	}
	for _, q := range f.calls {
		if q != nil {
			q.arrived(f)
			queue.fail(q, err, now)
		}
	}
}

// reset empties a flight that has landed, for reuse.
func (f *flight) reset() {
	clear(f.calls)
	clear(f.refunds)
	f.calls, f.refunds = f.calls[:0], f.refunds[:0]
}

// inFlight has the batches of a bucket on their way to the store. The coordinator's mu must be held for all methods.
//
// Invariants: at most one batch is in flight, besides those whose deadline has passed (Q1). The session travels with the batch, so one batch
// at a time uses it (M1).
type inFlight struct {
	busy    bool          // a batch is about to be built, or in flight
	since   time.Duration // when callers began to wait for the store: after the last reply, or with the first batch after a pause; 0 if none wait
	flight  *flight       // nil while the batch is not built yet, or none is in flight
	overdue []*flight     // whose deadline has passed, without a reply yet
	spare   *flight       // for reuse
	session permit.Session
	buffer  []chan struct{} // for callers.answered
	observe func()          // calls the observer when the lock is released; nil if there is nothing to observe

	config *Config
	view   *View
	micros func() int64 // for batches, see permit.Batch.LocalMicros
}

func (t *inFlight) init(config *Config, view *View, micros func() int64) {
	t.config, t.view, t.micros = config, view, micros
}

// begin records that a batch is about to be built.
func (t *inFlight) begin() {
	t.busy = true
	if t.since == 0 { // the store has not just failed
		t.since = clock.Mono()
	}
}

// departed records the batch that was built, or nil if there was nothing to send.
func (t *inFlight) departed(f *flight) {
	t.flight, t.busy = f, f != nil
	if f == nil {
		t.since = 0
		t.release()
	}
}

// landed removes the flight of a batch.
func (t *inFlight) landed(b *permit.Batch, late bool) *flight {
	if !late {
		f := t.flight
		t.flight, t.busy = nil, false
		return f
	}
	i := slices.IndexFunc(t.overdue, func(f *flight) bool { return &f.batch == b })
	f := t.overdue[i]
	t.overdue = slices.Delete(t.overdue, i, i+1)
	f.batch.Release()
	return f
}

// keep takes back the session of a flight that has landed. The session of a late flight is only kept if there is no other.
func (t *inFlight) keep(f *flight) {
	if t.session == nil || !f.late {
		t.release()
		t.session = f.batch.Session
	}
}

// kept reports whether a lock is kept for the next batch.
func (t *inFlight) kept() bool { return t.session != nil && t.session.Kept() }

// release gives up a lock that was kept for the next batch.
func (t *inFlight) release() {
	if t.session != nil {
		t.session.Release()
	}
}

// NewEpoch returns a random name for an epoch: the upper 27 bits are its lineage, see [permit.Succeed].
func NewEpoch() int64 { return rand.Int64N(permit.MaxExact) + 1 }

// next returns an empty flight for a limiter. It takes the session.
func (t *inFlight) next(l *Limiter, now int64) *flight {
	c := t.config
	f := t.spare
	if f == nil {
		f = &flight{}
	}
	t.spare = nil
	f.limiter, f.given, f.leased, f.late, f.returns, f.local, f.began = l, 0, 0, false, false, now, 0
	f.batch = permit.Batch{
		Name: c.Name, Key: c.Key, Terms: l.Own, Known: l.Effective(), Initial: l.Initial, Transient: l.Transient,
		Requests: f.batch.Requests[:0], Session: t.session, Keep: true, Epoch: NewEpoch(), LocalMicros: t.micros,
	}
	if t.view.server.Known() {
		micros, received := t.view.server.Last()
		f.batch.ServerMicros, f.batch.ServerRead = micros, clock.At(received)
	}
	if t.session = nil; f.batch.Session == nil && c.NewSession != nil {
		f.batch.Session = c.NewSession()
	}
	return f
}

// report records the result of a batch for the monitor and the observer. out is nil if there was no reply.
func (t *inFlight) report(f *flight, out *permit.Outcome, err error, elapsed time.Duration) {
	lockWait := time.Duration(0)
	if out != nil {
		lockWait = out.LockWait
	}
	if err == nil {
		t.config.Health.Answered(elapsed - lockWait)
	} else if t.config.unasked(err) {
		t.config.Health.Suspect(f.limiter.Coordinator)
	}
	if observe := f.limiter.OnTrip; observe != nil {
		trip := Trip{Requests: len(f.batch.Requests), Elapsed: elapsed, LockWait: lockWait, Err: err}
		t.observe = func() { observe(trip) }
	}
}

// unused takes back a flight that did not depart.
func (t *inFlight) unused(f *flight) { t.spare, t.session = f, f.batch.Session }
