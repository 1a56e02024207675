package slidingwindow

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// everywhere runs a test with counts in the process and in a real Redis.
func everywhere(t *testing.T, test func(t *testing.T, opts ...Option)) {
	t.Run("process", func(t *testing.T) { test(t) })
	t.Run("redis", func(t *testing.T) { test(t, WithRedis(redistest.Shared(t).Client(t)), patient) })
}

func TestTake(t *testing.T) {
	everywhere(t, func(t *testing.T, opts ...Option) {
		l, err := New(unique(t), 5, time.Hour, time.Minute, opts...)
		require.NoError(t, err)
		r, err := l.Take(ctx, 2)
		require.NoError(t, err)
		require.True(t, r.Allowed)
		require.Equal(t, []any{5, 3, time.Duration(0)}, []any{r.Limit, r.Remaining, r.RetryAfter})
		r, err = l.Take(ctx, 4)
		require.NoError(t, err)
		require.False(t, r.Allowed)
		require.Equal(t, []any{5, 3}, []any{r.Limit, r.Remaining})
		require.Greater(t, r.RetryAfter, 58*time.Minute)
		require.LessOrEqual(t, r.RetryAfter, 61*time.Minute)
		r, err = l.Take(ctx, 3)
		require.NoError(t, err)
		require.True(t, r.Allowed)
		require.Zero(t, r.Remaining)
		_, err = l.Take(ctx, 6)
		require.ErrorIs(t, err, ErrInvalidPermits)
	})
}

func TestRefund(t *testing.T) {
	everywhere(t, func(t *testing.T, opts ...Option) {
		l, err := New(unique(t), 5, time.Hour, time.Minute, opts...)
		require.NoError(t, err)
		other, err := New(l.Name(), 5, time.Hour, time.Minute, opts...)
		require.NoError(t, err)
		all, err := l.Take(ctx, 5)
		require.NoError(t, err)
		refused, err := l.Take(ctx, 1)
		require.NoError(t, err)
		require.False(t, refused.Allowed)
		require.NoError(t, l.Refund(ctx, all, 2))
		for _, n := range []int{-1, 0, 4} {
			require.ErrorIs(t, l.Refund(ctx, all, n), ErrInvalidPermits)
		}
		require.ErrorIs(t, l.Refund(ctx, refused, 1), ErrInvalidPermits)
		require.ErrorIs(t, l.Refund(ctx, Result{Allowed: true}, 1), ErrInvalidPermits)
		require.ErrorIs(t, other.Refund(ctx, all, 1), ErrInvalidPermits)
		left, err := l.Remaining(ctx)
		require.NoError(t, err)
		require.Equal(t, 2, left)
		if l.machine.key != "" {
			left, err = other.Remaining(ctx)
			require.NoError(t, err)
			require.Equal(t, 2, left)
		}
		var given atomic.Int64 // concurrent refunds return at most the permits taken
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if l.Refund(ctx, all, 1) == nil {
					given.Add(1)
				}
			})
		}
		wg.Wait()
		require.EqualValues(t, 3, given.Load())
		ok, err := l.AllowN(ctx, 5)
		require.NoError(t, err)
		require.True(t, ok)
	})
}

// taken is a Take in the log, which may be refunded.
type taken struct {
	by     *Limiter
	result Result
	at     int64
	n      int
}

// Take, Refund and SetLimit of several processes, on a clock that goes on, stands still and is set back, against the log of every permit that
// was not refunded: no window exceeds the limit. In one process whose clock is not set back, a request that is refused would have exceeded it
// a resolution ago.
func TestRefundLog(t *testing.T) {
	bubble(t, "redis", func(t *testing.T) { refundLog(t, true) })
	bubble(t, "process", func(t *testing.T) { refundLog(t, false) })
}

func refundLog(t *testing.T, shared bool) {
	client := new(bubbleRedis)
	var admitted, refused, refunds, effective int
	rapid.Check(noDeadline{t}, func(rt *rapid.T) {
		window, resolution := drawRule(rt)
		limit := rapid.IntRange(1, 30).Draw(rt, "limit")
		var clock atomic.Int64
		clock.Store(begin + rapid.Int64Range(0, 1e9).Draw(rt, "begin"))
		var all []*Limiter
		if shared {
			n := rapid.SampledFrom([]int{1, 1, 2, 3}).Draw(rt, "processes")
			all = processes(rt, client, unique(t), n, limit, window, resolution, &clock, 0, 0)
		} else {
			l, err := New("x", limit, window, resolution, WithClock(clockOf{now: clock.Load}))
			require.NoError(rt, err)
			all = append(all, l)
		}
		g := &log{window: window.Microseconds(), resolution: resolution.Microseconds()}
		var history []taken
		time := func() int64 { // of the log
			seen := all[0].machine.admitted.counts.seen
			if shared {
				s, ok := parse(client.get(all[0].machine.key))
				if !ok {
					return clock.Load()
				}
				seen = s.seen
			}
			if by := seen - g.seen; g.seen != 0 && by < 0 { // set back
				for i := range history {
					history[i].at += by
				}
				g.shift(seen)
			}
			return g.observe(seen)
		}
		back := rapid.Bool().Draw(rt, "back")
		for range 60 {
			if step := drawStep(rt, clock.Load(), g.window, g.resolution); back || step > clock.Load() {
				clock.Store(step)
			}
			l := all[rapid.IntRange(0, len(all)-1).Draw(rt, "process")]
			switch op := rapid.IntRange(0, 9).Draw(rt, "op"); {
			case op == 0:
				limit = rapid.IntRange(1, 30).Draw(rt, "new limit")
				require.NoError(rt, l.SetLimit(ctx, limit))
				synctest.Wait()
				require.Equal(rt, limit, l.Limit())
				time()
			case op <= 3 && len(history) > 0:
				i := rapid.IntRange(0, len(history)-1).Draw(rt, "which")
				h := &history[i]
				n := rapid.IntRange(1, h.n).Draw(rt, "refund")
				before := g.within(h.at, h.at)
				require.NoError(rt, h.by.Refund(ctx, h.result, n))
				synctest.Wait()
				time()
				for range n {
					if at := slices.Index(g.at, h.at); at >= 0 {
						g.at = slices.Delete(g.at, at, at+1)
					}
				}
				if g.within(h.at, h.at) < before {
					effective++
				}
				refunds++
				if h.n -= n; h.n == 0 {
					history = slices.Delete(history, i, i+1)
				}
			default:
				n := rapid.SampledFrom([]int{1, 1, 2, 5}).Draw(rt, "n")
				known := l.Limit()
				r, err := l.Take(ctx, n)
				synctest.Wait()
				now := time()
				if n > limit && err != nil {
					require.ErrorIs(rt, err, ErrInvalidPermits)
					continue
				}
				if n > known && err != nil {
					continue // raised by another process
				}
				require.NoError(rt, err)
				if !r.Allowed {
					refused++
					if len(all) == 1 && !back {
						require.Greater(rt, g.within(now-g.window-g.resolution, now)+int64(n), int64(limit), "refused without need")
					}
					continue
				}
				admitted++
				g.add(now, int64(n))
				history = append(history, taken{l, r, now, n})
				require.LessOrEqual(rt, g.within(now-g.window, now), int64(limit))
			}
		}
	})
	t.Logf("%d admitted, %d refused, %d refunds, %d of them of what was in the log", admitted, refused, refunds, effective)
	require.Greater(t, admitted, 1000)
	require.Greater(t, refused, 300)
	require.Greater(t, effective, 300)
}

// During an outage a refund is kept; in a local share it counts at once. Permits that are refunded before they were reported are never
// reported.
func TestRefundAway(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := new(bubbleRedis)
		l, err := New("x", 10, time.Hour, time.Minute, WithRedis(client), WithFailurePolicy(LocalShare(4)))
		require.NoError(t, err)
		before, err := l.Take(ctx, 3)
		require.NoError(t, err)
		client.by(failing(refused))
		alone, err := l.Take(ctx, 1)
		require.NoError(t, err)
		require.True(t, alone.Allowed)
		full, err := l.Take(ctx, 1)
		require.NoError(t, err)
		require.False(t, full.Allowed)
		require.NoError(t, l.Refund(ctx, before, 2))
		require.NoError(t, l.Refund(ctx, alone, 1))
		left, err := l.Remaining(ctx)
		require.NoError(t, err)
		require.Equal(t, 3, left)
		client.by(nil)
		time.Sleep(2 * maxPause)
		for range 2 {
			_, _ = l.Remaining(ctx)
			synctest.Wait()
		}
		left, err = l.refreshed(t)
		require.NoError(t, err)
		require.Equal(t, 9, left)
	})
}

// A refund whose round trip fails may be lost: it is not sent again, because it might be executed twice.
func TestRefundIsNotRepeated(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := new(bubbleRedis)
		l, err := New("x", 10, time.Hour, time.Minute, WithRedis(client))
		require.NoError(t, err)
		other, err := New("x", 10, time.Hour, time.Minute, WithRedis(client))
		require.NoError(t, err)
		mine, err := l.Take(ctx, 3)
		require.NoError(t, err)
		_, err = other.Take(ctx, 3)
		require.NoError(t, err)
		client.by(lost(time.Millisecond, refused))
		require.ErrorIs(t, l.Refund(ctx, mine, 3), ErrStoreUnavailable)
		client.by(nil)
		time.Sleep(2 * maxPause)
		for range 3 {
			_, _ = l.Remaining(ctx)
			synctest.Wait()
		}
		left, err := other.refreshed(t)
		require.NoError(t, err)
		require.Equal(t, 7, left)
	})
}

// After Redis has lost the state, permits are reported again without those that were refunded.
func TestRefundLostState(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := new(bubbleRedis)
		l, err := New("x", 10, time.Hour, time.Minute, WithRedis(client))
		require.NoError(t, err)
		r, err := l.Take(ctx, 6)
		require.NoError(t, err)
		client.forget()
		require.NoError(t, l.Refund(ctx, r, 2))
		synctest.Wait()
		left, err := l.refreshed(t)
		require.NoError(t, err)
		require.Equal(t, 6, left)
	})
}

// A refund finds its sub-interval even if the clock was set back meanwhile. It does not remove permits that were admitted since at the same
// reading of the clock.
func TestRefundAfterClockBack(t *testing.T) {
	for name, shared := range map[string]bool{"process": false, "redis": true} {
		t.Run(name, func(t *testing.T) {
			var clock atomic.Int64
			clock.Store(begin)
			var l *Limiter
			if shared {
				l = processes(t, redistest.Shared(t).Client(t), unique(t), 1, 10, time.Minute, time.Second, &clock, 0, 0)[0]
			} else {
				var err error
				l, err = New("x", 10, time.Minute, time.Second, WithClock(clockOf{now: clock.Load}))
				require.NoError(t, err)
			}
			take := func(n int) Result {
				r, err := l.Take(ctx, n)
				require.NoError(t, err)
				require.True(t, r.Allowed)
				return r
			}
			left := func(want int) {
				t.Helper()
				got, err := l.Remaining(ctx)
				require.NoError(t, err)
				require.Equal(t, want, got)
			}
			first := take(4)
			clock.Add(-5_000_000)
			take(1)
			clock.Add(5_000_000)
			take(3)
			require.NoError(t, l.Refund(ctx, first, 4))
			left(6)
			clock.Add(55_000_001)
			left(7)
			clock.Add(5_000_000)
			left(10)
		})
	}
}

// granted has the times at which a Take began and ended.
type granted struct {
	asked, answered time.Time
	n               int
	refunded        bool
}

// Many callers of several processes take and refund concurrently, over a slow way that loses replies. Permits that were not refunded never
// exceed the limit in a window, and refunded permits are used by others.
func TestRefundUnderLoad(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const limit, window, resolution, length = 20, time.Second, 100 * time.Millisecond, 20 * time.Second
		client := &bubbleRedis{way: func(_ context.Context, run func() error) error {
			time.Sleep(rand.N(5 * time.Millisecond))
			err := run()
			time.Sleep(rand.N(5 * time.Millisecond))
			if rand.IntN(50) == 0 {
				return refused
			}
			return err
		}}
		var mu sync.Mutex
		var all []*granted
		var wg sync.WaitGroup
		end := time.Now().Add(length)
		for range 3 {
			l, err := New("x", limit, window, resolution, WithRedis(client), WithStoreTimeout(time.Second))
			require.NoError(t, err)
			for range 6 {
				wg.Go(func() {
					for time.Now().Before(end) {
						g := &granted{asked: time.Now(), n: 1 + rand.IntN(3)}
						r, err := l.Take(ctx, g.n)
						if g.answered = time.Now(); err == nil && r.Allowed {
							mu.Lock()
							all = append(all, g)
							mu.Unlock()
							time.Sleep(rand.N(300 * time.Millisecond))
							if rand.IntN(2) == 0 {
								g.refunded = true
								_ = l.Refund(ctx, r, g.n)
							}
						}
						time.Sleep(rand.N(20 * time.Millisecond))
					}
				})
			}
		}
		wg.Wait()
		synctest.Wait()
		used, refunded := 0, 0
		for _, first := range all {
			if first.refunded {
				refunded += first.n
				continue
			}
			used += first.n
			in := 0
			for _, g := range all {
				if !g.refunded && !g.asked.Before(first.asked) && g.answered.Sub(first.asked) <= window {
					in += g.n
				}
			}
			require.LessOrEqual(t, in, limit)
		}
		t.Logf("%d used, %d given back, of %d without refunds", used, refunded, limit*int(length/window))
		require.Greater(t, refunded, limit*int(length/window)/4)
		require.Greater(t, used+refunded, limit*int(length/window)*5/4, "refunded permits are used by others")
	})
}

// A refund of permits that are out of the window removes none that were admitted later, even if the clock was set back since, which moves both
// into one sub-interval.
func TestRefundAfterTheClockWasSetBack(t *testing.T) {
	var clock atomic.Int64
	now := begin - 2_000_000
	l, err := New("x", 3, 1500*time.Microsecond, 1500*time.Microsecond, WithClock(clockOf{now: func() int64 { return clock.Load() }}))
	require.NoError(t, err)
	take := func(step int64) Result {
		now += step
		clock.Store(now)
		r, err := l.Take(ctx, 1)
		require.NoError(t, err)
		return r
	}
	first := take(1000)
	for _, step := range []int64{2, 499, 1499} {
		require.True(t, take(step).Allowed)
	}
	require.True(t, take(-1).Allowed, "three in the window, with the last two")
	now -= standstill
	clock.Store(now)
	require.NoError(t, l.Refund(ctx, first, 1))
	require.False(t, take(0).Allowed, "the fourth")
}
