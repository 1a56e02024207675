package admission

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// An observer counts a grant of the rate once the concurrency has granted the call, too.
func TestTentative(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		counted, tentative := 0, 0
		limiter, err := tokenbucket.NewSmoothBursty("/a", 1000, tokenbucket.WithObserver(tokenbucket.Observer{Decision: func(ctx context.Context, _ tokenbucket.Decision) {
			if Tentative(ctx, func() { counted++ }) {
				tentative++
			}
		}}))
		require.NoError(t, err)
		places, err := semaphore.NewMemory(1)
		require.NoError(t, err)
		elsewhere, err := places.TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		env := &Env{Log: slog.New(slog.DiscardHandler), Semaphores: func(string, int, ...semaphore.Option) (*semaphore.Semaphore, error) { return places, nil }}
		s, row := new(Slot), Row{Name: "/a", Concurrent: 1}
		call := Call{Name: "/a", Cost: 1, Limiter: limiter, Asked: func() {}}

		a, outcome, err := env.Enter(ctx, s, row, call)
		require.NoError(t, err)
		require.False(t, a.OK)
		require.False(t, outcome.OK)
		require.Equal(t, []int{1, 0}, []int{tentative, counted})

		require.NoError(t, elsewhere.Release(ctx))
		a, outcome, err = env.Enter(ctx, s, row, call)
		require.NoError(t, err)
		require.True(t, a.OK)
		require.True(t, outcome.OK)
		require.Equal(t, []int{2, 1}, []int{tentative, counted})
		a.Leave()
		require.NoError(t, places.Close(ctx))
	})
}
