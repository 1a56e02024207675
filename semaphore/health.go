package semaphore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"time"
	"weak"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/internal/weakmap"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// groups are the outage groups by client. If many semaphores of a client are away, each is probed less often.
var groups weakmap.Map[any, outage.Group]

// groupOf returns the outage group of a store.
func groupOf(st store.Store) *outage.Group {
	if r, ok := st.(*redisStore); ok && reflect.TypeOf(r.client).Kind() == reflect.Pointer {
		return groups.Get(r.client, func() *outage.Group { return new(outage.Group) })
	}
	return new(outage.Group)
}

// health is whether the store replies, and the pace of batches after failures. The coordinator's mu guards notUntil; the other fields do
// not change.
type health struct {
	name     string // of the semaphore
	observer *Observer
	monitor  *outage.Monitor // detects outages of the store
	pause    time.Duration   // after a failed batch

	notUntil time.Duration // requests for which no caller waits are not sent before this time
}

// down reports whether there is an outage.
func (h *health) down() bool { return h.monitor.Down() != nil }

// away returns an ErrStoreUnavailable during an outage, and makes the monitor go on probing.
func (h *health) away() error {
	o := h.monitor.Down()
	if o == nil {
		return nil
	}
	h.monitor.Failed()
	return fmt.Errorf("%w (unavailable for %v)", o.Err, time.Since(o.Since).Round(time.Millisecond))
}

// calm reports whether requests may be sent for which no caller waits.
func (h *health) calm(now time.Duration) bool { return now >= h.notUntil }

// failed postpones such requests after a failed batch.
func (h *health) failed(now time.Duration) { h.notUntil = now + h.pause }

// undecided postpones them after a batch that was decided in part, and took so long: the store has half of its time for others.
func (h *health) undecided(now, took time.Duration) {
	h.notUntil = now + min(h.pause, max(movingPause, took))
}

// recovered ends that.
func (h *health) recovered() { h.notUntil = 0 }

// landed reports the end of a round trip to the monitor and the observer.
func (h *health) landed(requests int, elapsed time.Duration, err error) {
	if o := h.observer; o != nil && o.Trip != nil {
		o.Trip(Trip{Semaphore: h.name, Requests: requests, Elapsed: elapsed, Err: err})
	}
	var partial *store.Partial
	switch {
	case err == nil, errors.As(err, &partial):
		h.monitor.Answered(elapsed)
	case errors.Is(err, ErrStoreUnavailable):
		h.monitor.Failed()
	}
}

// changed reports the beginning or the end of an outage to the observer. The coordinator's mu must not be held.
func (h *health) changed(change outage.Change) {
	if o := h.observer; o != nil && o.Health != nil {
		o.Health(Health{Semaphore: h.name, Down: change.Down, Err: change.Err, After: change.After})
	}
}

// newMonitor returns the monitor of a coordinator's store. It does not keep the coordinator alive.
func newMonitor(c *coordinator) *outage.Monitor {
	used := weak.Make(c)
	return outage.New(groupOf(c.transport.store), outage.Backend{
		Next: func() (p outage.Probe, wanted bool) {
			if c := used.Value(); c != nil {
				p, wanted = outage.Probe{Ask: c.transport.probe, Timeout: c.timeout}, c.isOpen()
			}
			return p, wanted
		},
		Away:    func(err error) bool { return errors.Is(err, ErrStoreUnavailable) },
		Timeout: fmt.Errorf("%w: semaphore %.80q: %w", ErrStoreUnavailable, c.name, ErrStoreTimeout),
		Changed: func(change outage.Change) {
			if c := used.Value(); c != nil {
				c.changed(change)
			}
		},
	})
}

// probe asks the store whether it can serve: by a write in Redis, by Stats in other stores.
func (t *transport) probe(ctx context.Context) (err error) {
	defer func() {
		if value := recover(); value != nil { // of the store, or of a hook of its client
			batch.LogPanic("a probe", value)
			err = fmt.Errorf("semaphore %.80q: %w", t.name, batch.PanicError(value))
		}
	}()
	if r, ok := t.store.(*redisStore); ok {
		return wrap(t.name, r.reach(ctx))
	}
	_, err = t.store.Stats(ctx)
	return wrap(t.name, err)
}

// isOpen reports whether the semaphore has not been closed.
func (c *coordinator) isOpen() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.closed
}

// changed runs when an outage begins or ends. When it begins, callers that wait for a reply fail. Waiters in the queue keep their places,
// unless the policy is FailOpen. When it ends, queued requests are sent.
func (c *coordinator) changed(change outage.Change) {
	c.health.changed(change)
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	if change.Down {
		c.failPending(everyCall, change.Err)
		if c.policy == FailOpen {
			for _, r := range c.waiters.queued() {
				c.fail(r, change.Err)
			}
		}
	} else {
		c.health.recovered()
	}
	c.setAlarm(now)
}

// wrap returns an error of a store as callers get it: with the semaphore's name, and matching ErrStoreUnavailable, ErrStoreUnusable or
// ErrCorruptState.
func wrap(name string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrStoreUnavailable), errors.Is(err, ErrStoreUnusable), errors.Is(err, ErrCorruptState):
		return fmt.Errorf("semaphore %.80q: %w", name, err)
	case !script.Away(err):
		return fmt.Errorf("%w: semaphore %.80q: %w", ErrStoreUnusable, name, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: semaphore %.80q: %w: %w", ErrStoreUnavailable, name, ErrStoreTimeout, err)
	}
	return fmt.Errorf("%w: semaphore %.80q: %w", ErrStoreUnavailable, name, err)
}

// pass returns a permit that only this process knows.
func (c *coordinator) pass(n int) (*Permit, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return nil, errClosed(c.name)
	case n > c.view.permits:
		return nil, tooMany(c.name, n, c.view.permits)
	}
	now := clock.Mono()
	p := &Permit{engine: c, permits: n, since: now, more: &more{id: c.ids.next(), passed: true, deadline: never}}
	if c.fixed {
		p.more.deadline = now + c.lease - c.held.margin
	}
	c.held.add(p)
	c.setAlarm(now)
	return p, nil
}

// failPending ends the overdue calls that wait for a reply, whether they are queued or in flight. c.mu must be held.
func (c *coordinator) failPending(overdue overdue, err error) {
	c.waiters.failFresh(overdue, err)
	c.releases.fail(overdue, err)
	c.limits.fail(overdue, err)
	f := c.source.flight
	if f == nil {
		return
	}
	f.failCalls(overdue, err)
	for _, r := range f.undecided(overdue) {
		c.fail(r, err)
	}
}
