package slidingwindow

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// line is those who wait for permits. Whoever has the turn asks for them; the others stand behind, first come, first served.
type line struct {
	turn     chan struct{} // of one; the runtime serves senders in their order; nil: nobody has waited yet, as with most limiters
	released chan struct{} // of one: something has changed in favour of who waits; nil with turn
	waiting  atomic.Int64
	most     int64
	timers   clockwork.Clock
}

func (l *line) setUp(o *options) {
	l.most, l.timers = int64(o.waiters), o.clock
	if l.timers == nil {
		l.timers = clockwork.NewRealClock()
	}
}

// open is for who waits first. mu is held.
func (l *line) open() {
	if l.turn == nil {
		l.turn, l.released = make(chan struct{}, 1), make(chan struct{}, 1)
	}
}

// wake has the first look again. mu is held.
func (l *line) wake() {
	select {
	case l.released <- struct{}{}:
	default:
	}
}

// minLook is the least time between two looks of a waiter whose counts are in Redis: others may take what was free.
const minLook = time.Millisecond

// Wait is WaitN of one permit.
func (l *Limiter) Wait(ctx context.Context) error { return l.WaitN(ctx, 1) }

// WaitN returns when n permits were admitted, all of them at once, or an error: that of ctx, when it ends first, or one that AllowN
// returns. While Redis is away it is what [WithAway] or [WithShare] says; it does not wait for Redis.
//
// Those of a process who wait are served first come, first served: who wants many permits is not overtaken, and holds up those behind.
// AllowN and Take do not stand in the line, and may take what was freed. Among processes there is no order. A waiter asks again
// when the permits may be free (RetryAfter), with Redis at least once in a sub-interval, since others may have refunded, and while Redis is
// away to see whether it is back. At most as many wait as WithMaxWaiters says, else it is ErrTooManyWaiters. It waits by the limiter's clock (WithClock).
func (l *Limiter) WaitN(ctx context.Context, n int) error {
	_, err := l.observed(ctx, n, l.wait)
	return err
}

func (l *Limiter) wait(ctx context.Context, n int) (verdict, time.Duration, error) {
	if l.line.waiting.Load() == 0 {
		if v, _, err := l.decide(ctx, n); err != nil || v.ok {
			return v, 0, err
		}
	}
	began := clock.Mono()
	defer l.line.waiting.Add(-1)
	if l.line.waiting.Add(1) > l.line.most {
		return verdict{by: ByCheck}, 0, fmt.Errorf("%w: limiter %.80q: %d wait already", ErrTooManyWaiters, l.name, l.line.most)
	}
	l.mu.Lock()
	l.line.open()
	l.mu.Unlock()
	select {
	case l.line.turn <- struct{}{}:
	case <-ctx.Done():
		return verdict{}, 0, ctx.Err()
	}
	defer func() { <-l.line.turn }()
	for {
		v, _, err := l.decide(ctx, n)
		if err != nil || v.ok {
			return v, clock.Mono() - began, err
		}
		timer := l.line.timers.NewTimer(l.untilLook(n))
		select {
		case <-timer.Chan():
		case <-l.line.released:
		case <-ctx.Done():
			timer.Stop()
			return verdict{}, 0, ctx.Err()
		}
		timer.Stop()
		if l.coordinator != nil { // what others have done shows once in a sub-interval
			_ = l.coordinator.refresh(ctx)
		}
	}
}

// untilLook is how long the first who waits does nothing.
func (l *Limiter) untilLook(n int) time.Duration {
	d := l.RetryAfter(n)
	if l.coordinator != nil {
		return max(minLook, min(d, l.Resolution(), l.coordinator.untilProbe()))
	}
	return max(time.Microsecond, d)
}
