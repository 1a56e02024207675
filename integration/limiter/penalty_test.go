package limiter

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// A process that has somebody waiting, and no call to make, hears of another's penalty in time, on a real server.
func TestPenaltyIsHeard(t *testing.T) {
	t.Parallel()
	late := faultlab.MeasureLateness(t)
	ctx := context.Background()
	server := redistest.Start(t)
	open := func() *tb.RateLimiter {
		l, err := tb.NewSmoothBursty("heard", 1, tb.WithStore(tb.NewRedisScriptStore(server.Client(t))))
		require.NoError(t, err)
		return l
	}
	here, there := open(), open()
	began := time.Now()
	for range 2 {
		_, err := here.Reserve(ctx, 1)
		require.NoError(t, err)
	}
	waits, err := here.Reserve(ctx, 1) // in two seconds
	require.NoError(t, err)
	require.NoError(t, there.Penalize(ctx, 2*time.Second))
	<-waits.Ready()
	require.GreaterOrEqual(t, time.Since(began), 4*time.Second)
	// The penalty came after the reservation, by as much as the machine took in between: a second of that is far off.
	require.InDelta(t, 4, waits.Delay().Seconds(), 1+2*late.Most().Seconds())
}
