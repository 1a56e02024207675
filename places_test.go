package tokenbucket

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A process that only ever reserves, and never cancels, remembers no more than it says.
func TestHistoryIsBounded(t *testing.T) {
	l, err := NewSmoothBursty("x", 1e6, WithMaxPermits(1e6), WithInitialPermits(1e6))
	require.NoError(t, err)
	for range 10_000 {
		_, err := l.Reserve(background, 1)
		require.NoError(t, err)
	}
	l.line.mu.Lock()
	defer l.line.mu.Unlock()
	require.LessOrEqual(t, len(l.line.runs), 1)
	for _, r := range l.line.runs {
		require.LessOrEqual(t, len(r.entries), maxHistory+1)
	}
}

// Limiters of one name on one store share one line, for as long as one of them is used.
func TestLinesAreShared(t *testing.T) {
	store := NewMemoryStore()
	open := func(name string, s Store) *RateLimiter {
		l, err := NewSmoothBursty(name, 5, WithStore(s))
		require.NoError(t, err)
		return l
	}
	a := open("x", store)
	require.Same(t, a.line, open("x", store).line)
	require.NotSame(t, a.line, open("y", store).line)
	require.NotSame(t, a.line, open("x", NewMemoryStore()).line)
	require.NotSame(t, open("x", uncomparable{}).line, open("x", uncomparable{}).line)
}

type uncomparable struct {
	Store
	_ []int
}
