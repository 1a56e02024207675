package tokenbucket_test

import (
	"testing"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// Permits that were due at once go back if their call did not begin: each once, whatever was taken since, as those of a lease do.
func TestUnused(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		store := open()
		l, err := tb.NewSmoothBursty("unused", 5, tb.WithStore(store), patient, tb.WithClock(clock), tb.WithMaxPermits(5), tb.WithInitialPermits(5))
		require.NoError(t, err)
		stored := func() float64 {
			b, err := l.State(ctx)
			require.NoError(t, err)
			return b.StoredPermits
		}
		var due []*tb.Reservation
		for range 4 {
			r, err := l.TryReserve(ctx, 1, 0)
			require.NoError(t, err)
			require.True(t, r.OK())
			due = append(due, r)
		}
		require.InDelta(t, 1, stored(), 1e-9)
		require.NoError(t, due[0].Cancel(ctx))
		require.InDelta(t, 1, stored(), 1e-9, "its time has come: for Cancel it is used")
		for i, r := range []*tb.Reservation{due[1], due[3], due[3], due[2]} {
			require.NoError(t, r.Return(ctx))
			require.InDelta(t, []float64{2, 3, 3, 4}[i], stored(), 1e-9)
		}
		waits, err := l.TryReserve(ctx, 5, 1e9)
		require.NoError(t, err)
		require.True(t, waits.OK())
		require.NoError(t, waits.Return(ctx), "before it is due it is as Cancel")
		require.InDelta(t, 4, stored(), 1e-9)
		require.NoError(t, new(tb.Reservation).Return(ctx))
	})
}
