package waiting

import (
	"time"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// alarm is a timer by the process's clock. It is not stopped when its time is put off: to set a timer costs as much as to wake a goroutine, and
// it rings in vain at most once a store timeout. The lock of the process guards it.
//
// Invariant: at is not after the last time that was set.
type alarm struct {
	timer *time.Timer
	at    time.Duration // when it rings, by clock.Mono; 0 if unset
}

// isLate reports whether the alarm must be set to ring by a time; 0 is no time.
func (a *alarm) isLate(at time.Duration) bool { return at != 0 && (a.at == 0 || a.at > at) }

// set makes the alarm ring at a time. ring is always the same function.
func (a *alarm) set(at, now time.Duration, ring func()) {
	if a.at = at; a.timer == nil {
		a.timer = time.AfterFunc(at-now, ring)
		return
	}
	a.timer.Reset(at - now)
}

// passed records that the alarm has rung, if its time has come.
func (a *alarm) passed(now time.Duration) {
	if now >= a.at {
		a.at = 0
	}
}

// earlier returns the earlier of two times; 0 means no time.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// look is a timer by the limiter's clock, which may be a test's. The lock of the process guards it.
type look struct {
	ring   func()
	timers clockwork.Clock // nil for the system's
	local  *clock.Local    // reads timers
	timer  clockwork.Timer
	at     int64 // when it rings, in microseconds by the clock
	on     bool
}

// set makes the timer ring after a time; 0 stops it.
func (l *look) set(after time.Duration, now int64) {
	at := now + after.Microseconds()
	switch {
	case after == 0:
		if l.on {
			l.on = false
			l.timer.Stop()
		}
		return
	case l.on && l.at == at:
		return
	case l.timer == nil:
		if l.timers == nil {
			l.timers = clockwork.NewRealClock()
		}
		l.timer = l.timers.AfterFunc(after, l.ring)
		if l.local.System() || l.local.Micros() == now {
			break
		}
		fallthrough
	default:
		l.local.SetTimer(l.timer, clock.FromMicros(at), clock.FromMicros(now))
	}
	l.at, l.on = at, true
}
