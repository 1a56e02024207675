package tokenbucket_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// Cancel of a group's reservation does not wait for permits that stay in the process, because another one has taken permits behind them.
func TestGroupCancelDoesNotWait(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		shared := tb.NewMemoryStore()
		process := func() *tb.Group {
			store := &tb.Distant{Store: shared, Takes: time.Millisecond}
			var members []tb.Member
			for _, name := range []string{"a", "b"} {
				l, err := tb.NewSmoothBursty(name, 1, tb.WithStore(store), tb.WithInitialPermits(0))
				require.NoError(t, err)
				members = append(members, l)
			}
			g, err := tb.All(members...)
			require.NoError(t, err)
			return g
		}
		one, other := process(), process()
		first, err := one.Reserve(ctx, 5)
		require.NoError(t, err)
		_, err = other.Reserve(ctx, 1)
		require.NoError(t, err)
		second, err := one.Reserve(ctx, 1) // its reply shows that
		require.NoError(t, err)
		require.NoError(t, second.Cancel(ctx))
		began := time.Now()
		require.NoError(t, first.Cancel(ctx))
		require.Less(t, time.Since(began), 10*time.Millisecond)
	})
}
