package tokenbucket

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Limiters of one name with different store timeouts have a coordinator each, so one round trip may carry several batches of the same
// bucket. Each is decided on the state that the one before has left.
func TestBucketTwiceInATrip(t *testing.T) {
	const limiters, calls, rounds = 8, 40, 50
	store := NewRedisScriptStore(redistest.Shared(t).Client(t), WithKeyPrefix(prefixOf(t)))
	var all []*RateLimiter
	for i := range limiters {
		l, err := NewSmoothBursty("x", 0.001, WithStore(store), WithMaxPermits(limiters*calls*rounds), WithInitialPermits(limiters*calls*rounds),
			WithStoreTimeout(time.Minute+time.Duration(i)*time.Second))
		require.NoError(t, err)
		all = append(all, l)
	}
	for range rounds {
		var wg sync.WaitGroup
		for _, l := range all {
			for range calls {
				wg.Go(func() {
					ok, err := l.TryAcquire(background, 1, 0)
					if !ok || err != nil {
						t.Error(ok, err)
					}
				})
			}
		}
		wg.Wait()
	}
	state, err := all[0].State(background)
	require.NoError(t, err)
	require.EqualValues(t, 1+limiters*calls*rounds, state.Seq)
	require.Less(t, state.StoredPermits, 1.0)
}
