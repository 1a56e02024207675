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

// A process that has somebody waiting, and no call to make, hears of another's penalty in time, on a real server. It asks every half a
// second, and has four times as many seconds: on a machine that stalls it may miss some.
func TestPenaltyIsHeard(t *testing.T) {
	t.Parallel()
	late := faultlab.MeasureLateness(t)
	ctx := context.Background()
	server := redistest.Start(t)
	open := func() *tb.RateLimiter {
		l, err := tb.NewSmoothBursty("heard", 1, tb.WithStore(tb.NewRedisScriptStore(server.Client(t))), tb.WithStoreTimeout(patient))
		require.NoError(t, err)
		return l
	}
	here, there := open(), open()
	began := time.Now()
	for range 4 {
		_, err := here.Reserve(ctx, 1)
		require.NoError(t, err)
	}
	waits, err := here.Reserve(ctx, 1) // four seconds after the first
	require.NoError(t, err)
	reserved := time.Since(began)
	require.NoError(t, there.Penalize(ctx, 2*time.Second))
	<-waits.Ready()
	require.GreaterOrEqual(t, time.Since(began), 6*time.Second)
	// It counts from the reservation, which the first was before by no more than this took. A permit that nobody was there for at its
	// time, as the machine was late, lapses, and the next one comes a second later.
	require.GreaterOrEqual(t, waits.Delay(), 6*time.Second-reserved)
	require.LessOrEqual(t, waits.Delay(), 7*time.Second+2*late.Most())
}
