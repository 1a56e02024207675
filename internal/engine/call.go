package engine

import (
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/fair"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// state is the progress of a call.
//
//	pending ──→ waiting ──→ done      a reservation that was granted, and whose permits fell due
//	   │           └──────→ left      its caller cancelled it
//	   ├─────────────────→ done      granted and due, or carried out
//	   ├─────────────────→ refused   a reply: nothing was taken
//	   ├─────────────────→ failed    an error: permits may have been taken, and are refunded when that is known
//	   └─────────────────→ left      its caller gave up: what is granted to the call is refunded
type state uint8

const (
	pending state = iota
	waiting
	done
	refused
	failed
	left
)

// String returns the name of the constant.
func (s state) String() string {
	return [...]string{"pending", "waiting", "done", "refused", "failed", "left"}[s]
}

// over reports whether the call has ended.
func (s state) over() bool { return s >= done }

// Call is the request of one caller. It takes permits, reserves them, or is an operation, which takes nothing. Its Coordinator's mu guards
// all fields but the first six, which are never changed.
type Call struct {
	// A call for permits is a waiter of the queue until its permits are due.
	schedule.Waiter[*Call]

	limiter   *Limiter
	timeout   int64              // the longest wait that is of use to the caller, in microseconds
	deadline  time.Duration      // of the caller's context, by clock.Mono; 0 if it has none
	operation *Operation         // nil for a call for permits
	promise   *promise           // of a reservation; nil for other calls
	turn      *fair.Place[*Call] // among the waiters of its tenant; nil if it has no tenant

	state   state
	bounded bool // it was asked for within its timeout, not within the look-ahead: a refusal is final
	// recalled: it is a granted reservation whose permits were given up, because their quota was lowered. It asks without a look-ahead.
	recalled bool
	flight   *flight                   // that carries it; nil if none does
	line     *schedule.Schedule[*Call] // that it waits in; nil if it does not queue
	shared   bool                      // it ended in flight, so it must not be reused

	sent    time.Duration // when it began to wait for the store, by clock.Mono
	decided int64         // when the store first decided it, in limiter microseconds; 0 before
	due     int64         // when the permits are due, in limiter microseconds
	wait    int64         // of a refusal: how long the permits would have taken, from the arrival of the call
	err     error
	ready   chan struct{} // closed when the permits are due, or the call is refused or failed
}

// Operation is a call that takes no permits. Request says what it does. With Read it only reads the bucket, and State is what it read.
type Operation struct {
	permit.Request
	Read  bool
	State any
}

// Seen is a bucket as a reply showed it.
type Seen struct {
	Terms   *permit.Terms // nil if no reply showed it
	Balance permit.Balance
	Now     int64 // by the store's clock
}

// promise is what a reservation returns as soon as the store has decided it.
type promise struct {
	seen   Seen           // the bucket after the decision
	end    permit.End     // what its caller has done with it
	answer chan struct{}  // closed when the reservation is granted, refused or failed; nil afterwards
	unused *permit.Refund // of permits that were due at once, if the call that they were for does not begin; nil if there are none
	charge bool           // no caller waits until the permits are due
	lease  *lease         // that the permits come from; nil if the store granted them to the call
}

// calls are reused. Their channels are not: a channel made in a bubble of testing/synctest must not leave it.
var calls = sync.Pool{New: func() any { return new(Call) }}

// NewCall returns a call that takes permits which are due within a timeout. deadline is that of its context, see [Call].
func NewCall(l *Limiter, permits, timeout int64, deadline time.Duration) *Call {
	q := calls.Get().(*Call)
	q.limiter, q.Permits, q.timeout, q.deadline, q.ready = l, permits, timeout, deadline, make(chan struct{})
	return q
}

// NewReservation returns a call that reserves permits which are due within a timeout. It is never reused.
func NewReservation(l *Limiter, permits, timeout int64, deadline time.Duration) *Call {
	q := NewCall(l, permits, timeout, deadline)
	q.promise = &promise{answer: make(chan struct{})}
	return q
}

// NewCharge returns a call that takes permits which no caller waits for, as they were used before, if they are due within a timeout. It ends as soon
// as the store has decided it.
func NewCharge(l *Limiter, permits, timeout int64, deadline time.Duration) *Call {
	q := NewReservation(l, permits, timeout, deadline)
	q.promise.charge = true
	return q
}

// NewOperation returns a call that carries out an operation.
func NewOperation(l *Limiter, o *Operation, deadline time.Duration) *Call {
	return &Call{limiter: l, operation: o, deadline: deadline, ready: make(chan struct{})}
}

// always is the ready channel of reservations that were due when they were made.
var always = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Reserved returns a reservation that was granted without a batch, and is due. back refunds its permits, if it is not nil.
func Reserved(l *Limiter, of permit.Origin, back *permit.Refund) *Call {
	r := &struct { // one allocation
		call    Call
		promise promise
		back    permit.Refund
	}{}
	r.call.limiter, r.call.state, r.call.ready, r.call.promise, r.call.Origin = l, done, always, &r.promise, of
	if back != nil {
		r.back = *back
		r.promise.unused = &r.back
	}
	return &r.call
}

// Recycle lets a call be reused whose caller has received the result. Reservations are not reused, and may not have ended yet.
func (q *Call) Recycle() {
	if q.promise == nil && q.err == nil && !q.shared {
		*q = Call{}
		calls.Put(q)
	}
}

// reserves reports whether the call is a reservation.
func (q *Call) reserves() bool { return q.promise != nil }

// charges reports whether the call takes permits that no caller waits for.
func (q *Call) charges() bool { return q.reserves() && q.promise.charge }

// does reports whether the call is an operation of a kind.
func (q *Call) does(op permit.Op) bool {
	return q.operation != nil && !q.operation.Read && q.operation.Op == op
}

// begins reports whether the call must be the first of its batch: it is a penalty or a change of the rate.
func (q *Call) begins() bool {
	return q.does(permit.Hold) || q.does(permit.SetRate) || q.does(permit.SetRateAndBurst)
}

// resets reports whether the call resets the bucket.
func (q *Call) resets() bool { return q.does(permit.Reset) || q.does(permit.ResetQuota) }

// remaining returns the longest wait from now on that is of use to the caller. It ends with the caller's context. A timeout counts from the
// first decision, which may be one about a waiter ahead of it.
func (q *Call) remaining(now int64) int64 {
	wait := q.timeout
	if q.Until != schedule.Forever && (q.decided != 0 || q.Decided()) {
		wait = max(0, min(wait, q.Until-now))
	}
	if q.deadline != 0 {
		wait = max(0, min(wait, (q.deadline-clock.Mono()).Microseconds()))
	}
	return wait
}

// covered reports whether the process owns permits for the call, so that it does not wait for the store.
func (q *Call) covered() bool { return q.line != nil && q.Covered() }

// promised reports whether the call is a granted reservation. If its permits have lapsed, the process asks for others until it gets them,
// because the caller expects no other result.
func (q *Call) promised() bool { return q.reserves() && q.state == waiting }

// arrived removes the call from a flight.
func (q *Call) arrived(f *flight) {
	if q.flight == f {
		q.flight = nil
	}
}

// note keeps the bucket as a decision left it, for a reservation.
func (q *Call) note(b *permit.Bucket, now int64) {
	if q.reserves() {
		q.promise.seen = Seen{b.Terms, b.Balance, now}
	}
}

// answer lets the caller of a reservation continue.
func (q *Call) answer() {
	if q.promise != nil && q.promise.answer != nil {
		close(q.promise.answer)
		q.promise.answer = nil
	}
}

// Result is the outcome of a call.
type Result struct {
	Granted bool
	// Due is when the permits of a grant are due, in limiter microseconds.
	Due int64
	// Wait is, for a grant, the time from the decision until the permits were due; for a refusal, how long they would have taken. In
	// microseconds.
	Wait int64
	Err  error
}

// result returns the outcome of a call that has ended, or of a reservation that was decided.
func (q *Call) result() Result {
	r := Result{Granted: q.state == waiting || q.state == done, Due: q.due, Wait: q.wait, Err: q.err}
	if r.Granted {
		r.Wait = max(0, q.due-q.decided)
	}
	return r
}

// callers counts the calls in progress and ends them. The coordinator's mu guards it.
//
// Invariants: a call is counted once when it arrives, and once when it ends. Its ready is closed once; that of a cancelled reservation
// never.
type callers struct {
	config   *Config
	turns    *turns // nil if waiters are served by arrival
	count    int
	answered *[]chan struct{} // collects the calls that end while a reply is delivered; nil at other times
}

// end ends a call.
func (c *callers) end(q *Call, s state, err error) {
	if q.state.over() {
		return
	}
	c.count--
	if c.turns != nil {
		c.turns.left(q)
	}
	q.state, q.err, q.shared = s, err, q.flight != nil
	q.answer()
	if c.answered != nil {
		*c.answered = append(*c.answered, q.ready)
	} else {
		close(q.ready)
	}
}

// refuse ends a call that will not be granted. wait is how long the permits would have taken.
func (c *callers) refuse(q *Call, wait int64) {
	q.wait = wait
	c.end(q, refused, nil)
}

// fail ends a call after an error of the store.
func (c *callers) fail(q *Call, err error) { c.end(q, failed, c.config.failure(err)) }

// abandon ends a call whose caller has gone.
func (c *callers) abandon(q *Call) {
	c.count--
	if c.turns != nil {
		c.turns.left(q)
	}
	q.state = left
}
