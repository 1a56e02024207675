package tokenbucket

import (
	"fmt"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
)

// Buckets that nobody has used for so long that they are full are dropped, as keys in Redis expire; a limiter that is still there
// begins its bucket anew.
func TestSweep(t *testing.T) {
	clock := clockwork.NewFakeClock()
	store := NewMemoryStore()
	open := func(name string) *RateLimiter {
		l, err := NewSmoothBursty(name, 10, WithStore(store), WithClock(clock), WithInitialPermits(1))
		require.NoError(t, err)
		return l
	}
	take := func(l *RateLimiter) bool {
		ok, err := l.TryAcquire(background, 1, 0)
		require.NoError(t, err)
		return ok
	}
	kept := open("kept")
	require.True(t, take(kept))
	require.False(t, take(kept))
	for i := range 1022 {
		require.True(t, take(open(fmt.Sprint("old ", i))))
	}
	require.Len(t, store.buckets, 1023)
	clock.Advance(48 * time.Hour)
	for i := range 2000 {
		require.True(t, take(open(fmt.Sprint("new ", i))))
	}
	require.Len(t, store.buckets, 2000, "none of two days ago")
	require.True(t, take(kept))
	require.False(t, take(kept), "it begins with one permit again")
	require.Len(t, store.buckets, 2001)
}
