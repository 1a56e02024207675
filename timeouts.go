package tokenbucket

import (
	"fmt"
	"time"
	"weak"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// timeouts notices when the store does not answer.
type timeouts struct {
	timer   *time.Timer
	running bool
}

// startTimeouts makes sure that a store which does not answer is noticed. The timer does not hold the coordinator: it is not stopped when
// the store has answered, and the store timeout may be long. Callers who wait hold it.
func (c *coordinator) startTimeouts() {
	switch t := &c.timeouts; {
	case c.inline() || t.running:
		return
	case t.timer == nil:
		held := weak.Make(c)
		t.timer = time.AfterFunc(c.timeout, func() {
			if c := held.Value(); c != nil {
				c.checkTimeouts()
			}
		})
	default:
		t.timer.Reset(c.timeout)
	}
	c.timeouts.running = true
}

// checkTimeouts fails the callers to whom the store has not answered in time (Q5).
func (c *coordinator) checkTimeouts() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.timeouts.running = false
	if !c.sending.flying {
		return
	}
	now := mono()
	oldest := now
	f := c.sending.flight
	if f != nil {
		oldest = min(f.began, c.expireCalls(f, now))
	}
	for _, q := range c.aside {
		if !q.state.over() {
			oldest = min(oldest, c.expire(q, q.sent, f, now))
		}
	}
	oldest = min(oldest, c.expireWaiters(f, now))
	c.dispatch(c.now())
	if c.sending.flying {
		c.timeouts.timer.Reset(c.timeout - (now - oldest))
		c.timeouts.running = true
	}
}

// expireWaiters fails those who wait for the next flight for too long, and returns since when the first of the others waits.
func (c *coordinator) expireWaiters(f *flight, now time.Duration) (oldest time.Duration) {
	oldest = now
	for w := c.waiters.asker(c.now()); w != nil; {
		q := w.Value
		if w = w.Following(); q.flight != nil {
			continue
		}
		since := c.expire(q, max(q.sent, c.sending.since), f, now)
		if oldest = min(oldest, since); !q.state.over() {
			break // those behind it came later
		}
	}
	return oldest
}

// expire fails a call that has waited for the store since a time, if that is for too long. It returns that time, or now.
func (c *coordinator) expire(q *call, since time.Duration, f *flight, now time.Duration) time.Duration {
	if now-since < c.timeout {
		return since
	}
	c.fail(q, c.timeoutError(f))
	return now
}

// expireCalls fails those of a flight's callers to whom the store has not answered in time, and returns since when the first of the
// others waits. Should the answer still come, what they took is given back.
func (c *coordinator) expireCalls(f *flight, now time.Duration) (oldest time.Duration) {
	oldest = now
	for _, q := range f.calls {
		if !q.state.over() {
			oldest = min(oldest, c.expire(q, q.sent, f, now))
		}
	}
	return oldest
}

// expireFlight stops waiting for a batch that the store has not answered in time.
func (c *coordinator) expireFlight(f *flight, now time.Duration) {
	c.expireCalls(f, now)
	for i, q := range f.calls {
		if !q.state.over() { // it holds other permits, or asks again: what f still brings neither ends it nor finds it reused
			q.arrived(f)
			gone := &call{limiter: q.limiter, state: left}
			gone.Permits = q.Permits
			f.calls[i] = gone
		}
	}
	err := c.timeoutError(f)
	for _, r := range f.refunds {
		r.settle(false, err, c.now()) // perhaps they come back, perhaps not
	}
	f.refunds, f.late = nil, true
	c.report(f, &permit.Outcome{}, err, now-f.began)
	c.sending.overdue = append(c.sending.overdue, f)
}

// timeoutError is why callers were not answered in time, while a flight is under way: it waits for a lock, for a connection, or for a reply.
func (c *coordinator) timeoutError(f *flight) error {
	if f != nil && f.batch.Session != nil && f.batch.Session.Waits() {
		return fmt.Errorf("%w: bucket %q: within %v", ErrLockNotObtained, c.label(), c.timeout)
	}
	if busy := c.traits.busy; busy != nil {
		if err := busy(c.key); err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: bucket %q: no answer within %v", ErrStoreTimeout, c.label(), c.timeout)
}
