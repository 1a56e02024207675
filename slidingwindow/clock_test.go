package slidingwindow

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// With Redis the limiter's clock only measures how much time has passed. So it may be set back, and no request is refused for that.
func TestClockSetBack(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var back atomic.Int64
		clock := clockOf{now: func() int64 { return time.Now().UnixMicro() - back.Load() }}
		client := &bubbleRedis{way: slow(time.Millisecond)}
		l, err := New("x", 3, time.Second, 100*time.Millisecond, WithRedis(client), WithClock(clock))
		require.NoError(t, err)
		for _, step := range []time.Duration{time.Millisecond, 1500 * time.Millisecond, 5 * time.Second, time.Hour} {
			for range 3 {
				ok, err := l.Allow(ctx)
				require.NoError(t, err)
				require.True(t, ok)
			}
			ok, err := l.Allow(ctx)
			require.NoError(t, err)
			require.False(t, ok)
			back.Add(step.Microseconds())
			ok, err = l.Allow(ctx)
			require.NoError(t, err)
			require.False(t, ok, "the window is as full as before")
			time.Sleep(1100 * time.Millisecond)
			ok, err = l.Allow(ctx)
			require.NoError(t, err)
			require.True(t, ok, "set back by %v", step)
			time.Sleep(1100 * time.Millisecond)
		}
		goOn := client.hang() // set back while a round trip is in flight
		got := make(chan bool)
		go func() {
			ok, _ := l.Allow(ctx)
			got <- ok
		}()
		synctest.Wait()
		back.Add(5_000_000)
		goOn()
		require.True(t, <-got)
		for range 2 {
			ok, err := l.Allow(ctx)
			require.NoError(t, err)
			require.True(t, ok)
		}
		time.Sleep(1100 * time.Millisecond)
		ok, err := l.Allow(ctx)
		require.NoError(t, err)
		require.True(t, ok)
	})
}

// However much the round trips differ, each call that is allowed runs at most one script, and the others one in each sub-interval.
func TestScripts(t *testing.T) {
	const limit, window, resolution, length = 50, time.Second, 50 * time.Millisecond, 10 * time.Second
	for _, callers := range []int{1, 8} {
		bubble(t, fmt.Sprint(callers), func(t *testing.T) {
			client := &bubbleRedis{way: func(_ context.Context, run func() error) error {
				time.Sleep(50*time.Microsecond + rand.N(250*time.Microsecond))
				err := run()
				time.Sleep(50*time.Microsecond + rand.N(250*time.Microsecond))
				return err
			}}
			l, err := New("x", limit, window, resolution, WithRedis(client))
			require.NoError(t, err)
			var allowed atomic.Int64
			end := time.Now().Add(length)
			var wg sync.WaitGroup
			for range callers {
				wg.Go(func() {
					for time.Now().Before(end) {
						ok, err := l.Allow(ctx)
						if err != nil {
							panic(err)
						}
						if ok {
							allowed.Add(1)
						}
						time.Sleep(200 * time.Microsecond)
					}
				})
			}
			wg.Wait()
			synctest.Wait()
			t.Logf("%d callers: %d allowed, %d scripts", callers, allowed.Load(), client.executed())
			const looks = int64(length/resolution) + 1
			require.LessOrEqual(t, client.executed(), allowed.Load()+looks)
		})
	}
}

// With the processes' own clocks, a script that runs late is not a clock that was set back: the window keeps its limit. Two limiters share a
// clock; a round trip of one is in flight while the other goes on.
func TestLocalTimeLate(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var clock atomic.Int64
		clock.Store(begin)
		client := new(bubbleRedis)
		h := &holding{RedisClient: client, open: make(chan struct{})}
		const limit = 20
		local := func(c RedisClient) *Limiter {
			l, err := New("x", limit, time.Minute, time.Second, WithRedis(c), WithStoreTimeout(time.Minute), WithClock(clockOf{now: clock.Load}), WithLocalTime())
			require.NoError(t, err)
			return l
		}
		a, b := local(h), local(client)
		g := &log{window: time.Minute.Microseconds(), resolution: time.Second.Microseconds()}
		pass := func(l *Limiter, n int) (passed int) {
			for range n {
				ok, err := l.Allow(ctx)
				require.NoError(t, err)
				if ok {
					g.add(clock.Load(), 1)
					passed++
				}
			}
			require.LessOrEqual(t, g.within(clock.Load()-g.window, clock.Load()), int64(limit))
			return passed
		}
		require.Equal(t, limit/2, pass(a, limit/2))
		clock.Add(30_000_000)
		require.Equal(t, limit/2, pass(b, limit/2))
		require.Zero(t, pass(b, 1))
		_, err := a.Remaining(ctx)
		require.NoError(t, err)
		clock.Add(1_000_000)
		h.hold.Store(true)
		looked := make(chan bool)
		go func() {
			ok, err := a.Allow(ctx)
			if err != nil {
				t.Error(err)
			}
			looked <- ok
		}()
		synctest.Wait()
		clock.Add(29_000_001)
		require.Equal(t, limit/2, pass(b, limit)) // the first half is out
		clock.Add(1_000_000)
		h.hold.Store(false)
		close(h.open)
		if <-looked {
			g.add(clock.Load(), 1)
		}
		for range 60 {
			clock.Add(1_000_000)
			pass(b, limit)
			pass(a, limit)
		}
	})
}

// A process whose clock is behind another's gets an ErrClock: a decision by that clock would exceed the limit.
func TestLocalTimeBehind(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	name := unique(t)
	var behind atomic.Int64
	local := func(now func() int64) *Limiter {
		l, err := New(name, 3, time.Minute, time.Second, WithRedis(client), patient, WithFailurePolicy(FailOpen), WithClock(clockOf{now: now}), WithLocalTime())
		require.NoError(t, err)
		return l
	}
	a, b := local(func() int64 { return begin }), local(func() int64 { return begin - behind.Load() })
	ok, err := a.Allow(ctx)
	require.NoError(t, err)
	require.True(t, ok)
	behind.Store(standstill)
	ok, err = b.Allow(ctx)
	require.NoError(t, err)
	require.True(t, ok, "time stands still")
	behind.Store(standstill + 1)
	b = local(func() int64 { return begin - behind.Load() })
	for range 2 {
		_, err = b.Allow(ctx)
		require.ErrorIs(t, err, ErrClock)
		require.ErrorContains(t, err, "2.000001s")
	}
	left, err := a.refreshed(t)
	require.NoError(t, err)
	require.Equal(t, 1, left)
	behind.Store(0)
	ok, err = b.Allow(ctx)
	require.NoError(t, err)
	require.True(t, ok)
}
