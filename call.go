package tokenbucket

import (
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// verb is what a call wants.
type verb uint8

const (
	tryAcquire verb = iota
	acquire
	reserve
	setRate
	setRateAndBurst
	penalize
	reset
	read
)

// takes tells that permits are wanted.
func (v verb) takes() bool { return v <= reserve }

// callState is how far a call has come.
//
//	pending ──→ waiting ──→ done      a reservation that was granted, and then due
//	   │           └──────→ left      its caller cancelled
//	   ├─────────────────→ done      granted and due, or carried out
//	   ├─────────────────→ refused   an answer: nothing was taken
//	   ├─────────────────→ failed    by an error: perhaps something was taken, and goes back when that is known
//	   └─────────────────→ left      its caller gave up: what the call is granted goes back
type callState uint8

const (
	pending callState = iota
	waiting
	done
	refused
	failed
	left
)

// over tells that nobody waits for the call any more.
func (s callState) over() bool { return s >= done }

// call is one caller's request on its way. All but what is never changed is guarded by its coordinator's mu.
type call struct {
	// As a waiter it stands in the line of a schedule, until its permits are due.
	schedule.Waiter[*call]

	limiter  *limiter      // this and the next three are never changed
	verb     verb          //
	timeout  int64         // the longest wait of use to the caller, in microseconds
	deadline time.Duration // of the caller's context, see mono; 0: none
	*order                 // of a verb that takes nothing; nil: of others
	*promise               // of a reservation; nil: of others

	state   callState
	bounded bool                      // asked for within its timeout, rather than within reach: a refusal is final
	flight  *flight                   // in which it travels; nil: none
	line    *schedule.Schedule[*call] // in which it stands; nil: none yet

	shared bool // it ended in flight: it is not reused

	sent    time.Duration // when it began to wait for the store, see mono
	decided int64         // when it was decided first, by the limiter's clock; 0: not yet
	due     int64         // when the permits are due, likewise
	wait    int64         // of a refusal: what it would have taken, from when it came
	err     error
	ready   chan struct{} // closed when the permits are due, or refused or failed
}

// order is what a call that takes nothing wants, and what it gets.
type order struct {
	rate   float64 // of setRate and setRateAndBurst
	most   float64 // max permits of setRateAndBurst
	micros int64   // of penalize
	bucket PermitBucket
}

// promise is what a reservation is told as soon as it is decided.
type promise struct {
	level  *Level         // how full the bucket was left
	answer chan struct{}  // closed when the reservation is granted, refused or failed; nil: it was
	unused *permit.Refund // the permits of a reservation that was due at once, for the case that its call does not begin; nil if none
}

// calls are reused. Their channels are not: one that was made in a bubble of testing/synctest must not leave it.
var calls = sync.Pool{New: func() any { return new(call) }}

// recycle lets a call be reused that was answered, and whose answer was received.
func (q *call) recycle() {
	if q.err == nil && !q.shared {
		*q = call{}
		calls.Put(q)
	}
}

// remaining is the longest wait from now that is of use to the caller: none that ends after its context does. A timeout counts from the
// first decision.
func (q *call) remaining(now int64) int64 {
	wait := q.timeout
	if q.Until != schedule.Forever && q.decided != 0 {
		wait = max(0, min(wait, q.Until-now))
	}
	if q.deadline != 0 {
		wait = max(0, min(wait, (q.deadline-mono()).Microseconds()))
	}
	return wait
}

// covered tells that permits are there for it, so that it does not wait for the store.
func (q *call) covered() bool { return q.line != nil && q.Covered() }

// promised tells that a reservation was granted, and that its permits have lapsed since: it asks again until it gets others, since
// its caller waits for no other answer.
func (q *call) promised() bool { return q.verb == reserve && q.state == waiting }
