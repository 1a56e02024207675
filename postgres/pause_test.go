package postgres

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Pauses double up to the bound, and end with the context: at once if it ends first anyway.
func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := shortestPause
		for range 10 {
			mean, began := time.Duration(p), time.Now()
			require.True(t, p.wait(t.Context()))
			require.GreaterOrEqual(t, time.Since(began), mean/2)
			require.Less(t, time.Since(began), 3*mean/2)
		}
		require.Equal(t, longestPause, p)

		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		require.False(t, p.wait(ctx))
		require.Zero(t, time.Since(began))
		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		require.False(t, p.wait(ctx))
	})
}
