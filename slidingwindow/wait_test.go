package slidingwindow

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
)

// waitEverywhere runs a test in a bubble, with counts in the process and in Redis.
func waitEverywhere(t *testing.T, test func(t *testing.T, opts ...Option)) {
	bubble(t, "process", func(t *testing.T) { test(t) })
	bubble(t, "redis", func(t *testing.T) { test(t, WithRedis(&bubbleRedis{way: slow(100 * time.Microsecond)})) })
}

// Waiters are served first come, first served, each as soon as the window has room, and never more than the limit.
func TestWait(t *testing.T) {
	waitEverywhere(t, func(t *testing.T, opts ...Option) {
		const limit, many = 3, 10
		l, err := New("x", limit, time.Second, 100*time.Millisecond, opts...)
		require.NoError(t, err)
		began := time.Now()
		at := make([]time.Duration, many) // waiters of one instant wake in any order
		var wg sync.WaitGroup
		for i := range many {
			wg.Go(func() {
				if err := l.Wait(ctx); err != nil {
					panic(err)
				}
				at[i] = time.Since(began)
			})
			synctest.Wait()
			time.Sleep(time.Millisecond)
		}
		wg.Wait()
		require.True(t, slices.IsSorted(at), "%v", at)
		for i := limit; i < many; i++ {
			require.GreaterOrEqual(t, at[i]-at[i-limit], time.Second-2*time.Millisecond)
			require.Less(t, at[i], time.Duration(i/limit)*1100*time.Millisecond+200*time.Millisecond)
		}
	})
}

// A wait ends with its context and takes nothing; the waiters behind it are served.
func TestWaitGivesUp(t *testing.T) {
	waitEverywhere(t, func(t *testing.T, opts ...Option) {
		l, err := New("x", 2, time.Hour, time.Minute, append(opts, WithMaxWaiters(2))...)
		require.NoError(t, err)
		require.NoError(t, l.WaitN(ctx, 2))
		require.ErrorIs(t, l.WaitN(ctx, 3), ErrInvalidPermits)
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		got := make(chan error, 2)
		go func() { got <- l.Wait(short) }()
		synctest.Wait()
		go func() { got <- l.Wait(ctx) }()
		synctest.Wait()
		time.Sleep(time.Millisecond)
		require.ErrorIs(t, l.Wait(ctx), ErrTooManyWaiters)
		require.ErrorIs(t, <-got, context.DeadlineExceeded)
		require.NoError(t, <-got)
		left, err := l.Remaining(ctx)
		require.NoError(t, err)
		require.Equal(t, 1, left)
		over, end := context.WithCancel(ctx)
		end()
		require.ErrorIs(t, l.Wait(over), context.Canceled)
	})
}

// A refund, and a higher limit, are noticed at once in the same process, and in another one in the next sub-interval.
func TestWaitIsWoken(t *testing.T) {
	for name, change := range map[string]func(l *Limiter, r Result) error{
		"refund": func(l *Limiter, r Result) error { return l.Refund(ctx, r, 1) },
		"limit":  func(l *Limiter, _ Result) error { return l.SetLimit(ctx, 3) },
	} {
		bubble(t, name, func(t *testing.T) {
			for _, shared := range []bool{false, true} {
				var opts []Option
				if shared {
					opts = append(opts, WithRedis(&bubbleRedis{way: slow(time.Millisecond)}))
				}
				l, err := New("x", 2, time.Hour, time.Minute, opts...)
				require.NoError(t, err)
				r, err := l.Take(ctx, 2)
				require.NoError(t, err)
				waiting := []*Limiter{l}
				if shared {
					other, err := New("x", 2, time.Hour, time.Minute, opts...)
					require.NoError(t, err)
					waiting = append(waiting, other)
				}
				for i, w := range waiting {
					var woken atomic.Bool
					go func() {
						if w.Wait(ctx) == nil {
							woken.Store(true)
						}
					}()
					synctest.Wait()
					time.Sleep(time.Second)
					require.False(t, woken.Load())
					if i == 0 {
						require.NoError(t, change(l, r))
						time.Sleep(10 * time.Millisecond)
					} else {
						if name == "refund" {
							require.NoError(t, change(l, r))
						} else {
							require.NoError(t, l.SetLimit(ctx, 4))
						}
						time.Sleep(time.Minute + time.Second)
					}
					require.True(t, woken.Load(), "process %d, shared %v", i, shared)
				}
			}
		})
	}
}

// Waits are timed by the limiter's clock.
func TestWaitByClock(t *testing.T) {
	clock := clockwork.NewFakeClock()
	l, err := New("x", 1, time.Minute, time.Second, WithClock(clock))
	require.NoError(t, err)
	require.NoError(t, l.Wait(ctx))
	got := make(chan error, 1)
	go func() { got <- l.Wait(ctx) }()
	require.NoError(t, clock.BlockUntilContext(ctx, 1))
	clock.Advance(time.Minute)
	select {
	case <-got:
		t.Fatal("the permit counts for a microsecond more")
	default:
	}
	require.NoError(t, clock.BlockUntilContext(ctx, 1))
	clock.Advance(time.Microsecond)
	require.NoError(t, <-got)
}

// During an outage the policy decides a wait, which does not wait for Redis.
func TestWaitAway(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		for policy, want := range map[FailurePolicy]error{FailClosed: ErrStoreUnavailable, FailOpen: nil} {
			l, err := New("x", 1, time.Minute, time.Second, WithRedis(&bubbleRedis{way: failing(refused)}), WithFailurePolicy(policy))
			require.NoError(t, err)
			for range 3 {
				err = l.Wait(ctx)
				require.True(t, errors.Is(err, want), "%v", err)
			}
		}
	})
}

// A waiter for a local share is admitted soon after the end of the outage if there is room, even without other calls.
func TestWaitOutlivesOutage(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := new(bubbleRedis)
		l, err := New("x", 10, 24*time.Hour, time.Hour, WithRedis(client), WithFailurePolicy(LocalShare(1)))
		require.NoError(t, err)
		client.by(failing(refused))
		require.Equal(t, 1, passes(t, l))
		waits := make(chan error, 1)
		go func() { waits <- l.Wait(ctx) }()
		time.Sleep(5 * time.Minute)
		require.Empty(t, waits)
		client.by(nil)
		began := time.Now()
		require.NoError(t, <-waits)
		require.LessOrEqual(t, time.Since(began), 2*maxPause)
		synctest.Wait()
	})
}
