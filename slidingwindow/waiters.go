package slidingwindow

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// waiters are the callers of Wait and WaitN of a limiter without Redis. The one that has the turn makes requests; the others queue behind it, first come, first
// served.
type waiters struct {
	turn     chan struct{} // of capacity 1; the runtime serves senders in order. nil until a call waits, which most limiters never have
	released chan struct{} // of capacity 1; receives when something changed in favour of waiters. nil with turn
	waiting  atomic.Int64
	most     int64
	timers   clockwork.Clock
}

// setUp prepares w. It must be called before use.
func (w *waiters) setUp(o *options) {
	w.most, w.timers = int64(o.waiters), o.clock
	if w.timers == nil {
		w.timers = clockwork.NewRealClock()
	}
}

// open makes the channels. The limiter's mu must be held.
func (w *waiters) open() {
	if w.turn == nil {
		w.turn, w.released = make(chan struct{}, 1), make(chan struct{}, 1)
	}
}

// wake makes the first waiter try again. The limiter's mu must be held.
func (w *waiters) wake() {
	select {
	case w.released <- struct{}{}:
	default:
	}
}

// Wait is WaitN of one permit.
func (l *Limiter) Wait(ctx context.Context) error { return l.WaitN(ctx, 1) }

// WaitN waits until n permits are admitted, all of them at once. It returns ctx's error if ctx ends first, or an error of AllowN. During an
// outage of Redis the [FailurePolicy] decides; WaitN does not wait for Redis.
//
// The waiters of a process are served first come, first served: a request for many permits is not overtaken, and holds up those behind it.
// AllowN and Take do not queue, and may take permits that were freed. Among processes there is no order. A waiter tries again when its
// permits may be free (RetryAfter), with Redis at least once in a sub-interval, since others may have refunded permits, and during an
// outage when a probe is due. If more wait than WithMaxWaiters allows, WaitN returns ErrTooManyWaiters. Waits are timed by the limiter's
// clock (WithClock).
func (l *Limiter) WaitN(ctx context.Context, n int) error {
	_, err := l.observed(ctx, n, l.wait)
	return err
}

// wait implements WaitN.
func (l *Limiter) wait(ctx context.Context, n int) (verdict, time.Duration, error) {
	began := clock.Mono()
	if err := l.check(ctx, n); err != nil {
		return verdict{by: ByCheck}, 0, err
	}
	if l.coordinator == nil {
		return l.waitLocal(ctx, n, began)
	}
	q := &call{n: int64(n), waits: true}
	v, err := l.coordinator.do(ctx, q)
	if err != nil || !q.stood {
		return v, 0, err
	}
	return v, clock.Mono() - began, err
}

// waitLocal implements wait without Redis.
func (l *Limiter) waitLocal(ctx context.Context, n int, began time.Duration) (verdict, time.Duration, error) {
	if l.waiters.waiting.Load() == 0 {
		if v, err := l.allowLocal(int64(n)); err != nil || v.ok {
			return v, 0, err
		}
	}
	defer l.waiters.waiting.Add(-1)
	if l.waiters.waiting.Add(1) > l.waiters.most {
		return verdict{by: ByCheck}, 0, fmt.Errorf("%w: limiter %.80q: %d are waiting", ErrTooManyWaiters, l.name, l.waiters.most)
	}
	l.mu.Lock()
	l.waiters.open()
	l.mu.Unlock()
	select {
	case l.waiters.turn <- struct{}{}:
	case <-ctx.Done():
		return verdict{}, 0, ctx.Err()
	}
	defer func() { <-l.waiters.turn }()
	for {
		v, _, err := l.decide(ctx, n)
		if err != nil || v.ok {
			return v, clock.Mono() - began, err
		}
		timer := l.waiters.timers.NewTimer(max(time.Microsecond, l.RetryAfter(n)))
		select {
		case <-timer.Chan():
		case <-l.waiters.released:
		case <-ctx.Done():
			timer.Stop()
			return verdict{}, 0, ctx.Err()
		}
		timer.Stop()
	}
}
