package tokenbucket_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	. "github.com/go-tokenbucket/tokenbucket"
)

// A limiter reports the configuration in force as of the latest reply, whichever priority the call had that got it.
func TestInForceOfPriorities(t *testing.T) {
	store := NewMemoryStore()
	l, err := NewSmoothBursty("x", 5, WithStore(store), WithVersion(1))
	require.NoError(t, err)
	newer, err := NewSmoothBursty("x", 7, WithStore(store), WithVersion(2), WithPriority(Lowest))
	require.NoError(t, err)
	_, err = newer.TryAcquire(t.Context(), 1, 0)
	require.NoError(t, err)
	_, err = l.ForPriority(Low).TryAcquire(t.Context(), 1, 0)
	require.NoError(t, err)
	require.Equal(t, InForce{Rate: 7, Version: 2}, l.ForPriority(Low).InForce())
	require.Equal(t, InForce{Rate: 7, Version: 2}, l.InForce())
}
