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

// A refusal in memory behind a reservation costs no more than one of an idle bucket; but what this process owns and nobody wants
// serves who comes, however long the bucket itself would let it wait.
func TestRefusedBehindAReservation(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := NewMemoryStore()
		open := func(opts ...Option) *RateLimiter {
			l, err := NewSmoothBursty("x", 10, append(opts, WithStore(store), WithMaxPermits(1), WithInitialPermits(0))...)
			require.NoError(t, err)
			return l
		}
		mine := open()
		others := open(WithClock(&wall{Clock: clockwork.NewRealClock()})) // of another clock, so it has a line of its own
		r, err := mine.Reserve(background, 1)
		require.NoError(t, err)
		allocated := testing.AllocsPerRun(100, func() {
			ok, err := mine.TryAcquire(background, 1, 150*time.Millisecond)
			require.False(t, ok)
			require.NoError(t, err)
		})
		require.Zero(t, allocated)
		_, err = others.Reserve(background, 1)
		require.NoError(t, err)
		require.NoError(t, r.Cancel(background))
		began := time.Now()
		ok, err := mine.TryAcquire(background, 1, 150*time.Millisecond)
		require.NoError(t, err)
		require.True(t, ok, "others have taken behind it, so it did not go back")
		require.Equal(t, 100*time.Millisecond, time.Since(began))
	})
}

// wall is the real clock, but not of its type.
type wall struct{ clockwork.Clock }
