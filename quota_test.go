package tokenbucket_test

import (
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// What would let more calls into a window is refused, by the constructor and afterwards.
func TestQuotaCannotBeUndone(t *testing.T) {
	script := tb.NewMemoryStore()
	for want, opt := range map[string]tb.Option{
		"max permits 50: want none for a quota": tb.WithMaxPermits(50),
		"payment PayLater":                      tb.WithPayment(tb.PayLater),
		"initial permits 2":                     tb.WithInitialPermits(2),
		"cold factor 3":                         tb.WithColdFactor(3),
		"prefetch":                              tb.WithPrefetch(time.Second),
	} {
		_, err := tb.NewQuota("x", 5, time.Second, time.Millisecond, opt, tb.WithStore(script))
		require.ErrorIs(t, err, tb.ErrInvalidConfig, want)
		require.ErrorContains(t, err, want)
	}
	rate, quota := tb.ForQuota(5, time.Second, time.Millisecond) //nolint:staticcheck // it must be as strict as long as it exists
	_, err := tb.NewSmoothBursty("x", 257, quota)
	require.ErrorIs(t, err, tb.ErrInvalidConfig)
	require.ErrorContains(t, err, "permits per second 257: want that of the quota")
	_, err = tb.NewSmoothBursty("x", rate, quota, tb.WithMaxPermits(50))
	require.ErrorIs(t, err, tb.ErrInvalidConfig)
	_, err = tb.NewSmoothWarmingUp("x", rate, time.Second, quota)
	require.ErrorIs(t, err, tb.ErrInvalidConfig)

	clock := clockwork.NewFakeClock()
	l, err := tb.NewQuota("x", 5, time.Second, time.Millisecond, tb.WithClock(clock))
	require.NoError(t, err)
	require.ErrorIs(t, l.SetRate(ctx, 10), tb.ErrInvalidConfig)
	require.ErrorContains(t, l.SetRate(ctx, 10), "SetQuota")
	require.ErrorIs(t, l.SetRateAndBurst(ctx, 10, 5), tb.ErrInvalidConfig)
	_, err = l.Reserve(ctx, 2)
	require.ErrorIs(t, err, tb.ErrInvalidPermits)
	_, err = l.TryAcquire(ctx, 0, 0)
	require.ErrorIs(t, err, tb.ErrInvalidPermits)
	require.InDelta(t, 5/1.001, l.Rate(), 1e-9, "nothing has changed")
}

// SetQuota changes the quota for all limiters of the bucket. One permit at most is stored before and after.
func TestSetQuota(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		make := func() *tb.RateLimiter {
			l, err := tb.NewQuota("x", 1, time.Hour, 0, tb.WithStore(open()), patient, tb.WithClock(clock))
			require.NoError(t, err)
			return l
		}
		l, other := make(), make()
		require.NoError(t, l.Reset(ctx))
		require.NoError(t, l.SetQuota(ctx, 100, time.Second, 0))
		b, err := other.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 100.0, b.Rate)
		require.Equal(t, 1.0, b.MaxPermits)
		require.Equal(t, 100.0, other.Rate())
		for field, err := range map[string]error{
			"quota 0":         l.SetQuota(ctx, 0, time.Second, 0),
			"quota window 0s": l.SetQuota(ctx, 1, 0, 0),
			"quota jitter -1": l.SetQuota(ctx, 1, time.Second, -1),
		} {
			require.ErrorIs(t, err, tb.ErrInvalidConfig)
			require.ErrorContains(t, err, field)
		}
		plain, err := tb.NewSmoothBursty("x", 5)
		require.NoError(t, err)
		require.ErrorIs(t, plain.SetQuota(ctx, 1, time.Second, 0), tb.ErrInvalidConfig)
	})
}

// The quota of a day beside 5/s in a simulated month of full demand: neither window is exceeded, and 99 % of the day's calls are used.
func TestQuotaOfADay(t *testing.T) {
	const day, calls = 24 * time.Hour, 10_000
	clock := clockwork.NewFakeClockAt(time.UnixMicro(1_700_000_000_000_000))
	l, err := tb.NewQuota("x", calls, day, time.Second, tb.WithClock(clock))
	require.NoError(t, err)
	began := clock.Now()
	var granted []time.Duration
	for clock.Since(began) < 30*day {
		r, err := l.Reserve(ctx, 1)
		require.NoError(t, err)
		clock.Advance(r.Delay())
		granted = append(granted, clock.Since(began))
	}
	for i := calls; i < len(granted); i++ {
		require.GreaterOrEqual(t, granted[i]-granted[i-calls], day)
	}
	require.GreaterOrEqual(t, len(granted), 30*calls*99/100)
}
