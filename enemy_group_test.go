package tokenbucket_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	. "github.com/go-tokenbucket/tokenbucket"
)

// A limiter of ForPriority is a member of a group like any other limiter.
func TestEnemyGroupOfAPriority(t *testing.T) {
	store := NewMemoryStore()
	l, err := NewSmoothBursty("x", 5, WithStore(store))
	require.NoError(t, err)
	other, err := NewSmoothBursty("y", 5, WithStore(store))
	require.NoError(t, err)
	_, err = All(l, l.ForPriority(Low))
	require.ErrorIs(t, err, ErrInvalidConfig)
	g, err := All(l.ForPriority(Low), other)
	require.NoError(t, err)
	ok, err := g.TryAcquire(t.Context(), 1, 0)
	require.NoError(t, err)
	require.True(t, ok)
}
