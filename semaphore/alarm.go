package semaphore

import "time"

// alarm calls ring once, at the earliest of the times that were set since it last rang. The coordinator's mu guards it; ring must set at to
// 0.
type alarm struct {
	ring  func()
	timer *time.Timer
	at    time.Duration // 0 if unset
}

// set makes the alarm ring at the given time at the latest.
func (a *alarm) set(at, now time.Duration) {
	switch {
	case a.at != 0 && a.at <= at:
		return
	case a.timer == nil:
		a.timer = time.AfterFunc(at-now, a.ring)
	default:
		a.timer.Reset(at - now)
	}
	a.at = at
}

// stop unsets the alarm.
func (a *alarm) stop() {
	if a.at != 0 {
		a.timer.Stop()
		a.at = 0
	}
}

// earlier returns the earlier of two times. 0 means no time.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}
