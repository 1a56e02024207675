package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// check refuses what cannot be asked for. It tells when the switch is off: the request passes at once.
func (l *RateLimiter) check(ctx context.Context, permits int) (off bool, err error) {
	if permits <= 0 {
		return false, fmt.Errorf("%w: bucket %q: permits %d: want at least 1", ErrInvalidPermits, l.Name(), permits)
	}
	if int64(permits) > maxExact {
		return false, l.overflow(int64(permits))
	}
	if permits > 1 { // the constructor has seen to one
		if _, ok := l.effective().after(l.own.Kind, permit.Balance{}, int64(permits)); !ok && l.heardLately() {
			return false, l.overflow(int64(permits))
		}
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	return l.enabled != nil && !l.enabled(), nil
}

func (l *RateLimiter) newCall(ctx context.Context, v verb, permits, timeout int64) *call {
	q := calls.Get().(*call)
	q.limiter, q.verb, q.Permits, q.timeout, q.ready = &l.limiter, v, permits, timeout, make(chan struct{})
	q.deadline = deadlineOf(ctx)
	return q
}

// deadlineOf is when a context ends, see mono; 0: it does not by itself.
func deadlineOf(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return clock.Of(deadline)
	}
	return 0
}

// heardLately tells whether the configuration that this process knows is at most snapshotAge old, or the store is away and cannot tell
// of a newer one.
func (l *RateLimiter) heardLately() bool {
	c := l.coordinator
	if c.down() != nil {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.heard.told != 0 && c.now()-c.heard.told < snapshotAge.Microseconds()
}

// longest is a timeout as the longest wait in microseconds. The error tells that no state of the bucket could grant the request
// within it, by the configuration that this process knows: if it has not heard from the store lately, another may be in force. If the
// limiter warms up, it tells only that a cold bucket could not (see certain).
func (l *RateLimiter) longest(permits int64, timeout time.Duration) (maxWait int64, never error) {
	maxWait = min(max(0, timeout.Microseconds()), maxExact)
	s := l.effective()
	if s.Kind == bursty && float64(permits) <= s.max {
		return maxWait, nil
	}
	if least := s.leastWait(&s.curve, permits); least > maxWait {
		return maxWait, &WaitError{l.Name(), int(permits), time.Duration(least) * time.Microsecond, ErrNeverGranted}
	}
	return maxWait, nil
}

// LeastWait returns how long one permit takes at least, whatever the state of the bucket, by the limiter's own configuration. With a shorter
// timeout every call ends with [ErrNeverGranted]. It is 0 unless the bucket holds less than a permit, and for a limiter that warms up.
func (l *RateLimiter) LeastWait() time.Duration {
	if l.own.Kind != bursty || l.own.max >= 1 {
		return 0
	}
	return time.Duration(l.own.leastWait(&l.own.curve, 1)) * time.Microsecond
}

// certain tells that no state of the bucket grants what longest says is never granted. One that warms up has to be asked: it may be warm.
func (l *RateLimiter) certain(never error) bool { return never != nil && l.own.Kind == bursty }

// refusesUnasked reports whether a call cannot be granted by what the last reply showed of the bucket, and the wait that it would have taken.
// The error is set if only the context ends too soon, as of a call that the store was asked for (see hopeless).
func (l *RateLimiter) refusesUnasked(ctx context.Context, permits, maxWait int64) (wait time.Duration, refused bool, err error) {
	if l.coordinator.snapshot.Load() == nil {
		return 0, false, nil
	}
	most := maxWait
	if deadline := deadlineOf(ctx); deadline != 0 {
		most = min(most, max(0, (deadline-mono()).Microseconds()))
	}
	micros, refused := l.coordinator.refuses(&l.limiter, permits, most)
	wait = time.Duration(micros) * time.Microsecond
	if refused && micros <= maxWait {
		err = &WaitError{l.Name(), int(permits), wait, context.DeadlineExceeded}
	}
	return wait, refused, err
}

// wait blocks until the call is answered and its permits are due, or the context ends.
func (l *RateLimiter) wait(ctx context.Context, q *call) error {
	done := ctx.Done()
	if done == nil {
		<-q.ready
		return q.err
	}
	select {
	case <-q.ready:
		return q.err
	default:
	}
	select {
	case <-q.ready:
		return q.err
	case <-done:
		if l.coordinator.leave(q, ctx.Err()) {
			return ctx.Err()
		}
		return q.err // answered in the same instant
	}
}

// hopeless makes errors of two kinds of refusals: the configuration that the answer brought can never grant the request, or only the
// context is too short for the wait.
func (l *RateLimiter) hopeless(q *call, timeout time.Duration) error {
	if q.state != refused {
		return nil
	}
	var never *WaitError
	if _, err := l.longest(q.Permits, timeout); errors.As(err, &never) {
		off := q.wait - never.Wait.Microseconds()
		if cold := -1 <= off && off <= 1; cold || l.certain(never) {
			return never
		}
	}
	if wait := time.Duration(q.wait) * time.Microsecond; q.deadline != 0 && wait <= timeout {
		return &WaitError{l.Name(), int(q.Permits), wait, context.DeadlineExceeded}
	}
	return nil
}

// ask is a call for permits that fall due within a timeout.
type ask func(l *RateLimiter, timeout time.Duration) (verdict, error)

// observed asks for permits as told, and tells the observer what came of it. A store that is away is where the policy
// decides.
func (l *RateLimiter) observed(ctx context.Context, permits int, timeout time.Duration, ask ask) (verdict, error) {
	began := mono()
	var v verdict
	var err error
	if l.shadow {
		v, err = l.shadowed(ctx, permits, timeout)
	} else if v, err = ask(l, timeout); err != nil {
		v, err = l.fallback(ctx, v, err, func(local *RateLimiter) (verdict, error) { // in time, whatever it took to get here
			return ask(local, max(0, timeout)-max(0, mono()-began-l.coordinator.timeout))
		})
	}
	if o := l.observer; o != nil && o.Decision != nil {
		o.Decision(ctx, Decision{
			Bucket: l.Name(), Label: l.label, Permits: permits, Granted: err == nil && v.granted, Err: err, By: v.by,
			Wait: v.wait, Elapsed: mono() - began, Shadow: l.shadow,
		})
	}
	if l.shadow {
		return verdict{granted: true, overruled: err != nil || !v.granted}, nil
	}
	return v, err
}

// Waiting returns how many calls of this process are in progress while the queue is not empty, and how long its head has waited. Calls
// that wait for nothing but the store's reply are included. Both results are 0 if the queue is empty.
func (l *RateLimiter) Waiting() (calls int, longest time.Duration) {
	c := l.coordinator
	c.mu.Lock()
	defer c.mu.Unlock()
	if first := c.waiters.any(); first != nil {
		return c.calls, time.Duration(c.now()-first.Came) * time.Microsecond
	}
	return 0, 0
}
