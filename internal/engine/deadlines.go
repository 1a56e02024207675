package engine

import (
	"fmt"
	"time"
	"weak"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// deadlines fails the callers and the batches without a reply within the store timeout, by the system's clock. The coordinator's mu must be
// held for all methods.
//
// Invariant: the timer runs while a batch is in flight. It is not stopped by a reply, and does not keep the coordinator reachable, because
// the store timeout may be long.
type deadlines struct {
	timer   *time.Timer
	running bool

	config   *Config
	clock    clock.Local // of the limiter
	queue    *queue
	outbox   *outbox
	inFlight *inFlight
}

// start makes sure that the timer runs. It calls checkDeadlines of c.
func (d *deadlines) start(c *Coordinator) {
	switch {
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
	d.running = true
}

// restart lets the timer run until a call that has waited for elapsed has to have its result, if a batch is still in flight.
func (d *deadlines) restart(elapsed time.Duration) {
	if d.inFlight.busy {
		d.timer.Reset(d.config.Timeout - elapsed)
		d.running = true
	}
}

// expire fails the callers that have waited too long for the store (Q5). It returns since when the first of the others waits, or now.
func (d *deadlines) expire(now time.Duration) (oldest time.Duration) {
	oldest = now
	f := d.inFlight.flight
	if f != nil {
		oldest = min(f.began, d.expireCalls(f, now))
	}
	for _, q := range d.outbox.aside {
		if !q.state.over() {
			oldest = min(oldest, d.expireCall(q, q.sent, f, now))
		}
	}
	return min(oldest, d.expireWaiters(f, now))
}

// expireWaiters fails the waiters that have waited too long for the next flight. It returns since when the first of the others waits, or
// now.
func (d *deadlines) expireWaiters(f *flight, now time.Duration) (oldest time.Duration) {
	oldest = now
	for w := d.queue.asker(d.clock.Now()); w != nil; {
		q := w.Value
		if w = w.Following(); q.flight != nil {
			continue
		}
		since := d.expireCall(q, max(q.sent, d.inFlight.since), f, now)
		if oldest = min(oldest, since); !q.state.over() && !d.queue.turns.on() {
			break // the waiters behind it came later
		}
	}
	return oldest
}

// expireCalls fails the calls of a flight that have waited too long for its reply. A late reply still refunds what they took. It returns
// since when the first of the others waits, or now.
func (d *deadlines) expireCalls(f *flight, now time.Duration) (oldest time.Duration) {
	oldest = now
	for _, q := range f.calls {
		if q != nil && !q.state.over() {
			oldest = min(oldest, d.expireCall(q, q.sent, f, now))
		}
	}
	return oldest
}

// expireCall fails a call if it has waited too long for the store. It returns since, or now if the call has failed.
func (d *deadlines) expireCall(q *Call, since time.Duration, f *flight, now time.Duration) time.Duration {
	if now-since < d.config.Timeout {
		return since
	}
	d.queue.fail(q, d.config.timeoutError(f), d.clock.Now())
	return now
}

// expireFlight stops waiting for a flight whose deadline has passed.
func (d *deadlines) expireFlight(f *flight, now time.Duration) {
	d.expireCalls(f, now)
	for i, q := range f.calls {
		if q != nil && !q.state.over() { // it has other permits, or asks again: a late reply must neither end it nor meet its next use
			q.arrived(f)
			f.calls[i] = nil
		}
	}
	err := d.config.timeoutError(f)
	for _, r := range f.refunds {
		r.settle(false, err, d.clock.Now()) // it is not known whether the permits come back
	}
	f.refunds, f.late = nil, true
	d.inFlight.report(f, &permit.Outcome{}, err, now-f.began)
	d.inFlight.overdue = append(d.inFlight.overdue, f)
}

// timeoutError returns why there is no reply: the flight waits for a lock, for a connection, or for the store. f is nil if no batch is in
// flight.
func (c *Config) timeoutError(f *flight) error {
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
