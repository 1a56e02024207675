package engine

import (
	"fmt"
	"math/rand/v2"
	"time"
	"weak"

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
	listener := c.listener(now)
	first := c.outbox.first(now, listener)
	if first == nil {
		return nil // other buckets have begun to listen since ready looked, so it is too soon for this one
	}
	f := c.newFlight(first, now)
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

// newFlight returns an empty flight. mu must be held.
func (c *Coordinator) newFlight(l *Limiter, now int64) *flight {
	f := c.inFlight.next(&c.Config, l, now)
	f.batch.Epoch, f.batch.LocalMicros = NewEpoch(), c.micros
	if c.view.server.Known() {
		micros, received := c.view.server.Last()
		f.batch.ServerMicros, f.batch.ServerRead = micros, clock.At(received)
	}
	return f
}

// NewEpoch returns a random name for an epoch. A refund refers to an epoch that is at most seconds old, so 40 bits suffice.
func NewEpoch() int64 { return rand.Int64N(1<<40) + 1 }

// failAll fails the calls that need the store, which is unavailable. Calls in flight, and waiters that do not ask yet, are left. mu must be
// held.
func (c *Coordinator) failAll(o *outage.Outage) {
	c.Health.Suspect(c)
	now := c.Now()
	c.view.at = now
	err := fmt.Errorf("%w: bucket %q: since %v: %w", permit.ErrStoreUnavailable, c.Name, time.Since(o.Since).Round(time.Millisecond), o.Err)
	for _, q := range c.outbox.aside {
		c.fail(q, err)
	}
	c.outbox.aside = nil
	for w := c.queue.asker(now); w != nil; {
		q := w.Value
		if w = w.Following(); q.flight == nil {
			c.fail(q, err)
		}
	}
	c.outbox.fail(err, now)
}

// deadlines is the timer that finds callers without a reply from the store, by the system's clock. The coordinator's mu guards it.
//
// Invariant: it runs while a batch is in flight. It is not stopped by a reply, and does not keep the coordinator reachable, because the store
// timeout may be long.
type deadlines struct {
	timer   *time.Timer
	running bool
}

// startDeadlines makes sure that the timer runs. mu must be held.
func (c *Coordinator) startDeadlines() {
	switch d := &c.deadlines; {
	case c.Immediate || d.running:
		return
	case d.timer == nil:
		held := weak.Make(c)
		d.timer = time.AfterFunc(c.Timeout, func() {
			if c := held.Value(); c != nil {
				c.checkDeadlines()
			}
		})
	default:
		d.timer.Reset(c.Timeout)
	}
	c.deadlines.running = true
}

// checkDeadlines fails the callers without a reply by their deadline (Q5).
func (c *Coordinator) checkDeadlines() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadlines.running = false
	if !c.inFlight.busy {
		return
	}
	now := clock.Mono()
	oldest := now
	f := c.inFlight.flight
	if f != nil {
		oldest = min(f.began, c.expireCalls(f, now))
	}
	for _, q := range c.outbox.aside {
		if !q.state.over() {
			oldest = min(oldest, c.expire(q, q.sent, f, now))
		}
	}
	oldest = min(oldest, c.expireWaiters(f, now))
	c.dispatch(c.Now())
	if c.inFlight.busy {
		c.deadlines.timer.Reset(c.Timeout - (now - oldest))
		c.deadlines.running = true
	}
}

// expireWaiters fails the waiters that have waited too long for the next flight. It returns since when the first of the others waits, or
// now. mu must be held.
func (c *Coordinator) expireWaiters(f *flight, now time.Duration) (oldest time.Duration) {
	oldest = now
	for w := c.queue.asker(c.Now()); w != nil; {
		q := w.Value
		if w = w.Following(); q.flight != nil {
			continue
		}
		since := c.expire(q, max(q.sent, c.inFlight.since), f, now)
		if oldest = min(oldest, since); !q.state.over() {
			break // the waiters behind it came later
		}
	}
	return oldest
}

// expire fails a call if it has waited too long for the store. It returns since, or now if the call has failed. mu must be held.
func (c *Coordinator) expire(q *Call, since time.Duration, f *flight, now time.Duration) time.Duration {
	if now-since < c.Timeout {
		return since
	}
	c.fail(q, c.timeoutError(f))
	return now
}

// expireCalls fails the calls of a flight that have waited too long for its reply. A late reply still refunds what they took. It returns
// since when the first of the others waits, or now. mu must be held.
func (c *Coordinator) expireCalls(f *flight, now time.Duration) (oldest time.Duration) {
	oldest = now
	for _, q := range f.calls {
		if q != nil && !q.state.over() {
			oldest = min(oldest, c.expire(q, q.sent, f, now))
		}
	}
	return oldest
}

// expireFlight stops waiting for a flight whose deadline has passed. mu must be held.
func (c *Coordinator) expireFlight(f *flight, now time.Duration) {
	c.expireCalls(f, now)
	for i, q := range f.calls {
		if !q.state.over() { // it has other permits, or asks again: a late reply must neither end it nor meet its next use
			q.arrived(f)
			f.calls[i] = nil
		}
	}
	err := c.timeoutError(f)
	for _, r := range f.refunds {
		r.settle(false, err, c.Now()) // it is not known whether the permits come back
	}
	f.refunds, f.late = nil, true
	c.report(f, &permit.Outcome{}, err, now-f.began)
	c.inFlight.overdue = append(c.inFlight.overdue, f)
}

// timeoutError returns why there is no reply: the flight waits for a lock, for a connection, or for the store. mu must be held.
func (c *Coordinator) timeoutError(f *flight) error {
	if f != nil && f.batch.Session != nil && f.batch.Session.Waits() {
		return fmt.Errorf("%w: bucket %q: within %v", permit.ErrLockNotObtained, c.Name, c.Timeout)
	}
	if c.Busy != nil {
		if err := c.Busy(c.Key); err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: bucket %q: no answer within %v", permit.ErrStoreTimeout, c.Name, c.Timeout)
}
