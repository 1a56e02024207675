package outage

import (
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// state is the state of a backend as far as this process has noticed.
type state uint8

const (
	up         state = iota // no failure is known
	suspected               // a call failed and a probe is due or in flight; calls are still sent
	down                    // a probe failed; no calls are sent
	recovering              // the outage has ended and its watchers are being notified; calls are sent again
	states
)

// event is a transition's cause.
type event uint8

const (
	callFailed event = iota
	probeFailed
	probeAnswered
	abandoned // no caller is interested in the backend any longer
	notified  // every watcher was notified of the end of the outage
	events
)

// transitions maps a state and an event to the next state. A call that fails while watchers are being notified of the end of an outage
// starts a new suspicion, which the event notified leaves in place.
var transitions = [states][events]state{
	up:         {callFailed: suspected, probeFailed: down, probeAnswered: up, abandoned: up, notified: up},
	suspected:  {callFailed: suspected, probeFailed: down, probeAnswered: up, abandoned: up, notified: suspected},
	down:       {callFailed: down, probeFailed: down, probeAnswered: recovering, abandoned: recovering, notified: down},
	recovering: {callFailed: suspected, probeFailed: down, probeAnswered: recovering, abandoned: recovering, notified: up},
}

// Outage is one outage. Its address identifies it from its beginning to its end.
type Outage struct {
	Since time.Time
	Err   error // the error of the first failed probe
}

// Status is the state of one backend and the time of its next probe. The zero value is up. Down is safe for concurrent use; the lock of
// the owner must be held for everything else.
//
// A Status sends nothing. A Monitor owns a Status and sends the probes. An owner that uses its ordinary calls as probes needs no Monitor:
// each failed call is an outage, and the next call is sent when a probe is due.
type Status struct {
	state  state
	outage atomic.Pointer[Outage] // non-nil exactly while the state is down
	pause  time.Duration          // mean of the pause between the last probe and the next
	dueAt  time.Duration          // when the next probe is due, as clock.Mono
}

// Down returns the current outage, or nil. It takes no lock.
func (s *Status) Down() *Outage { return s.outage.Load() }

// ProbeFailed records a failed probe and schedules the next one. The mean pause is twice the last one, within the bounds. The pause itself
// varies by half of that mean, so that the processes of a fleet do not probe in step.
func (s *Status) ProbeFailed(err error, shortest, longest time.Duration) {
	s.on(probeFailed, err)
	s.pause = min(max(2*s.pause, shortest), longest)
	s.dueAt = clock.Mono() + s.pause/2 + rand.N(s.pause)
}

// ProbeAnswered records an answered probe. It returns the outage that ended, or nil if there was none.
func (s *Status) ProbeAnswered() (ended *Outage) {
	ended = s.outage.Load()
	s.on(probeAnswered, nil)
	s.on(notified, nil)
	return ended
}

// UntilProbe returns the time until the next probe is due, or 0 if it is due.
func (s *Status) UntilProbe() time.Duration { return max(0, s.dueAt-clock.Mono()) }

// ProbeNow makes the next probe due at once and resets the pause to the shortest.
func (s *Status) ProbeNow() { s.pause, s.dueAt = 0, 0 }

// on applies an event and returns the previous state. err is the cause of an outage that begins.
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
