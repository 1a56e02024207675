package tokenbucket

import (
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
)

// A limiter that its program still uses by itself is decided by its successor, also where nothing waits; without one it fails.
func TestSupersededIsUsedByItself(t *testing.T) {
	clock, store := clockwork.NewFakeClock(), NewMemoryStore()
	open := func(rate float64) *RateLimiter {
		l, err := NewSmoothBursty("x", rate, WithStore(store), WithClock(clock), WithMaxPermits(1))
		require.NoError(t, err)
		return l
	}
	old, slow := open(100), open(1)
	passed := func() (n int) {
		for range 200 {
			clock.Advance(10 * time.Millisecond)
			if ok, err := old.TryAcquire(background, 1, 0); err == nil && ok {
				n++
			}
		}
		return n
	}
	require.Equal(t, 200, passed())
	old.Supersede(slow, nil)
	require.LessOrEqual(t, passed(), 3, "two seconds at 1/s")
	slow.Supersede(old, nil)
	require.GreaterOrEqual(t, passed(), 190)
	old.Supersede(nil, nil)
	_, err := old.TryAcquire(background, 1, 0)
	require.ErrorIs(t, err, ErrSuperseded)
}
