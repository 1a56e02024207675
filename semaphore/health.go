package semaphore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"runtime/debug"
	"slices"
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

// watch makes the monitor of the store. The monitor does not keep the coordinator alive.
func (c *coordinator) watch() {
	used := weak.Make(c)
	c.monitor = outage.New(groupOf(c.transport.store), outage.Backend{
		Next: func() (p outage.Probe, wanted bool) {
			if c := used.Value(); c != nil {
				p, wanted = outage.Probe{Ask: c.reach, Timeout: c.timeout}, c.isOpen()
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

// reach probes the store: by a write in Redis, by Stats in other stores.
func (c *coordinator) reach(ctx context.Context) (err error) {
	defer func() {
		if value := recover(); value != nil { // of the store, or of a hook of its client
			slog.Default().Error("semaphore: recovered a panic of a probe, the store is probed again", "panic", value, "stack", string(debug.Stack()))
			err = fmt.Errorf("semaphore %.80q: %w: %v", c.name, batch.ErrPanic, value)
		}
	}()
	if r, ok := c.transport.store.(*redisStore); ok {
		return wrap(c.name, r.reach(ctx))
	}
	_, err = c.transport.store.Stats(ctx)
	return wrap(c.name, err)
}

func (c *coordinator) isOpen() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.closed
}

// away returns an ErrStoreUnavailable during an outage, and makes the monitor go on probing.
func (c *coordinator) away() error {
	o := c.monitor.Down()
	if o == nil {
		return nil
	}
	c.monitor.Failed()
	return fmt.Errorf("%w (unavailable for %v)", o.Err, time.Since(o.Since).Round(time.Millisecond))
}

// changed runs when an outage begins or ends. When it begins, callers that wait for a reply fail. Waiters in the queue keep their places,
// unless the policy is FailOpen. When it ends, queued requests are sent.
func (c *coordinator) changed(change outage.Change) {
	event := Health{Semaphore: c.name, Down: change.Down, Err: change.Err, After: change.After}
	if o := c.observer; o != nil && o.Health != nil {
		o.Health(event)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	if change.Down {
		c.failPending(func(time.Duration) bool { return true }, change.Err)
		if c.policy == FailOpen {
			c.failQueued(change.Err)
		}
	} else {
		c.health.notUntil = 0
	}
	c.setAlarm(now)
}

// failQueued ends the requests that wait for permits in the store's queue. Requests that wait until no permit is held stay. c.mu must be
// held.
func (c *coordinator) failQueued(err error) {
	for _, r := range c.waiters.sent {
		if !r.done && r.queued && r.n > 0 {
			c.abandon(r)
			c.waiters.finish(r, nil, err)
		}
	}
}

// health paces the batches after failures. The coordinator's mu guards it.
type health struct {
	notUntil time.Duration // requests for which no caller waits are not sent before this time
}

// calm reports whether requests may be sent for which no caller waits.
func (h *health) calm(now time.Duration) bool { return now >= h.notUntil }

// landed reports the end of a trip to the monitor and the observer. c.mu must be held.
func (c *coordinator) landed(f *flight, err error, now time.Duration) {
	if o := c.observer; o != nil && o.Trip != nil {
		o.Trip(Trip{Semaphore: c.name, Requests: f.size(), Elapsed: now - f.sent, Err: err})
	}
	switch {
	case err == nil:
		c.monitor.Answered(now - f.sent)
	case errors.Is(err, ErrStoreUnavailable):
		c.monitor.Failed()
	}
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
		return nil, c.errClosed()
	case n > c.view.permits:
		return nil, tooMany(c.name, n, c.view.permits)
	}
	now := clock.Mono()
	p := &Permit{engine: c, permits: n, since: now, more: &more{id: c.newID(), passed: true, deadline: never}}
	if c.fixed {
		p.more.deadline = now + c.lease - c.margin
	}
	c.held.add(p, c.lease)
	c.setAlarm(now)
	return p, nil
}

// expectReply makes sure that a call that began at the given time has a result by its deadline. c.mu must be held.
func (c *coordinator) expectReply(since time.Duration) {
	if c.replyBy == 0 {
		c.replyBy = since + c.timeout
		c.alarm.set(c.replyBy, since)
	}
}

// failOverdue ends the calls that have waited too long for a reply, whatever becomes of the batch that they are in or wait for. c.mu must
// be held.
func (c *coordinator) failOverdue(now time.Duration) {
	if c.replyBy == 0 || now < c.replyBy {
		return
	}
	const together = time.Millisecond // otherwise each call of a crowd would have an alarm of its own
	c.replyBy = 0
	c.failPending(func(since time.Duration) bool {
		by := since + c.timeout
		if by > now+together {
			c.replyBy = earlier(c.replyBy, by)
		}
		return by <= now+together
	}, fmt.Errorf("%w: semaphore %.80q: %w", ErrStoreUnavailable, c.name, ErrStoreTimeout))
}

// failPending ends the calls that wait for a reply and began at an overdue time. c.mu must be held.
func (c *coordinator) failPending(overdue func(since time.Duration) bool, err error) {
	c.waiters.failFresh(overdue, err)
	for _, a := range c.allPending() {
		if overdue(a.since) {
			a.finish(err)
		}
	}
	c.changes = slices.DeleteFunc(c.changes, func(change *limitChange) bool { return change.finished })
	if c.flight != nil {
		for _, r := range c.flight.enter {
			if !r.done && !r.queued && overdue(r.since) {
				c.abandon(r)
				c.waiters.finish(r, nil, err)
			}
		}
	}
}

// allPending returns the calls that wait for a reply, except requests for permits. c.mu must be held.
func (c *coordinator) allPending() (all []*pending) {
	releases, changes := slices.Clone(c.releases.list), slices.Clone(c.changes)
	if c.flight != nil {
		releases = append(releases, c.flight.releases...)
		if c.flight.change != nil {
			changes = append(changes, c.flight.change)
		}
	}
	for _, l := range releases {
		all = append(all, &l.pending)
	}
	for _, change := range changes {
		all = append(all, &change.pending)
	}
	return slices.DeleteFunc(all, func(a *pending) bool { return !a.waiting() })
}
