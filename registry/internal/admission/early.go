package admission

import (
	"container/list"
	"sync"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// line has the calls of this process that wait for a place of a fleet, in the order in which they came. When a place is released, the first
// of them reserves its permits while the release is on its way, so the place is not idle for a second round trip.
//
// Permits that are due at once wait for the place only as long as the release takes, and a millisecond. If the store has given the place to
// another process, they go back, and the call reserves others when the next place is released. So this process begins no more calls than
// the rate allows, but for that time, as if the place's reply had been late.
type line struct {
	mu    sync.Mutex
	calls list.List // of *early: those that have reserved nothing
}

// early is a call in the line. The line's mu guards it.
type early struct {
	line    *line
	reserve func(*reserved)
	element *list.Element // in the line; nil if the call has reserved its permits, or has left
	left    bool          // the call has its place, or has given up
	reply   *reserved     // nil if the call has reserved nothing
}

// reserved is the rate's reply to a call that is in the line.
type reserved struct {
	reservation *tokenbucket.Reservation
	err         error
	at          time.Time
	grant       tentative
	panicked    any           // with what an observer has panicked
	done        chan struct{} // closed once the fields above are set

	line     *line // whose mu guards the fields below
	arrived  bool  // done is closed
	unwanted bool  // the call does not need the permits
}

// join puts a call at the end of the line. reserve is called from another goroutine.
func (l *line) join(reserve func(*reserved)) *early {
	e := &early{line: l, reserve: reserve}
	l.mu.Lock()
	defer l.mu.Unlock()
	e.element = l.calls.PushBack(e)
	return e
}

// call has the first call of the line reserve its permits. The caller calls the function that it returns once the place is released.
func (l *line) call() (released func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	first := l.calls.Front()
	if first == nil {
		return func() {}
	}
	e := l.calls.Remove(first).(*early)
	r := &reserved{line: l, done: make(chan struct{})}
	e.element, e.reply = nil, r
	go r.ask(e.reserve)
	began := time.Now()
	return func() { time.AfterFunc(shortestLead+time.Since(began), func() { e.again(r) }) }
}

// again puts a call that has not got its place at the head of the line, and gives its permits back.
func (e *early) again(r *reserved) {
	e.line.mu.Lock()
	waits := !e.left && e.reply == r
	if waits {
		e.reply, e.element = nil, e.line.calls.PushFront(e)
	}
	e.line.mu.Unlock()
	if waits {
		_ = r.drop()
	}
}

// leave takes a call out of the line, and returns the rate's reply, which may still have to arrive; nil if the call has reserved nothing.
func (e *early) leave() *reserved {
	e.line.mu.Lock()
	defer e.line.mu.Unlock()
	e.left = true
	if e.element != nil {
		e.line.calls.Remove(e.element)
	}
	return e.reply
}

// ask asks the rate. A panic of an observer is one of the call.
func (r *reserved) ask(reserve func(*reserved)) {
	defer func() {
		r.panicked = recover()
		r.line.mu.Lock()
		r.arrived = true
		close(r.done)
		unwanted := r.unwanted
		r.line.mu.Unlock()
		if unwanted {
			_ = r.giveBack()
		}
	}()
	reserve(r)
}

// drop gives the permits back, when they have arrived.
func (r *reserved) drop() error {
	r.line.mu.Lock()
	r.unwanted = true
	arrived := r.arrived
	r.line.mu.Unlock()
	if !arrived { // ask gives them back
		return nil
	}
	return r.giveBack()
}

func (r *reserved) giveBack() error {
	if r.reservation == nil {
		return nil
	}
	return aside(r.reservation.Return)
}

// wait blocks until the reply has arrived.
func (r *reserved) wait() {
	if <-r.done; r.panicked != nil {
		panic(r.panicked)
	}
}
