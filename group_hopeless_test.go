package tokenbucket_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// A group refuses at once what cannot be due within the timeout, however long that is: a member owes more than its look-ahead.
func TestGroupRefusesAtOnce(t *testing.T) {
	for _, s := range stores {
		t.Run(s.name, func(t *testing.T) {
			open := s.open(t)
			free, err := tb.NewSmoothBursty("free", 100, tb.WithStore(open(false)))
			require.NoError(t, err)
			owes := func(name string) *tb.RateLimiter {
				l, err := tb.NewSmoothBursty(name, 5, tb.WithStore(open(false)))
				require.NoError(t, err)
				other, err := tb.NewSmoothBursty(name, 5, tb.WithStore(open(false)))
				require.NoError(t, err)
				_, err = other.Reserve(ctx, 1000)
				require.NoError(t, err)
				return l
			}
			all, err := tb.All(free, owes("a"))
			require.NoError(t, err)
			any, err := tb.Any(owes("b"), owes("c"))
			require.NoError(t, err)
			began := time.Now()
			ok, err := all.TryAcquire(ctx, 1, 30*time.Second)
			require.NoError(t, err)
			require.False(t, ok)
			by, err := any.TryAcquire(ctx, 1, 30*time.Second)
			require.NoError(t, err)
			require.Nil(t, by)
			require.Less(t, time.Since(began), 10*time.Second)
		})
	}
}

// distant is a store whose replies take a while.
type distant struct {
	tb.MemoryStore
	mu   sync.Mutex
	back time.Duration
}

func (s *distant) Apply(ctx context.Context, b *tb.Batch) error {
	s.mu.Lock()
	back := s.back
	s.mu.Unlock()
	err := s.MemoryStore.Apply(ctx, b)
	time.Sleep(back)
	return err
}

// slow lets replies take back for a while.
func (s *distant) slow(back, while time.Duration) {
	set := func(d time.Duration) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.back = d
	}
	set(back)
	time.AfterFunc(while, func() { set(0) })
}

// far runs a test in virtual time, and lets the probes end.
func far(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		defer time.Sleep(time.Minute)
		test(t)
	})
}

// A slow reply does not shorten the timeout: the wait in it counts from the decision, not from its arrival. The permits are due 40 ms before the timeout
// ends, and the replies of the first second take 100 ms.
func TestGroupTimeoutCountsFromTheDecision(t *testing.T) {
	for name, deadline := range map[string]bool{"timeout": false, "deadline": true} {
		for _, what := range []string{"limiter", "group"} {
			t.Run(what+" "+name, func(t *testing.T) {
				far(t, func(t *testing.T) {
					s := new(distant)
					l, err := tb.NewSmoothBursty("a", 10, tb.WithStore(s), tb.WithInitialPermits(0), tb.WithStoreTimeout(5*time.Second))
					require.NoError(t, err)
					var g acquirer = l
					if what == "group" {
						g = all(t, l)
					}
					r, err := l.Reserve(ctx, 29)
					require.NoError(t, err)
					ok, err := g.TryAcquire(ctx, 1, 0) // a quick reply shows the store's clock
					require.NoError(t, err)
					require.False(t, ok)
					timeout, ctx := r.Delay()+140*time.Millisecond, ctx
					s.slow(100*time.Millisecond, time.Second)
					if deadline {
						c, cancel := context.WithTimeout(ctx, timeout)
						defer cancel()
						ctx, timeout = c, time.Hour
					}
					ok, err = g.TryAcquire(ctx, 1, timeout)
					require.NoError(t, err)
					require.True(t, ok)
				})
			})
		}
	}
}

// Permits that go back with a reply are not missing for the calls behind. The store of a grants a large request, which that of b then refuses.
func TestGroupPermitsGoBackInTheReply(t *testing.T) {
	far(t, func(t *testing.T) {
		s, long := new(distant), tb.WithStoreTimeout(5*time.Second)
		a, err := tb.NewSmoothBursty("a", 1, tb.WithInitialPermits(1), long)
		require.NoError(t, err)
		b, err := tb.NewSmoothBursty("b", 2, tb.WithStore(s), tb.WithInitialPermits(0), long)
		require.NoError(t, err)
		g, err := tb.All(a, b)
		require.NoError(t, err)
		_, err = a.State(ctx)
		require.NoError(t, err)
		_, err = b.Reserve(ctx, 6) // 3 s of debt
		require.NoError(t, err)
		s.slow(300*time.Millisecond, 200*time.Millisecond)
		var others sync.WaitGroup
		try := func(n int, timeout time.Duration) bool {
			ok, err := g.TryAcquire(ctx, n, timeout)
			return ok && err == nil
		}
		others.Go(func() { try(1, 0) }) // the next two share the batch after its own
		synctest.Wait()
		others.Go(func() { try(4, 3200*time.Millisecond) })
		synctest.Wait()
		require.True(t, try(1, 3700*time.Millisecond))
		others.Wait()
	})
}

// Waiters that cannot be in time are refused by the first reply that shows it, and newcomers do not count them as ahead.
func TestGroupHopelessWaitersAreNotAhead(t *testing.T) {
	far(t, func(t *testing.T) {
		g := all(t, limiter(t, "a", 10, tb.WithStore(&tb.Distant{Store: tb.NewMemoryStore(), Takes: 10 * time.Millisecond})))
		var waiting sync.WaitGroup
		for range 15 { // ten are within the look-ahead
			waiting.Go(func() {
				_, err := g.Acquire(ctx, 1)
				assert.NoError(t, err)
			})
		}
		synctest.Wait()
		for range 30 {
			waiting.Go(func() { // before the first reply
				began := time.Now()
				ok, err := g.TryAcquire(ctx, 1, 1200*time.Millisecond)
				assert.NoError(t, err)
				assert.False(t, ok)
				assert.LessOrEqual(t, time.Since(began), 50*time.Millisecond)
			})
		}
		time.Sleep(50 * time.Millisecond)
		ok, err := g.TryAcquire(ctx, 1, 3*time.Second) // due in 1.5 s
		require.NoError(t, err)
		require.True(t, ok)
		waiting.Wait()
	})
}
