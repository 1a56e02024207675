package tokenbucket_test

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// The texts of errors have one order: the package and the fault; the bucket or its key; the field, its value, and the values that are
// accepted.
func TestErrorTexts(t *testing.T) {
	bursty := func(rate float64, opts ...tb.Option) error {
		_, err := tb.NewSmoothBursty("x", rate, opts...)
		return err
	}
	warm := func(opts ...tb.Option) error {
		_, err := tb.NewSmoothWarmingUp("x", 5, time.Second, opts...)
		return err
	}
	client := redistest.Shared(t).Client(t)
	limiter := func(opts ...tb.Option) *tb.RateLimiter {
		l, err := tb.NewSmoothBursty("x", 5, opts...)
		require.NoError(t, err)
		return l
	}
	l := limiter(tb.WithClock(clockwork.NewFakeClock()))
	refused := func(_ any, err error) error { return err }
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()

	corrupt := func(state string) error {
		prefix := "TestErrorTexts:"
		require.NoError(t, client.Set(ctx, prefix+"{x}", state, time.Minute).Err())
		_, err := limiter(tb.WithStore(tb.NewRedisScriptStore(client, tb.WithKeyPrefix(prefix)))).Try(ctx)
		_, same := limiter(tb.WithStore(tb.NewRedisStore(client, tb.WithKeyPrefix(prefix)))).Try(ctx)
		require.EqualError(t, same, err.Error(), "both stores")
		return err
	}
	warmBucket := tb.NewMemoryStore()
	other, err := tb.NewSmoothWarmingUp("x", 5, time.Second, tb.WithStore(warmBucket))
	require.NoError(t, err)
	_, err = other.Try(ctx)
	require.NoError(t, err)
	slow, err := tb.NewSmoothBursty("x", 0.001)
	require.NoError(t, err)
	crowded := limiter(tb.WithMaxWaiters(1))
	for range 2 {
		_, _ = crowded.Reserve(ctx, 1)
	}

	for _, c := range []struct {
		err  error
		says string
	}{
		{bursty(-1), `invalid configuration: bucket "x": permits per second -1: want a number from 1e-9 to 2^53`},
		{bursty(5, tb.WithMaxPermits(-1)), `invalid configuration: bucket "x": max permits -1: want a finite number from 0 to 2^53`},
		{bursty(5, tb.WithInitialPermits(6)), `invalid configuration: bucket "x": initial permits 6: want 0 to max permits, 5`},
		{bursty(5, tb.WithColdFactor(3)), `invalid configuration: bucket "x": cold factor 3: want none for a bursty limiter`},
		{warm(tb.WithMaxPermits(5)), `invalid configuration: bucket "x": max permits 5: want none for a limiter that warms up`},
		{warm(tb.WithColdFactor(1)), `invalid configuration: bucket "x": cold factor 1: want a number above 1 whose cold interval is at most 1e15 µs`},
		{bursty(5, tb.WithVersion(-1)), `invalid configuration: bucket "x": version -1: want 0 (unversioned) to 2^53`},
		{bursty(5, tb.WithMaxWait(-1)), `invalid configuration: bucket "x": max wait -1ns: want a duration that is not negative`},
		{bursty(5, tb.WithStore(nil)), `invalid configuration: bucket "x": store nil: want a store`},
		{bursty(5, nil), `invalid configuration: bucket "x": option nil: want no nil options`},
		{bursty(5, tb.WithStore(tb.NewRedisScriptStore(nil))), `invalid configuration: bucket "x": redis client nil: want a client`},
		{bursty(5, tb.WithStore(&tb.RedisStore{})), `invalid configuration: bucket "x": store the zero value: want one made by its constructor`},
		{bursty(5, tb.WithStore(tb.NewRedisStore(client, tb.WithKeyPrefix("{")))), `invalid configuration: bucket "x": key prefix "{": want at most 512 bytes without braces`},
		{bursty(5, tb.WithStore(tb.NewRedisStore(client)), tb.WithPrefetch(time.Minute)), `invalid configuration: bucket "x": prefetch 1m0s: want 1ms to 10s`},
		{bursty(5, tb.WithFailurePolicy(tb.LocalShare(0))), `invalid configuration: bucket "x": failure policy LocalShare(0): want a local share of at least 1 instance`},
		{refused(tb.NewSmoothBursty("", 5)), `invalid configuration: bucket "": name "" of 0 bytes: want 1 to 512 bytes of UTF-8`},

		{l.SetRate(ctx, math.Inf(1)), `invalid configuration: bucket "x": permits per second +Inf: want a number from 1e-9 to 2^53`},
		{l.SetRateAndBurst(ctx, 5, -1), `invalid configuration: bucket "x": max permits -1: want a finite number from 0 to 2^53`},
		{other.SetRateAndBurst(ctx, 5, 5), `invalid configuration: bucket "x": max permits 5: want a bursty limiter; one that warms up has SetRate`},
		{l.Penalize(ctx, 2*time.Hour), `invalid configuration: bucket "x": penalty 2h0m0s: want more than 0, at most 1h0m0s`},
		{refused(limiter(tb.WithStore(warmBucket)).Try(ctx)), `invalid configuration: bucket "x": kind bursty: want warmup, as the bucket is, or another name`},
		{refused(l.TryAcquire(ctx, 0, 0)), `invalid permits: bucket "x": permits 0: want at least 1`},
		{refused(slow.Reserve(ctx, 2_000_000_000)), `invalid permits: bucket "x": permits 2000000000: want fewer: the debt would exceed 2^53 µs`},
		{refused(l.TryAcquire(ctx, 6, 0)), `can never be granted: bucket "x": permits 6: want a timeout of at least 200ms`},
		{refused(l.Acquire(short, 50)), `bucket "x": permits 50: due in 9.8s, after the context's deadline`},
		{refused(crowded.Acquire(ctx, 1)), `too many waiters: bucket "x": 1 wait already`},

		{corrupt("tb9 x"), `corrupt state: key "TestErrorTexts:{x}": format tb9 was written by another release of this library; this one reads tb1`},
		{corrupt("tb1 epoch=1 seq=0"), `corrupt state: key "TestErrorTexts:{x}": seq "0": want a number from 1 to 9.007199254740992e+15`},
		{corrupt("tb1 epoch=1 seq=1 tail=0 stored=1 next=1 carry=0 debt=0 back=0: bursty soon 5 5 1 0"),
			`corrupt state: key "TestErrorTexts:{x}": payment "soon": want now or later`},
		{corrupt("tb1 epoch=1 seq=1 tail=0 stored=1 next=1 carry=0 debt=0 back=0: bursty now 0 5 1 0"),
			`corrupt state: key "TestErrorTexts:{x}": permits per second 0: want a number from 1e-9 to 2^53`},
	} {
		require.EqualError(t, c.err, "tokenbucket: "+c.says)
	}
}
