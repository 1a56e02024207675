package slidingwindow

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Waiters are granted together, as the callers of Allow are: a crowd is served as fast as the window allows.
func TestWaitersAreGrantedTogether(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const waiters, limit = 1500, 500
		client := &bubbleRedis{way: slow(10 * time.Millisecond)}
		l, err := New("x", limit, time.Second, 10*time.Millisecond, WithRedis(client))
		require.NoError(t, err)
		began := time.Now()
		var waiting sync.WaitGroup
		for range waiters {
			waiting.Go(func() {
				if err := l.Wait(ctx); err != nil {
					panic(err)
				}
			})
		}
		waiting.Wait()
		require.Less(t, time.Since(began), 2300*time.Millisecond)
		require.Less(t, client.executed(), int64(200))
	})
}

// A call returns within the store timeout, even if it waits for a batch that is slow to come back. That is no outage.
func TestStoreTimeoutBoundsEachCall(t *testing.T) {
	for _, policy := range []FailurePolicy{FailClosed, FailOpen, LocalShare(5)} {
		bubble(t, policy.String(), func(t *testing.T) {
			const callers, timeout = 5000, time.Second
			client := &bubbleRedis{way: slow(900 * time.Millisecond)}
			var outages atomic.Int64
			l, err := New("x", callers*2, time.Hour, time.Minute, WithRedis(client), WithStoreTimeout(timeout), WithFailurePolicy(policy),
				WithObserver(Observer{Health: func(Health) { outages.Add(1) }}))
			require.NoError(t, err)
			var calling sync.WaitGroup
			var longest, passed, failed atomic.Int64
			for range callers {
				calling.Go(func() {
					began := time.Now()
					ok, err := l.Allow(ctx)
					if took := int64(time.Since(began)); took > longest.Load() {
						longest.Store(took)
					}
					switch {
					case ok:
						passed.Add(1)
					default:
						failed.Add(1)
						require.ErrorIs(t, err, ErrStoreTimeout)
					}
				})
			}
			calling.Wait()
			require.LessOrEqual(t, time.Duration(longest.Load()), timeout+timeout/16)
			require.Positive(t, passed.Load())
			require.Positive(t, failed.Load())
			require.Zero(t, outages.Load())
			time.Sleep(10 * time.Second)
			synctest.Wait()
			client.by(nil)
			left, err := l.refreshed(t)
			require.NoError(t, err)
			require.EqualValues(t, passed.Load(), callers*2-left, "what was granted to callers that had gone is refunded")
		})
	}
}

// All waiters end with an error when the client is closed: at the next call, and without one at the next sub-interval.
func TestClosedClientEndsWaiters(t *testing.T) {
	for _, call := range []bool{false, true} {
		t.Run(fmt.Sprint(call), func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			client := server.Client(t)
			window, resolution := 10*time.Minute, time.Second
			if call {
				window, resolution = 4*time.Hour, time.Hour
			}
			l, err := New("x", 2, window, resolution, WithRedis(client), patient)
			require.NoError(t, err)
			ok, err := l.AllowN(ctx, 2)
			require.NoError(t, err)
			require.True(t, ok)
			const waiters = 3
			results := make(chan error, waiters)
			for range waiters {
				go func() { results <- l.Wait(ctx) }()
			}
			time.Sleep(100 * time.Millisecond) // if they come later, they end as well
			require.NoError(t, client.Close())
			if call {
				require.ErrorIs(t, l.SetLimit(ctx, 3), ErrStoreUnusable)
			}
			for range waiters {
				select {
				case err := <-results:
					require.ErrorIs(t, err, ErrStoreUnusable)
				case <-time.After(10 * time.Second):
					t.Fatal("a waiter waits on")
				}
			}
		})
	}
}

// The last version has no next: SetLimit reports that the limit was not set.
func TestSetLimitAfterTheLastVersion(t *testing.T) {
	l, err := New(unique(t), 5, time.Hour, time.Minute, WithRedis(redistest.Shared(t).Client(t)), patient, WithVersion(maxInteger-1))
	require.NoError(t, err)
	require.NoError(t, l.SetLimit(ctx, 7))
	require.Equal(t, 7, l.Limit())
	require.Equal(t, int64(maxInteger), l.Version())
	require.ErrorIs(t, l.SetLimit(ctx, 9), ErrInvalidPermits)
	require.Equal(t, 7, l.Limit())
	require.NoError(t, l.SetLimit(ctx, 7), "it is in force")
}

// If the application uses all connections of the client, that is no outage: no policy lets calls pass.
func TestPoolIsNoOutage(t *testing.T) {
	for name, patience := range map[string]time.Duration{"short": 50 * time.Millisecond, "long": 10 * time.Second} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Shared(t)
			client := redis.NewClient(&redis.Options{Addr: server.Addr, PoolSize: 1, PoolTimeout: patience})
			defer func() { _ = client.Close() }()
			var outages atomic.Int64
			l, err := New(unique(t), 1, time.Hour, time.Minute, WithRedis(client), WithStoreTimeout(time.Second), WithFailurePolicy(FailOpen),
				WithObserver(Observer{Health: func(Health) { outages.Add(1) }}))
			require.NoError(t, err)
			ok, err := l.Allow(ctx)
			require.NoError(t, err)
			require.True(t, ok)
			held := client.Conn()
			require.NoError(t, held.Ping(ctx).Err())
			for range 2 {
				l.process.Mu.Lock()
				l.machine.view.valid = false // so that Redis is asked
				l.process.Mu.Unlock()
				short, cancel := context.WithTimeout(ctx, time.Minute)
				ok, err = l.Allow(short)
				cancel()
				require.False(t, ok)
				require.ErrorIs(t, err, ErrStoreUnavailable)
				require.ErrorContains(t, err, "connections")
			}
			require.Zero(t, outages.Load())
			require.NoError(t, held.Close())
			ok, err = l.Allow(ctx)
			require.NoError(t, err)
			require.False(t, ok)
		})
	}
}
