package semaphore

import "time"

// alarm calls ring once, at the earliest of the times that were set since it rang last. Its owner's lock guards it, and ring sets
// at to 0.
type alarm struct {
	ring  func()
	timer *time.Timer
	at    time.Duration // 0: it is not set
}

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

func (a *alarm) stop() {
	if a.at != 0 {
		a.timer.Stop()
		a.at = 0
	}
}

// earlier of two times, of which 0 is none.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}
