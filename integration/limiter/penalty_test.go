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

// A process with a waiter, and without a call to make, receives another process's penalty in time, on a real server. It asks every half a
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
	// It counts from the reservation, which the first preceded by no more than this took. A permit that had no waiter at its due time,
	// because the machine was late, lapses, and the next one is due a second later.
	require.GreaterOrEqual(t, waits.Delay(), 6*time.Second-reserved)
	require.LessOrEqual(t, waits.Delay(), 7*time.Second+2*late.Most())
}

// Nothing falls due before the end of a penalty, even if the bucket was reset or lost since the previous one, and the process of the waiter
// has not noticed.
func TestSecondPenalty(t *testing.T) {
	t.Parallel()
	const penalty = 2 * time.Second
	ctx := context.Background()
	server := redistest.Start(t)
	for what, between := range map[string]func(t *testing.T, l *tb.RateLimiter){
		"reset": func(t *testing.T, l *tb.RateLimiter) { require.NoError(t, l.Reset(ctx)) },
		"lost": func(t *testing.T, _ *tb.RateLimiter) {
			require.EqualValues(t, 1, server.Client(t).Del(ctx, "tokenbucket:{lost}").Val())
		},
	} {
		t.Run(what, func(t *testing.T) {
			open := func() *tb.RateLimiter {
				l, err := tb.NewSmoothBursty(what, 2, tb.WithMaxPermits(1), tb.WithStore(tb.NewRedisScriptStore(server.Client(t))),
					tb.WithStoreTimeout(patient))
				require.NoError(t, err)
				return l
			}
			here, there := open(), open()
			require.NoError(t, there.Penalize(ctx, penalty))
			_, err := here.State(ctx)
			require.NoError(t, err)
			time.Sleep(penalty)
			_, err = here.Reserve(ctx, 2) // more than is stored
			require.NoError(t, err)
			var reserved []*tb.Reservation
			for range 4 {
				r, err := here.Reserve(ctx, 1)
				require.NoError(t, err)
				reserved = append(reserved, r)
			}
			between(t, there)
			began := time.Now()
			require.NoError(t, there.Penalize(ctx, penalty))
			for i, r := range reserved {
				<-r.Ready()
				require.GreaterOrEqual(t, time.Since(began), penalty, "reservation %d", i)
			}
		})
	}
}
