package tokenbucket_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// SetRate scales the burst, SetRateAndBurst sets it. Stored permits and debt stay; the fleet learns it as the next version.
func TestSetRateAndBurst(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		limiter := func(rate float64, opts ...tb.Option) *tb.RateLimiter {
			l, err := tb.NewSmoothBursty("x", rate, append(opts, tb.WithStore(open()), patient, tb.WithClock(clock))...)
			require.NoError(t, err)
			return l
		}
		state := func(l *tb.RateLimiter) tb.PermitBucket {
			b, err := l.State(ctx)
			require.NoError(t, err)
			return b
		}
		l, other := limiter(0.01, tb.WithMaxPermits(1), tb.WithVersion(3)), limiter(7)
		require.NoError(t, l.SetRate(ctx, 100))
		require.Equal(t, 10_000.0, state(l).MaxPermits)
		require.NoError(t, l.SetRateAndBurst(ctx, 100, 1))
		require.Equal(t, 1.0, state(l).MaxPermits)
		require.EqualValues(t, 5, state(l).Version)
		_, err := other.TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.Equal(t, l.Rate(), other.Rate())

		for _, step := range []struct{ rate, burst, most, stored float64 }{
			{100, 40, 40, 0},      // one was taken
			{10, 40, 40, 10},      // 100 ms at 100/s
			{10, 20, 20, 11},      // 100 ms at 10/s; in proportion it would be 5.5
			{10, 0.5, 0.5, 0.5},   // permits above the maximum lapse
			{10, 1000, 1000, 0.5}, // and does not come back
			{10, 0, 0, 0},         // no burst
			{10, math.Copysign(0, -1), 0, 0},
			{1000, 100, 100, 0},
		} {
			require.NoError(t, l.SetRateAndBurst(ctx, step.rate, step.burst))
			b := state(other)
			require.Equal(t, step.most, b.MaxPermits, "%+v", step)
			require.InDelta(t, step.stored, b.StoredPermits, 1e-9, "%+v", step)
			clock.Advance(100 * time.Millisecond)
		}
		require.Equal(t, 100.0, state(l).StoredPermits, "full again")

		// A size of 1 or more counts as at least one permit when SetRate scales it; a smaller one was chosen.
		require.NoError(t, l.SetRateAndBurst(ctx, 1000, 100))
		require.NoError(t, l.SetRate(ctx, 1))
		require.Equal(t, 1.0, state(l).MaxPermits)
		require.NoError(t, l.SetRateAndBurst(ctx, 1000, 0.5))
		require.NoError(t, l.SetRate(ctx, 1))
		require.Equal(t, 0.0005, state(l).MaxPermits)

		// Debt stays as it is.
		_, err = l.Reserve(ctx, 5)
		require.NoError(t, err)
		before := state(l)
		require.NoError(t, l.SetRateAndBurst(ctx, 1000, 1000))
		require.Equal(t, before.NextFreeTicketMicros, state(l).NextFreeTicketMicros)

		require.NoError(t, other.Reset(ctx))
		require.Equal(t, 7.0, state(other).MaxPermits, "of its own configuration")
	})
}

// Changing the size back and forth mints nothing.
func TestSetRateAndBurstMintsNothing(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		l, err := tb.NewSmoothBursty("x", 10, tb.WithStore(open()), patient, tb.WithClock(clock))
		require.NoError(t, err)
		granted := 0
		for range 100 { // ten seconds
			require.NoError(t, l.SetRateAndBurst(ctx, 10, 1))
			clock.Advance(100 * time.Millisecond)
			require.NoError(t, l.SetRateAndBurst(ctx, 10, 1000))
			for {
				ok, err := l.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				if !ok {
					break
				}
				granted++
			}
		}
		require.Equal(t, 100, granted)
	})
}

func TestSetRateAndBurstRefused(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		opts := []tb.Option{tb.WithStore(open()), patient, tb.WithClock(clock)}
		l, err := tb.NewSmoothBursty("x", 5, opts...)
		require.NoError(t, err)
		require.NoError(t, l.Reset(ctx))
		before, err := l.State(ctx)
		require.NoError(t, err)
		nan, inf := math.NaN(), math.Inf(1)
		for _, c := range []struct {
			rate, burst float64
			says        string
		}{
			{0, 5, "permits per second 0"},
			{-1, 5, "permits per second -1"},
			{nan, 5, "permits per second NaN"},
			{inf, 5, "permits per second +Inf"},
			{1e-10, 5, "permits per second 1e-10"},
			{5, -1, "max permits -1"},
			{5, nan, "max permits NaN"},
			{5, inf, "max permits +Inf"},
			{5, 1e16, "max permits 1e+16"},
		} {
			err := l.SetRateAndBurst(ctx, c.rate, c.burst)
			require.ErrorIs(t, err, tb.ErrInvalidConfig, c.says)
			require.ErrorContains(t, err, c.says)
			require.ErrorContains(t, err, `bucket "x"`)
		}
		done, cancel := context.WithCancel(ctx)
		cancel()
		require.ErrorIs(t, l.SetRateAndBurst(done, 5, 5), context.Canceled)
		after, err := l.State(ctx)
		require.NoError(t, err)
		require.Equal(t, before, after)

		warm, err := tb.NewSmoothWarmingUp("warm", 5, time.Second, opts...)
		require.NoError(t, err)
		for _, burst := range []float64{0, 5} {
			err = warm.SetRateAndBurst(ctx, 5, burst)
			require.ErrorIs(t, err, tb.ErrInvalidConfig)
			require.ErrorContains(t, err, "want a bursty limiter; one that warms up has SetRate")
		}
		require.NoError(t, warm.SetRate(ctx, 5))
		mixed, err := tb.NewSmoothBursty("warm", 5, opts...)
		require.NoError(t, err)
		require.ErrorIs(t, mixed.SetRateAndBurst(ctx, 5, 5), tb.ErrInvalidConfig, "the bucket is of the other kind")

		last, err := tb.NewSmoothBursty("last", 5, append(opts, tb.WithVersion(1<<53))...)
		require.NoError(t, err)
		err = last.SetRateAndBurst(ctx, 5, 5)
		require.ErrorIs(t, err, tb.ErrInvalidConfig)
		require.ErrorContains(t, err, "version 9007199254740992")
	})
}

// As with SetRate, a shadow changes the shadows' bucket, and no failure policy stands in for the store.
func TestSetRateAndBurstOfAShadow(t *testing.T) {
	store := tb.NewMemoryStore()
	l, err := tb.NewSmoothBursty("x", 5, tb.WithStore(store))
	require.NoError(t, err)
	shadow, err := tb.NewSmoothBursty("x", 5, tb.WithStore(store), tb.WithShadow())
	require.NoError(t, err)
	require.NoError(t, shadow.SetRateAndBurst(ctx, 50, 2))
	b, err := l.State(ctx)
	require.NoError(t, err)
	require.Equal(t, 5.0, b.MaxPermits)
	b, err = shadow.State(ctx)
	require.NoError(t, err)
	require.Equal(t, 2.0, b.MaxPermits)

	for _, policy := range []tb.FailurePolicy{tb.FailClosed, tb.FailOpen, tb.LocalShare(2)} {
		l, err := tb.NewSmoothBursty("x", 5, tb.WithStore(gone{}), tb.WithFailurePolicy(policy))
		require.NoError(t, err)
		require.ErrorIs(t, l.SetRateAndBurst(ctx, 50, 2), errGone, policy)
	}
}

var errGone = errors.New("gone")

// gone is a store that fails.
type gone struct{}

func (gone) Apply(context.Context, *tb.Batch) error { return errGone }
