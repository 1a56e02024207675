package tokenbucket

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// A lock that was kept for batches to come is released when none come.
func TestKeptLockIsReleased(t *testing.T) {
	server := redistest.Shared(t)
	client := server.Client(t)
	prefix := prefixOf(t)
	lock := prefix + "{x}:lock"
	var wg sync.WaitGroup
	var over atomic.Bool
	var limiters []*RateLimiter
	for range 4 {
		l, err := NewSmoothBursty("x", 1e6, WithStore(NewRedisStore(server.Client(t), WithKeyPrefix(prefix))), WithInitialPermits(1e6),
			patient)
		require.NoError(t, err)
		limiters = append(limiters, l)
		for range 4 {
			wg.Go(func() {
				for !over.Load() {
					ok, err := l.TryAcquire(background, 1, 0)
					require.NoError(t, err)
					require.True(t, ok)
				}
			})
		}
	}
	for began, held := time.Now(), 0; held < 50; {
		require.Less(t, time.Since(began), 20*time.Second)
		if client.Exists(background, lock).Val() == 1 {
			held++
		}
	}
	over.Store(true)
	wg.Wait()
	require.Eventually(t, func() bool { return client.Exists(background, lock).Val() == 0 }, 10*time.Second, time.Millisecond)
	for _, l := range limiters { // and no limiter has to wait for it
		_, err := l.State(background)
		require.NoError(t, err)
	}
}
