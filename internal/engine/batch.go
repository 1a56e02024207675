package engine

import (
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Depart implements [transport.Source].
func (c *Coordinator) Depart() (b *permit.Batch, deadline time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.build(c.Now())
	c.inFlight.departed(f)
	c.setAlarm()
	if f == nil {
		return nil, time.Time{}, false
	}
	return &f.batch, clock.At(f.began + c.Timeout), true
}

// build returns the next batch, or nil if there is nothing to send. mu must be held.
func (c *Coordinator) build(now int64) *flight {
	if !c.ready(now) {
		return nil
	}
	listener := c.listening.due(now)
	first := c.outbox.first(now, listener)
	if first == nil {
		return nil // other buckets have begun to listen since ready looked, so it is too soon for this one
	}
	f := c.inFlight.next(first, now)
	if c.outbox.fill(f, c.inFlight.since, now); f.empty() && listener == nil {
		c.inFlight.unused(f)
		return nil // no lease is useful any more
	}
	if !c.Immediate {
		f.began = clock.Mono()
		f.setDeadline(c.Timeout)
	}
	return f
}

// failAll fails the calls that need the store, which is unavailable. Calls in flight, and waiters that do not ask yet, are left. mu must be
// held.
func (c *Coordinator) failAll(o *outage.Outage) {
	c.Health.Suspect(c)
	now := c.Now()
	c.View.at = now
	err := fmt.Errorf("%w: bucket %q: since %v: %w", permit.ErrStoreUnavailable, c.Name, time.Since(o.Since).Round(time.Millisecond), o.Err)
	c.outbox.fail(err, now)
}

// checkDeadlines is called by the timer of the deadlines.
func (c *Coordinator) checkDeadlines() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadlines.running = false
	if !c.inFlight.busy {
		return
	}
	now := clock.Mono()
	oldest := c.deadlines.expire(now)
	c.dispatch(c.Now())
	c.deadlines.restart(now - oldest)
}
