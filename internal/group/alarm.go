package group

import (
	"time"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// alarm is the timer of a participant by the limiter's clock. The participant's mu must be held for all methods.
//
// Invariant: while the timer is set, it fires no later than the time of the last set.
type alarm struct {
	timer clockwork.Timer
	at    int64 // when the timer fires, in limiter microseconds; 0 if unset

	clock clockwork.Clock
	local *clock.Local
	ring  func() // called when the timer fires, without a lock
}

// set sets the timer for a time; 0 stops it.
func (a *alarm) set(next, now int64) {
	if next == a.at {
		return
	}
	a.at = next
	switch {
	case next == 0:
		a.timer.Stop()
		return
	case a.timer == nil:
		a.timer = a.clock.AfterFunc(time.Duration(next-now)*time.Microsecond, a.ring)
		if a.local.System() || a.local.Now() == now {
			return
		}
	}
	a.local.SetTimer(a.timer, next, now)
}
