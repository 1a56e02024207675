package tokenbucket_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// groupStores are the stores that a group must work on.
func groupStores(t *testing.T) map[string]func() tb.Store {
	client := redistest.Shared(t).Client(t)
	prefix := func(which string) tb.RedisOption {
		return tb.WithKeyPrefix(fmt.Sprint(t.Name(), which, rand.Uint64(), ":"))
	}
	memory, behind := tb.NewMemoryStore(), tb.NewMemoryStore()
	script, lock := prefix("script"), prefix("lock")
	return map[string]func() tb.Store{
		"memory":  func() tb.Store { return memory },
		"script":  func() tb.Store { return tb.NewRedisScriptStore(client, script) },
		"lock":    func() tb.Store { return tb.NewRedisStore(client, lock) },
		"generic": func() tb.Store { return plainStore{behind} },
	}
}

// plainStore is a Store that describes nothing and hides what batches are.
type plainStore struct{ store *tb.MemoryStore }

func (s plainStore) Apply(ctx context.Context, b *tb.Batch) error {
	return s.store.Apply(ctx, &tb.Batch{Names: b.Names, Decide: b.Decide})
}

func limiter(t testing.TB, name string, rate float64, opts ...tb.Option) *tb.RateLimiter {
	t.Helper()
	l, err := tb.NewSmoothBursty(name, rate, opts...)
	require.NoError(t, err)
	return l
}

// stateText is the state of a bucket, without the time that passes.
func stored(t testing.TB, l *tb.RateLimiter) (permits float64, seq int64) {
	t.Helper()
	b, err := l.State(ctx)
	require.NoError(t, err)
	return b.StoredPermits, b.Seq
}

// One call passes if all members agree, and takes nothing from any if one refuses.
func TestGroupAllOrNone(t *testing.T) {
	for name, open := range groupStores(t) {
		t.Run(name, func(t *testing.T) {
			s := tb.WithStore(open())
			slow := 1.0 / 3600
			a := limiter(t, "a", slow, s, tb.WithMaxPermits(10), tb.WithInitialPermits(10))
			b := limiter(t, "b", slow, s, tb.WithMaxPermits(4), tb.WithInitialPermits(4))
			g, err := tb.All(a, tb.Weighted(b, 2))
			require.NoError(t, err)
			for range 2 {
				ok, err := g.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				require.True(t, ok)
			}
			inA, seqA := stored(t, a)
			_, seqB := stored(t, b)
			require.InDelta(t, 8, inA, 0.1)
			for range 3 {
				ok, err := g.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				require.False(t, ok)
			}
			r, err := g.TryReserve(ctx, 1, time.Second)
			require.NoError(t, err)
			require.False(t, r.OK())
			require.Equal(t, "b", r.RefusedBy().Name())
			require.InDelta(t, 7199, r.RetryAfter().Seconds(), 60)
			_, after := stored(t, a)
			require.Equal(t, seqA, after, "nothing was taken from the member that agreed")
			_, after = stored(t, b)
			require.Equal(t, seqB, after)

			r, err = g.Reserve(ctx, 1)
			require.NoError(t, err)
			require.True(t, r.OK())
			require.InDelta(t, 7200, r.Delay().Seconds(), 60)
			require.Len(t, r.Members(), 2)
			require.NoError(t, r.Cancel(ctx))
			inA, _ = stored(t, a)
			require.InDelta(t, 8, inA, 0.1)
			state, err := b.State(ctx)
			require.NoError(t, err)
			require.LessOrEqual(t, state.NextFreeTicketMicros, state.SeenMicros+1000, "given back")
			require.Zero(t, g.Lost())
		})
	}
}

// A group waits for the member that is due last.
func TestGroupWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := tb.WithStore(tb.NewMemoryStore())
		a, b := limiter(t, "a", 10, s, tb.WithMaxPermits(0)), limiter(t, "b", 2, s, tb.WithMaxPermits(0))
		g, err := tb.All(a, b)
		require.NoError(t, err)
		began := time.Now()
		for i := range 10 {
			_, err := g.Acquire(ctx, 1)
			require.NoError(t, err)
			require.Equal(t, time.Duration(i+1)*500*time.Millisecond, time.Since(began).Round(time.Millisecond))
		}
	})
}

// What would make a group meaningless is refused when it is made.
func TestGroupConstruction(t *testing.T) {
	s := tb.NewMemoryStore()
	a := limiter(t, "a", 1, tb.WithStore(s))
	again := limiter(t, "a", 2, tb.WithStore(s))
	elsewhere := limiter(t, "a", 2)
	var none *tb.RateLimiter
	for name, members := range map[string][]tb.Member{
		"none": {}, "nil": {nil}, "nil limiter": {none}, "weighted nil": {tb.Weighted(nil, 1)}, "weight": {tb.Weighted(a, 0)}, "twice": {a, a},
		"the same bucket": {a, tb.Weighted(again, 2)}, "33": make([]tb.Member, 33),
	} {
		_, err := tb.All(members...)
		require.ErrorIs(t, err, tb.ErrInvalidConfig, name)
		_, err = tb.Any(members...)
		require.ErrorIs(t, err, tb.ErrInvalidConfig, name)
	}
	_, err := tb.All(a, elsewhere)
	require.NoError(t, err)
	g, err := tb.All(a)
	require.NoError(t, err)
	_, err = g.TryAcquire(ctx, 0, 0)
	require.ErrorIs(t, err, tb.ErrInvalidPermits)
	_, err = g.TryAcquire(ctx, 5, 0)
	require.ErrorIs(t, err, tb.ErrNeverGranted)
	var by *tb.MemberError
	require.True(t, errors.As(err, &by))
	require.Equal(t, "a", by.Bucket)
}

// A choice charges exactly the member that is due first, and tells which.
func TestChoice(t *testing.T) {
	for name, open := range groupStores(t) {
		t.Run(name, func(t *testing.T) {
			s := tb.WithStore(open())
			slow := 1.0 / 3600
			a := limiter(t, "a", slow, s, tb.WithMaxPermits(10), tb.WithInitialPermits(2))
			b := limiter(t, "b", 2*slow, s, tb.WithMaxPermits(4), tb.WithInitialPermits(1))
			c, err := tb.Any(a, b)
			require.NoError(t, err)
			var by []string
			for range 3 {
				l, err := c.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				require.NotNil(t, l)
				by = append(by, l.Name())
			}
			require.Equal(t, []string{"a", "a", "b"}, by)
			l, err := c.TryAcquire(ctx, 1, 0)
			require.NoError(t, err)
			require.Nil(t, l)
			r, err := c.Reserve(ctx, 1)
			require.NoError(t, err)
			require.Equal(t, "b", r.TakenFrom().Name(), "its next permit is due first")
			require.NoError(t, r.Cancel(ctx))
			require.Zero(t, c.Lost())
		})
	}
}
