package outage

import (
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// state is what is thought of a backend.
type state uint8

const (
	up         state = iota // it answers, as far as is known
	suspected               // a call has failed, and a probe will tell why; calls are sent as before
	down                    // a probe has failed; no calls are sent
	recovering              // the outage is over, and those who were told of it are being told so; calls are sent again
	states
)

// event is what changes a state.
type event uint8

const (
	callFailed event = iota
	probeFailed
	probeAnswered
	forgotten // nobody wants to know any more
	told      // everybody was told of the end of the outage
	events
)

// transitions says which state follows on which. A call that fails while the end of an outage is being told is a new suspicion: told
// leaves it alone.
var transitions = [states][events]state{
	up:         {callFailed: suspected, probeFailed: down, probeAnswered: up, forgotten: up, told: up},
	suspected:  {callFailed: suspected, probeFailed: down, probeAnswered: up, forgotten: up, told: suspected},
	down:       {callFailed: down, probeFailed: down, probeAnswered: recovering, forgotten: recovering, told: down},
	recovering: {callFailed: suspected, probeFailed: down, probeAnswered: recovering, forgotten: recovering, told: up},
}

// Outage is one outage. It keeps its address from its beginning to its end, and no other outage has the same.
type Outage struct {
	Since time.Time
	Err   error // of the probe that failed first
}

// Status is what is known of one backend: its state, and when to probe it next. The zero value is up. Down may be called at any time;
// everything else is guarded by the lock of its owner.
//
// A Status does nothing by itself. A Monitor has one, and sends the probes. A user that takes every call for a probe has a Status
// alone: for it a call that fails is an outage, and the next call is sent when a probe is due.
type Status struct {
	state  state
	outage atomic.Pointer[Outage] // not nil exactly while the state is down
	pause  time.Duration          // about the time from the last probe to the next
	dueAt  time.Duration          // when the next probe is due; see clock.Mono
}

// Down is the outage that was noticed, or nil. It takes no lock.
func (s *Status) Down() *Outage { return s.outage.Load() }

// ProbeFailed notes that a probe has failed. The next one is due after a pause: twice the last one's, but within the bounds, and half of it
// more or less, so that a fleet does not probe in step.
func (s *Status) ProbeFailed(err error, shortest, longest time.Duration) {
	s.on(probeFailed, err)
	s.pause = min(max(2*s.pause, shortest), longest)
	s.dueAt = clock.Mono() + s.pause/2 + rand.N(s.pause)
}

// ProbeAnswered notes that a probe was answered, and returns the outage that has ended; nil: there was none.
func (s *Status) ProbeAnswered() (ended *Outage) {
	ended = s.outage.Load()
	s.on(probeAnswered, nil)
	s.on(told, nil)
	return ended
}

// UntilProbe is how long it takes until the next probe is due; 0: it is.
func (s *Status) UntilProbe() time.Duration { return max(0, s.dueAt-clock.Mono()) }

// ProbeNow makes the next probe due at once, and the pauses after it short again.
func (s *Status) ProbeNow() { s.pause, s.dueAt = 0, 0 }

// on changes the state as an event says. It returns the state before.
func (s *Status) on(e event, err error) (before state) {
	before, s.state = s.state, transitions[s.state][e]
	switch {
	case before != down && s.state == down:
		s.outage.Store(&Outage{time.Now(), err})
	case before == down && s.state != down:
		s.outage.Store(nil)
		s.ProbeNow()
	}
	return before
}
