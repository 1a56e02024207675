package tokenbucket_test

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

var quietly = tb.WithLogger(slog.New(slog.DiscardHandler))

// A waiter that the stored permits of a member suffice for is not refused because that member earns slowly.
func TestGroupStoredPermitsTakeNoTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &participantStore{tb.NewMemoryStore(), 0}
		second := limiter(t, "second", 1, tb.WithStore(s), tb.WithMaxPermits(1))
		day := limiter(t, "day", 1.0/3600, tb.WithStore(s), tb.WithMaxPermits(2000), tb.WithInitialPermits(2000))
		g, err := tb.All(second, day)
		require.NoError(t, err)
		for range 8 { // beyond the look-ahead, so they wait
			go g.Acquire(ctx, 1)
		}
		synctest.Wait()
		ok, err := g.TryAcquire(ctx, 1, 20*time.Second)
		require.NoError(t, err)
		require.True(t, ok, "it is due in 8 s")
	})
}

// A penalty of a member on another store holds grants back, too.
func TestGroupPenaltyOnAnotherStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one, two := tb.NewMemoryStore(), tb.NewMemoryStore()
		a := limiter(t, "a", 1.0/2, tb.WithStore(&participantStore{one, 1}), tb.WithMaxPermits(0))
		b := limiter(t, "b", 2, tb.WithStore(&participantStore{two, 1}), tb.WithMaxPermits(0))
		g, err := tb.All(a, b)
		require.NoError(t, err)
		r, err := g.Reserve(ctx, 3)
		require.NoError(t, err)
		began := time.Now()
		require.Equal(t, 6*time.Second, r.Delay())
		require.NoError(t, limiter(t, "b", 2, tb.WithStore(&participantStore{two, 2}), tb.WithMaxPermits(0)).Penalize(ctx, 20*time.Second))
		<-r.Ready()
		require.GreaterOrEqual(t, time.Since(began), 20*time.Second)
	})
}

// Permits that were due more than 100 ms before the reply arrived lapse, as those of a limiter do.
func TestGroupLateReplyIsNotUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &gatedStore{MemoryStore: tb.NewMemoryStore()}
		opts := []tb.Option{tb.WithStore(s), tb.WithStoreTimeout(time.Second), tb.WithMaxPermits(0)}
		g, err := tb.All(limiter(t, "a", 20, opts...), limiter(t, "b", 20, opts...))
		require.NoError(t, err)
		_, err = g.Acquire(ctx, 1)
		require.NoError(t, err)
		began := time.Now()
		s.late.Store(int64(900 * time.Millisecond))
		time.AfterFunc(500*time.Millisecond, func() { s.late.Store(0) })
		_, err = g.Acquire(ctx, 1) // due at 50 ms, and the reply comes at 900 ms
		require.NoError(t, err)
		require.Greater(t, time.Since(began), 900*time.Millisecond, "it has permits that were due 850 ms ago")
	})
}

// A timeout counts against the member whose store hangs: its policy applies, and the others still count.
func TestGroupTimeoutOfOneStore(t *testing.T) {
	for _, policy := range []tb.FailurePolicy{tb.FailClosed, tb.FailOpen} {
		synctest.Test(t, func(t *testing.T) {
			s := &gatedStore{MemoryStore: tb.NewMemoryStore()}
			here := limiter(t, "fares", 0.001, tb.WithMaxPermits(5), tb.WithInitialPermits(5), quietly, tb.WithFailurePolicy(policy))
			fleet := limiter(t, "fares", 2, tb.WithStore(s), tb.WithStoreTimeout(time.Second), tb.WithFailurePolicy(tb.FailOpen), tb.WithMaxPermits(9),
				tb.WithInitialPermits(9), quietly)
			g, err := tb.All(here, fleet)
			require.NoError(t, err)
			s.late.Store(int64(3 * time.Second))
			ok, err := g.TryAcquire(ctx, 1, 0)
			s.late.Store(0)
			time.Sleep(time.Minute) // the probes end
			require.NoError(t, err, "fleet is FailOpen")
			require.True(t, ok)
			left, _ := stored(t, here)
			require.InDelta(t, 4, left, 0.1, "here counts")
		})
	}
}

// Several members under FailOpen whose stores fail at the same time do not count.
func TestGroupTwoStoresFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failure := tb.ErrStoreUnavailable
		one, two := &gatedStore{MemoryStore: tb.NewMemoryStore()}, &gatedStore{MemoryStore: tb.NewMemoryStore()}
		one.fail.Store(&failure)
		two.fail.Store(&failure)
		open := tb.WithFailurePolicy(tb.FailOpen)
		g, err := tb.All(limiter(t, "a", 1, tb.WithStore(one), open, quietly), limiter(t, "b", 1, tb.WithStore(two), open, quietly))
		require.NoError(t, err)
		ok, err := g.TryAcquire(ctx, 1, 0)
		one.fail.Store(nil)
		two.fail.Store(nil)
		time.Sleep(time.Minute) // the probes end
		require.NoError(t, err)
		require.True(t, ok)
	})
}

// A settlement whose first store fails is still charged to the members of the others.
func TestGroupSettlesTheOtherStores(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &gatedStore{MemoryStore: tb.NewMemoryStore()}
		slow := limiter(t, "slow", 0.001, tb.WithStore(s), tb.WithMaxPermits(50), tb.WithInitialPermits(50), quietly)
		fast := limiter(t, "fast", 0.01, tb.WithStore(&participantStore{tb.NewMemoryStore(), 0}), tb.WithMaxPermits(50), tb.WithInitialPermits(50), quietly)
		g, err := tb.All(slow, fast)
		require.NoError(t, err)
		r, err := g.Reserve(ctx, 1)
		require.NoError(t, err)
		failure := tb.ErrStoreUnavailable
		s.fail.Store(&failure)
		require.ErrorIs(t, r.Settle(ctx, 21), tb.ErrStoreUnavailable)
		s.fail.Store(nil)
		left, _ := stored(t, fast)
		time.Sleep(time.Minute) // the probes end
		require.InDelta(t, 29, left, 0.1)
	})
}

// Members may be read while another caller gives permits back.
func TestGroupMembersRace(t *testing.T) {
	s := tb.NewMemoryStore()
	g, err := tb.All(limiter(t, "a", 1, tb.WithStore(s)), limiter(t, "b", 1, tb.WithStore(s)))
	require.NoError(t, err)
	for range 50 {
		first, err := g.Reserve(ctx, 1)
		require.NoError(t, err)
		second, err := g.Reserve(ctx, 1)
		require.NoError(t, err)
		done := make(chan struct{})
		go func() {
			defer close(done)
			second.Members()
		}()
		require.NoError(t, first.Cancel(ctx))
		<-done
		require.NoError(t, second.Cancel(ctx))
	}
}

// The floor of a lower class holds in a group.
func TestGroupFloor(t *testing.T) {
	for _, which := range []string{"limiter", "group"} {
		synctest.Test(t, func(t *testing.T) {
			m := tb.NewMemoryStore()
			normal := limiter(t, "a", 20, tb.WithStore(&participantStore{m, 1}))
			low := limiter(t, "a", 20, tb.WithStore(&participantStore{m, 2}), tb.WithPriority(tb.Low))
			g, err := tb.All(low)
			require.NoError(t, err)
			c, cancel := context.WithCancel(ctx)
			time.AfterFunc(time.Minute, cancel)
			var n [2]atomic.Int64
			call := func(i int, acquire func(context.Context, int) (time.Duration, error)) {
				for c.Err() == nil {
					if _, err := acquire(c, 1); err == nil {
						n[i].Add(1)
					}
				}
			}
			for range 40 {
				go call(0, normal.Acquire)
			}
			for range 10 {
				if which == "group" {
					go call(1, g.Acquire)
				} else {
					go call(1, low.Acquire)
				}
			}
			<-c.Done()
			synctest.Wait()
			t.Log(which, "normal", n[0].Load(), "low", n[1].Load())
			require.Greater(t, n[1].Load(), int64(30))
		})
	}
}

// A limiter of ForPriority is a member of a group like any other limiter.
func TestGroupOfAPriority(t *testing.T) {
	store := tb.NewMemoryStore()
	l, err := tb.NewSmoothBursty("x", 5, tb.WithStore(store))
	require.NoError(t, err)
	other, err := tb.NewSmoothBursty("y", 5, tb.WithStore(store))
	require.NoError(t, err)
	_, err = tb.All(l, l.ForPriority(tb.Low))
	require.ErrorIs(t, err, tb.ErrInvalidConfig)
	g, err := tb.All(l.ForPriority(tb.Low), other)
	require.NoError(t, err)
	ok, err := g.TryAcquire(t.Context(), 1, 0)
	require.NoError(t, err)
	require.True(t, ok)
}

// A quota is no member beside others: its permits would be used later than they are due, and more of them in one window.
func TestGroupRefusesAQuota(t *testing.T) {
	store := tb.WithStore(tb.NewMemoryStore())
	quota, err := tb.NewQuota("quota", 5, time.Second, 0, store)
	require.NoError(t, err)
	other := limiter(t, "other", 5, store)
	_, err = tb.All(other, quota)
	require.ErrorIs(t, err, tb.ErrInvalidConfig)
	require.ErrorContains(t, err, `"quota"`)
	_, err = tb.Any(other, tb.Weighted(quota, 2))
	require.ErrorIs(t, err, tb.ErrInvalidConfig)
	_, err = tb.All(quota)
	require.NoError(t, err)
	_, err = tb.Any(other, quota)
	require.NoError(t, err)
}

// What a lower class is granted in any way is taken from its floor, in memory too: after ten grants without waiting it has no credit left.
func TestFloorIsSpentInMemory(t *testing.T) {
	for name, open := range map[string]func(*tb.RateLimiter) acquirer{
		"limiter": func(l *tb.RateLimiter) acquirer { return l },
		"group": func(l *tb.RateLimiter) acquirer {
			g, err := tb.All(l)
			require.NoError(t, err)
			return g
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, grants := range []int{0, 10} {
				far(t, func(t *testing.T) {
					store := tb.WithStore(tb.NewMemoryStore())
					high := limiter(t, "a", 1, store, tb.WithMaxPermits(20), tb.WithInitialPermits(0))
					low := open(limiter(t, "a", 1, store, tb.WithMaxPermits(20), tb.WithInitialPermits(0), tb.WithPriority(tb.Low), tb.WithPriorityFloor(0.5)))
					next := func() time.Duration {
						r, err := high.Reserve(ctx, 1)
						require.NoError(t, err)
						return r.Delay()
					}
					waits := func(n int) (stop func()) {
						c, cancel := context.WithCancel(ctx)
						var ended sync.WaitGroup
						ended.Go(func() { _, _ = low.Acquire(c, n) })
						synctest.Wait()
						return func() { cancel(); ended.Wait() }
					}
					next()
					next()
					stop := waits(3)
					for range 5 { // it earns credit, while others keep the debt
						time.Sleep(time.Second)
						next()
					}
					stop()
					time.Sleep(20 * time.Second)
					for range grants {
						ok, err := low.TryAcquire(ctx, 1, 0)
						require.NoError(t, err)
						require.True(t, ok)
					}
					for next() < 2500*time.Millisecond {
						continue
					}
					time.Sleep(500 * time.Millisecond)
					stop = waits(1)
					want := 4500 * time.Millisecond // the lower class has taken a place before it
					if grants > 0 {
						want = 3500 * time.Millisecond
					}
					require.Equal(t, want, next())
					stop()
				})
			}
		})
	}
}

// acquirer is a limiter or a group.
type acquirer interface {
	Acquire(ctx context.Context, permits int) (time.Duration, error)
	TryAcquire(ctx context.Context, permits int, timeout time.Duration) (bool, error)
}
