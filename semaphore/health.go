package semaphore

import (
	"errors"
	"time"
)

// health is whether the backend answers. The coordinator's lock guards it.
type health struct {
	notUntil time.Duration // after an error, for what nobody waits for
	downAt   time.Duration // when it was noticed that it does not answer; 0: it does
}

// calm tells that what nobody waits for may be sent.
func (h *health) calm(now time.Duration) bool { return now >= h.notUntil }

// answered notes the end of a trip, and tells the observer. mu is held.
func (c *coordinator) answered(f *flight, err error, now time.Duration) {
	o := c.observer
	if o != nil && o.Trip != nil {
		o.Trip(Trip{Semaphore: c.name, Requests: f.size(), Elapsed: now - f.sent, Err: err})
	}
	h := &c.health
	down := err != nil && !errors.Is(err, ErrCorrupt)
	event := Health{Semaphore: c.name, Down: down, Err: err}
	switch {
	case down && h.downAt == 0:
		h.downAt = now
	case !down && h.downAt != 0:
		event.Err, event.After = nil, now-h.downAt
		h.downAt = 0
	default:
		return
	}
	if o != nil && o.Health != nil {
		o.Health(event)
	}
}
