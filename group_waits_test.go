package tokenbucket_test

import (
	"log/slog"
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
