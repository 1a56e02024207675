package tokenbucket_test

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// losses counts what Observer.Lost receives, by bucket.
type losses struct {
	mu sync.Mutex
	of map[string]int
}

func (l *losses) observer() tb.Option {
	return tb.WithObserver(tb.Observer{Lost: func(bucket string, permits int) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.of[bucket] += permits
	}})
}

func (l *losses) seen() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.of)
}

func (l *losses) sum() (permits int) {
	for _, n := range l.seen() {
		permits += n
	}
	return permits
}

// Of a refund that comes back in part, the permits that are missing are lost. The bucket has room for 5. The group takes 5, and another caller takes one of
// the 2 that come until the group returns its own. Three of them fit, since without the group's call the bucket would have stored no more.
func TestLostInPart(t *testing.T) {
	for name, store := range map[string]func() tb.Store{
		"memory": func() tb.Store { return tb.NewMemoryStore() },
		"store":  func() tb.Store { return &gatedStore{MemoryStore: tb.NewMemoryStore()} },
	} {
		for _, weight := range []int{1, 5} {
			t.Run(fmt.Sprint(name, "/weight=", weight), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					seen, s := losses{of: map[string]int{}}, store()
					l := limiter(t, "x", 5, tb.WithStore(s), tb.WithInitialPermits(5), seen.observer())
					g := all(t, tb.Weighted(l, weight))
					r, err := g.TryReserve(ctx, 5/weight, 0)
					require.NoError(t, err)
					require.True(t, r.OK())
					time.Sleep(400 * time.Millisecond)
					ok, err := limiter(t, "x", 5, tb.WithStore(s)).TryAcquire(ctx, 1, 0)
					require.NoError(t, err)
					require.True(t, ok)
					require.NoError(t, r.Return(ctx))
					state, err := l.State(ctx)
					require.NoError(t, err)
					require.InDelta(t, 1+3, state.StoredPermits, 1e-6)
					require.EqualValues(t, 2, g.Lost())
					require.Equal(t, map[string]int{"x": 2}, seen.seen())
				})
			})
		}
	}
}

// Time that has passed does not come back. Only the stored permits of a grant do then.
func TestLostTimeOfARefund(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seen := losses{of: map[string]int{}}
		l := limiter(t, "x", 5, tb.WithMaxPermits(20), tb.WithInitialPermits(2), tb.WithPayment(tb.PayLater), seen.observer())
		g := all(t, l)
		r, err := g.TryReserve(ctx, 4, 0) // 2 that are stored, and 400 ms
		require.NoError(t, err)
		require.True(t, r.OK())
		_, err = l.Reserve(ctx, 1) // behind them
		require.NoError(t, err)
		time.Sleep(700 * time.Millisecond)
		require.NoError(t, r.Return(ctx))
		state, err := l.State(ctx)
		require.NoError(t, err)
		require.InDelta(t, 0.5+2, state.StoredPermits, 1e-6)
		require.EqualValues(t, 2, g.Lost())
		require.Equal(t, map[string]int{"x": 2}, seen.seen())
	})
}

// The observers of the members receive what groups and choices lose, those of other priorities included, under the label of the bucket.
func TestObserverOfLostPermits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seen, store := losses{of: map[string]int{}}, tb.NewMemoryStore()
		a := limiter(t, "a", 5, tb.WithStore(store), tb.WithMaxPermits(1), seen.observer()) // so nothing comes back behind other permits
		b := limiter(t, "b", 5, tb.WithStore(tb.NewMemoryStore()), tb.WithMaxPermits(1), tb.WithLabel("row"), seen.observer())
		g := all(t, a, tb.Weighted(b, 2))
		c := anyOf(t, a, b)
		lose := func(tryReserve func() (*tb.GroupReservation, error)) {
			r, err := tryReserve()
			require.NoError(t, err)
			require.True(t, r.OK())
			for _, m := range []*tb.RateLimiter{a, b} {
				_, err = m.Reserve(ctx, 1) // behind it
				require.NoError(t, err)
			}
			require.NoError(t, r.Cancel(ctx))
			time.Sleep(5 * time.Second)
		}
		for _, p := range []tb.Priority{tb.Normal, tb.Low} {
			lose(func() (*tb.GroupReservation, error) { return g.ForPriority(p).Reserve(ctx, 7) })
			lose(func() (*tb.GroupReservation, error) { return c.ForPriority(p).Reserve(ctx, 7) })
		}
		require.EqualValues(t, 2*(7+14), g.Lost())
		require.EqualValues(t, 2*7, c.Lost())
		require.EqualValues(t, g.Lost()+c.Lost(), seen.sum())
		require.Equal(t, []string{"a", "row"}, slices.Sorted(maps.Keys(seen.seen())))
	})
}

// What is lost of a reservation that was made before its group's limit changed counts, also if that happens after the change.
func TestLostOfAFormerLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seen, rules := losses{of: map[string]int{}}, new(hostileRules)
		old, next := limiter(t, "old", 5, tb.WithMaxPermits(1), seen.observer()), limiter(t, "next", 5, tb.WithMaxPermits(1), seen.observer())
		rules.set(old)
		g := all(t, tb.Following("row", rules))
		r, err := g.Reserve(ctx, 7)
		require.NoError(t, err)
		_, err = old.Reserve(ctx, 1) // behind it
		require.NoError(t, err)
		rules.set(next)
		_, err = g.TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.Zero(t, g.Lost())
		require.NoError(t, r.Cancel(ctx))
		time.Sleep(5 * time.Second)
		require.EqualValues(t, 7, seen.sum())
		require.EqualValues(t, 7, g.Lost())
	})
}

// A panic of the observer is logged. It ends no call, and holds no lock.
func TestPanicOfTheObserverOfLostPermits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := limiter(t, "x", 5, quiet, tb.WithMaxPermits(1), tb.WithObserver(tb.Observer{Lost: func(string, int) { panic("observer") }}))
		g := all(t, l)
		r, err := g.Reserve(ctx, 2)
		require.NoError(t, err)
		_, err = l.Reserve(ctx, 1)
		require.NoError(t, err)
		require.NoError(t, r.Cancel(ctx))
		time.Sleep(time.Second)
		require.EqualValues(t, 2, g.Lost())
		_, err = g.Acquire(ctx, 1)
		require.NoError(t, err)
	})
}
