package tokenbuckettest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/storetest"
	"github.com/go-tokenbucket/tokenbucket/tokenbuckettest"
)

// slow is a rate of one permit a day, so a bucket has only its stored permits.
const slow = 1.0 / 86_400

// limiter returns a limiter of a bucket with ten permits.
func limiter(t *testing.T, store tokenbucket.Store, opts ...tokenbucket.Option) *tokenbucket.RateLimiter {
	t.Helper()
	opts = append([]tokenbucket.Option{tokenbucket.WithStore(store), tokenbucket.WithMaxPermits(10), tokenbucket.WithInitialPermits(10)}, opts...)
	l, err := tokenbucket.NewSmoothBursty("fares", slow, opts...)
	require.NoError(t, err)
	return l
}

// stored returns the permits that a bucket has.
func stored(t *testing.T, l *tokenbucket.RateLimiter) int {
	t.Helper()
	bucket, err := l.State(t.Context())
	require.NoError(t, err)
	return int(bucket.StoredPermits)
}

// bubble runs a test in a bubble, and lets the probes that it has begun end.
func bubble(t *testing.T, test func(t *testing.T)) {
	synctest.Test(t, func(t *testing.T) {
		defer time.Sleep(time.Minute)
		test(t)
	})
}

func TestConformance(t *testing.T) {
	storetest.Run(t, func(*testing.T) func() tokenbucket.Store {
		store := tokenbuckettest.NewStore()
		return func() tokenbucket.Store { return store }
	})
}

// The policy decides during an outage, each as it does for a real store; afterwards the bucket is as it was.
func TestOutage(t *testing.T) {
	for _, test := range []struct {
		policy  tokenbucket.FailurePolicy
		granted bool
	}{
		{tokenbucket.FailClosed, false},
		{tokenbucket.FailOpen, true},
	} {
		t.Run(test.policy.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := tokenbuckettest.NewStore()
				l := limiter(t, store, tokenbucket.WithFailurePolicy(test.policy))
				store.Fail(tokenbuckettest.Outage())
				for range 20 {
					ok, err := l.Try(t.Context())
					require.Equal(t, test.granted, ok)
					if !test.granted {
						require.ErrorIs(t, err, tokenbucket.ErrStoreUnavailable)
					}
				}
				store.Restore()
				time.Sleep(time.Second) // a probe ends the outage
				require.Equal(t, 10, stored(t, l))
			})
		})
	}
}

func TestFailNext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var outages int
		store := tokenbuckettest.NewStore()
		l := limiter(t, store, tokenbucket.WithObserver(tokenbucket.Observer{Health: func(tokenbucket.Health) { outages++ }}))
		store.FailNext(1, tokenbuckettest.Outage())
		_, err := l.Try(t.Context())
		require.ErrorIs(t, err, tokenbucket.ErrStoreUnavailable)
		synctest.Wait()
		ok, err := l.Try(t.Context())
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, 3, store.Steps(), "the call, the probe, the call")
		require.Zero(t, outages, "a probe that succeeds is no outage")

		store.FailNext(0, tokenbuckettest.Outage())
		_, err = l.Try(t.Context())
		require.NoError(t, err)
	})
}

func TestHang(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := tokenbuckettest.NewStore()
		l := limiter(t, store, tokenbucket.WithStoreTimeout(2*time.Second))
		store.Fail(tokenbuckettest.Hang())
		began := time.Now()
		_, err := l.Try(t.Context())
		require.ErrorIs(t, err, tokenbucket.ErrStoreTimeout)
		require.Equal(t, 2*time.Second, time.Since(began))
		store.Restore()
		time.Sleep(time.Minute)
		require.Equal(t, 10, stored(t, l), "nothing was written")

		store.Fail(tokenbuckettest.Hang())
		time.AfterFunc(time.Second, store.Restore)
		began = time.Now()
		ok, err := l.TryAcquire(t.Context(), 1, 5*time.Second)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, time.Second, time.Since(began))
		require.Equal(t, 9, stored(t, l))
	})
}

func TestSlow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := tokenbuckettest.NewStore()
		l := limiter(t, store)
		store.Fail(tokenbuckettest.Slow(300 * time.Millisecond))
		began := time.Now()
		ok, err := l.Try(t.Context())
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, 300*time.Millisecond, time.Since(began))

		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		began = time.Now()
		_, err = l.Try(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 100*time.Millisecond, time.Since(began))
	})
}

func TestLoseReply(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := tokenbuckettest.NewStore()
		l := limiter(t, store)
		store.FailNext(1, tokenbuckettest.LoseReply())
		_, err := l.TryAcquire(t.Context(), 4, 0)
		require.ErrorIs(t, err, tokenbucket.ErrStoreUnavailable)
		synctest.Wait()
		require.Equal(t, 6, stored(t, l), "the permits are lost")
	})
}

// An error that needs a repair reaches the callers under every policy.
func TestError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := tokenbuckettest.Wrap(tokenbucket.NewMemoryStore())
		l := limiter(t, store, tokenbucket.WithFailurePolicy(tokenbucket.FailOpen))
		broken := errors.New("broken")
		store.Fail(tokenbuckettest.Error(broken))
		ok, err := l.Try(t.Context())
		require.False(t, ok)
		require.ErrorIs(t, err, broken)
		require.ErrorIs(t, err, tokenbucket.ErrStoreUnusable)
	})
}
