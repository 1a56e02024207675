package tokenbucket_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// A reservation of a group looks no further ahead in a member than that member's priority may, as one of the limiter alone.
func TestGroupReservesByPriority(t *testing.T) {
	for name, open := range groupStores(t) {
		t.Run(name, func(t *testing.T) {
			s := tb.WithStore(open())
			normal, other := limiter(t, "x", 10, s), limiter(t, "other", 1000, s)
			lowest := normal.ForPriority(tb.Lowest)
			group, err := tb.All(lowest, other)
			require.NoError(t, err)
			choice, err := tb.Any(lowest)
			require.NoError(t, err)
			above, err := tb.All(normal, other)
			require.NoError(t, err)
			_, err = normal.Reserve(ctx, 6) // a debt of 0.5 to 0.6 s
			require.NoError(t, err)
			const timeout = 2 * time.Second
			single, err := lowest.TryReserve(ctx, 1, timeout)
			require.NoError(t, err)
			require.False(t, single.OK())
			later, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			for _, g := range []interface {
				TryReserve(context.Context, int, time.Duration) (*tb.GroupReservation, error)
				Reserve(context.Context, int) (*tb.GroupReservation, error)
			}{group, choice} {
				r, err := g.TryReserve(later, 1, timeout)
				require.NoError(t, err)
				require.False(t, r.OK())
				require.Same(t, lowest, r.RefusedBy())
				require.InDelta(t, single.RetryAfter().Seconds(), r.RetryAfter().Seconds(), 0.3)
				require.NotZero(t, r.RetryAfter())
				r, err = g.Reserve(ctx, 1) // one without a timeout has its place, whenever that is
				require.NoError(t, err)
				require.True(t, r.OK())
				require.NoError(t, r.Cancel(ctx))
			}
			r, err := above.TryReserve(ctx, 1, timeout)
			require.NoError(t, err)
			require.True(t, r.OK())
		})
	}
}

// While callers of a higher priority wait, calls of a group that do not wait leave the stored permits of a member of a lower one to them. Observers
// receive the priority of the member.
func TestGroupLeavesStoredPermits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen []tb.Decision
		normal := limiter(t, "x", 10, tb.WithMaxPermits(1), tb.WithObserver(tb.Observer{Decision: func(_ context.Context, d tb.Decision) {
			if d.Priority == tb.Low {
				seen = append(seen, d)
			}
		}}))
		low := normal.ForPriority(tb.Low)
		group, err := tb.All(low)
		require.NoError(t, err)
		choice, err := tb.Any(low)
		require.NoError(t, err)
		var waiters sync.WaitGroup
		for range 20 {
			waiters.Go(func() {
				_, err := normal.Acquire(t.Context(), 1)
				require.NoError(t, err)
			})
		}
		synctest.Wait()
		require.NoError(t, low.Reset(t.Context())) // the bucket has a permit, and the process of the waiters has not learned of it
		ok, err := group.TryAcquire(t.Context(), 1, 0)
		require.NoError(t, err)
		require.False(t, ok)
		by, err := choice.TryAcquire(t.Context(), 1, 0)
		require.NoError(t, err)
		require.Nil(t, by)
		r, err := group.TryReserve(t.Context(), 1, 0)
		require.NoError(t, err)
		require.False(t, r.OK())
		require.Same(t, low, r.RefusedBy())
		require.Equal(t, 100*time.Millisecond, r.RetryAfter())
		require.True(t, r.Members()[0].Refused)
		waiters.Wait()
		time.Sleep(time.Second)
		ok, err = group.TryAcquire(t.Context(), 1, 0)
		require.NoError(t, err)
		require.True(t, ok)
		require.Len(t, seen, 4)
		for i, d := range seen {
			want := tb.ByPriority
			if i == 3 {
				want = tb.ByStore
			}
			require.Equal(t, want, d.By)
			require.Equal(t, i == 3, d.Granted)
		}
	})
}

// remote is a store at a distance, which its requests and its replies take.
type remote struct {
	tb.MemoryStore
	distance time.Duration
}

func (s *remote) Apply(ctx context.Context, b *tb.Batch) error {
	time.Sleep(s.distance)
	defer time.Sleep(s.distance)
	return s.MemoryStore.Apply(ctx, b)
}

// Callers of the lowest priority in a process far from the store use the whole rate, of a limiter and of a group.
func TestLowestUsesTheRateFromFarAway(t *testing.T) {
	for _, kind := range []string{"limiter", "all", "any"} {
		for _, distance := range []time.Duration{20 * time.Millisecond, 50 * time.Millisecond} {
			t.Run(fmt.Sprintf("%s from %v", kind, distance), func(t *testing.T) {
				far(t, func(t *testing.T) {
					l, err := tb.NewSmoothBursty("x", 200, tb.WithMaxPermits(1), tb.WithStore(&remote{distance: distance}), tb.WithPriority(tb.Lowest))
					require.NoError(t, err)
					acquire := func(ctx context.Context) error { _, err := l.Acquire(ctx, 1); return err }
					switch kind {
					case "all":
						g, err := tb.All(l)
						require.NoError(t, err)
						acquire = func(ctx context.Context) error { _, err := g.Acquire(ctx, 1); return err }
					case "any":
						g, err := tb.Any(l)
						require.NoError(t, err)
						acquire = func(ctx context.Context) error { _, _, err := g.Acquire(ctx, 1); return err }
					}
					ctx, cancel := context.WithCancel(t.Context())
					var callers sync.WaitGroup
					var served atomic.Int64
					for range 400 {
						callers.Go(func() {
							for acquire(ctx) == nil {
								served.Add(1)
							}
						})
					}
					time.Sleep(2 * time.Second)
					before := served.Load()
					time.Sleep(4 * time.Second)
					used := float64(served.Load()-before) / 800
					cancel()
					callers.Wait()
					t.Logf("%.1f %% of the rate used", 100*used)
					require.GreaterOrEqual(t, used, 0.97)
				})
			})
		}
	}
}
