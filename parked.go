package tokenbucket

import (
	"slices"
	"time"
)

// park lets an Acquire wait in this process, if its context lets it.
func (l *line) park(c *call, now int64) {
	first := l.parked[0]
	s, behind := c.limiter.effective(), l.ahead+c.permits-first.permits
	if s.Payment == PayLater { // the first was told its wait without its own cost, and c does not wait for its own
		behind = l.ahead
	}
	wait := first.decided + first.wait - now + int64(float64(behind)*s.interval)
	if !c.deadline.IsZero() && time.Until(c.deadline).Microseconds() < wait {
		c.refused, c.wait = true, wait
		c.finish(nil)
		return
	}
	c.decided, c.wait = now, wait
	c.parked0, c.waits = now, true
	l.ahead += c.permits
	l.parked = append(l.parked, c)
}

// hasten lets the parked ask sooner if an answer shows that the first of them could be granted sooner than it was told: the
// bucket was begun anew, got a higher rate, or permits back.
func (l *line) hasten(out *Outcome, received int64) {
	if len(l.parked) == 0 || l.parked[0].promised() {
		return
	}
	c, s := l.parked[0], out.Bucket.setting()
	if wait, ok := s.wait(out.Bucket.mark(), out.NowMicros, c.permits); ok {
		l.retryAt = min(l.retryAt, received+max(0, wait-c.maxWait+c.limiter.horizon/10))
	}
}

// unpark queues the parked again, ahead of all others, when the time of the first comes near.
func (l *line) unpark(now int64) {
	if len(l.parked) == 0 || now < l.retryAt {
		return
	}
	if len(l.queue) > 0 && (l.queue[0].parked0 != 0 || l.queue[0].again != 0) {
		return // those who were parked before them have not left yet
	}
	var again []*call
	n := 0
	for ; n < len(l.parked) && len(again) < maxBatch; n++ {
		if c := l.parked[n]; !c.done {
			l.unwait(c)
			c.sent = mono() // the store's time to answer begins anew
			again = append(again, c)
		}
	}
	l.queue = append(again, l.queue...)
	l.parked = slices.Delete(l.parked, 0, n)
}

func (l *line) unwait(c *call) {
	if c.waits {
		c.waits = false
		l.ahead -= c.permits
	}
}
