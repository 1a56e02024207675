package slidingwindow

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

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
func (l *Limiter) wait(ctx context.Context, n int) (v verdict, waited time.Duration, err error) {
	began := clock.Mono()
	if err := l.check(ctx, n); err != nil {
		return verdict{by: ByCheck}, 0, err
	}
	if l.machine.key == "" {
		if v, err = l.allowHere(int64(n), true); err != nil || v.ok {
			return v, 0, err
		}
	}
	c := &call{n: int64(n), waits: true}
	if v, err = l.do(ctx, c); err == nil && c.stood {
		waited = clock.Mono() - began
	}
	return v, waited, err
}
