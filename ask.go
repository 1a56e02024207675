package tokenbucket

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/seam"
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
		if _, ok := l.effective().after(l.own.Kind, balance{}, int64(permits)); !ok && l.heardLately() {
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

// certain tells that no state of the bucket grants what longest says is never granted. One that warms up has to be asked: it may be warm.
func (l *RateLimiter) certain(never error) bool { return never != nil && l.own.Kind == bursty }

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
			Bucket: l.Name(), Permits: permits, Granted: err == nil && v.granted, Err: err, By: cmp.Or(v.by, "store"),
			Wait: v.wait, Elapsed: mono() - began, Shadow: l.shadow,
		})
	}
	if l.shadow {
		return verdict{granted: true}, nil
	}
	return v, err
}

func init() { seam.Waiting = func(l any) (int, time.Duration) { return l.(*RateLimiter).waiting() } }

// waiting is how many calls there are while somebody waits, and for how long the first in a line has. Those who only wait for the
// store's answer are among them.
func (l *RateLimiter) waiting() (calls int, longest time.Duration) {
	c := l.coordinator
	c.mu.Lock()
	defer c.mu.Unlock()
	if first := c.waiters.any(); first != nil {
		return c.calls, time.Duration(c.now()-first.Came) * time.Microsecond
	}
	return 0, 0
}
