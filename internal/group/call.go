package group

import (
	"math"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// state is the progress of a call.
type state uint8

const (
	asking  state = iota // in the queue, or in flight
	owned                // granted, and not due
	done                 // due, or carried out
	refused              // nothing was taken
	failed
	left // its caller has gone
)

// Call is the request of one caller. The participant's mu guards it.
type Call struct {
	permits  int64
	timeout  int64         // the longest wait that is of use, in microseconds
	deadline time.Duration // of the context, by clock.Mono; 0 if it has none
	reserves bool
	settles  []int64 // for a settlement: what each member is charged, or gets back if negative
	of       *grant  // of a settlement: what it settles; nil if that has lapsed

	state    state
	flight   *flight
	shared   bool // it ended in flight, so it must not be reused
	promised bool // a granted reservation: it keeps asking if its permits lapse
	recalled bool // its permits were given up, because their quota was lowered
	decided  int64
	came     int64
	until    int64
	due      int64
	sent     time.Duration
	grant    *grant
	end      permit.End // what the caller of a reservation has done with it
	used     *grant     // of a reservation that is due, for its settlement
	unused   *grant     // of a reservation that was due at once, for Return
	wait     int64
	over     int64     // of a refusal, see Result
	member   int       // that refused the call; for permit.Any the one that it has permits of; -1 if there is none
	members  []Outcome // of a reservation
	err      error
	answer   chan struct{} // of a reservation: closed when it is decided
	ready    chan struct{}
}

// Outcome is what was decided about a member's part of a call.
type Outcome struct {
	Seen    engine.Seen
	Wait    int64 // until its permits are due, or how long they would have taken, in microseconds
	Taken   bool  // the call has permits of this member
	Refused bool  // the member could not grant its part in time
}

// Result is the outcome of a call.
type Result struct {
	Granted bool
	Wait    int64 // as in engine.Result
	Over    int64 // how much less a refused reservation would have to wait, to be granted
	// Member refused the call, or for permit.Any has granted it; -1 if it is unknown.
	Member  int
	Members []Outcome // of a reservation
	Err     error
}

// NewCall returns a call for permits that fall due within a timeout, in microseconds. deadline is that of its context, by clock.Mono.
func NewCall(permits, timeout int64, deadline time.Duration, reserves bool) *Call {
	q := calls.Get().(*Call)
	*q = Call{permits: permits, timeout: timeout, deadline: deadline, reserves: reserves, member: -1, ready: make(chan struct{})}
	if reserves {
		q.answer = make(chan struct{})
	}
	return q
}

// calls are reused. Their channels are not: a channel made in a bubble of testing/synctest must not leave it.
var calls = sync.Pool{New: func() any { return new(Call) }}

// blame notes that a member is the reason for a refusal, unless that is known. wait is how long its permits would have taken.
func (q *Call) blame(member int, wait int64, members int) {
	if q.member < 0 {
		q.member = member
	}
	if q.members == nil && q.reserves {
		q.members = make([]Outcome, members)
		q.members[member] = Outcome{Wait: wait, Refused: true}
	}
}

// Ready returns the channel that is closed when the permits of a reservation are due.
func (q *Call) Ready() <-chan struct{} { return q.ready }

// result returns the outcome of a call that has ended, or of a reservation that was decided.
func (q *Call) result() Result {
	r := Result{Granted: q.state == owned || q.state == done || q.promised, Wait: q.wait, Over: q.over, Member: q.member, Members: q.members, Err: q.err}
	if r.Granted {
		r.Wait = max(0, q.due-q.decided)
	}
	return r
}

// callers counts the calls that have not ended, and ends them. The participant's mu must be held for all methods.
//
// Invariants: a call is counted once when it arrives, and once when it ends. Nothing changes the result of a call that has ended, except that of a
// reservation, so its caller reads it without mu.
type callers struct {
	count    int
	answered []chan struct{} // of the calls that end while a reply is handed out; nil at other times
}

// collect keeps the channels of the calls that end, until wake closes them. A call is reused once its caller has the result, and the reply may still
// name it. buffer must not be nil.
func (c *callers) collect(buffer []chan struct{}) { c.answered = buffer[:0] }

// collected returns the channels since collect. Calls that end later are woken at once.
func (c *callers) collected() (answered []chan struct{}) {
	answered, c.answered = c.answered, nil
	return answered
}

// wake wakes callers. It needs no lock, so that they do not find it held when they ask again.
func wake(answered []chan struct{}) {
	for _, ready := range answered {
		close(ready)
	}
	clear(answered)
}

// end ends a call, unless it has ended.
func (c *callers) end(q *Call, s state, err error) {
	if q.state > owned {
		return
	}
	c.count--
	if q.reserves {
		q.used = q.grant
	}
	q.state, q.err, q.grant, q.shared = s, err, nil, q.flight != nil
	q.reply()
	if c.answered != nil {
		c.answered = append(c.answered, q.ready)
	} else {
		close(q.ready)
	}
}

// refuse ends a call that will not be granted. wait is how long its permits would have taken.
func (c *callers) refuse(q *Call, wait int64) {
	q.wait = wait
	c.end(q, refused, nil)
}

// fail ends a call after an error.
func (c *callers) fail(q *Call, err error) { c.end(q, failed, err) }

// leave ends a call whose caller has gone. Its channels stay open.
func (c *callers) leave(q *Call) {
	q.state = left
	c.count--
}

// arrive sets the times of a newcomer.
func (q *Call) arrive(now int64, mono time.Duration) {
	q.sent, q.came, q.until = mono, now, math.MaxInt64
	if q.timeout < permit.MaxExact {
		q.until = now + q.timeout
	}
	if q.deadline != 0 {
		q.until = min(q.until, now+max(0, (q.deadline-mono).Microseconds()))
	}
}

// depart records the flight of a call. since is when callers began to wait for the stores.
func (q *Call) depart(f *flight, since time.Duration) { q.flight, q.sent = f, max(q.sent, since) }

// acquires reports whether the call is neither a reservation nor a settlement.
func (q *Call) acquires() bool { return q.settles == nil && !q.reserves }

// waiter reports whether the call waits its turn: it acquires, or it is a granted reservation whose permits have lapsed.
func (q *Call) waiter() bool { return q.settles == nil && (!q.reserves || q.promised) }

// bounded reports whether a look-ahead bounds what the call asks for. A reservation has none, also if its permits were given up for a lowered quota.
func (q *Call) bounded() bool { return q.waiter() && !(q.promised && q.recalled) }

// promise marks a reservation as granted: its caller may continue.
func (q *Call) promise() {
	q.promised, q.until = true, math.MaxInt64
	q.reply()
}

// reply lets the caller of a reservation continue.
func (q *Call) reply() {
	if q.answer != nil {
		close(q.answer)
		q.answer = nil
	}
}

// remaining returns the longest wait from now on that is of use to the caller. A timeout counts from the first decision.
func (q *Call) remaining(now int64) int64 {
	wait := min(q.timeout, permit.MaxExact)
	if q.decided != 0 && q.until != math.MaxInt64 {
		wait = max(0, min(wait, q.until-now))
	}
	if q.promised {
		return permit.MaxExact
	}
	if q.deadline != 0 {
		wait = max(0, min(wait, (q.deadline-clock.Mono()).Microseconds()))
	}
	return wait
}
