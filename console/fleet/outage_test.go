package fleet

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// beaten is an instance with a limit whose five calls Redis knows of.
func beaten(t *testing.T) (*redistest.Server, *world, *stub, *Publisher) {
	server := redistest.Start(t)
	w, a := newWorld(t, server), newStub("/a")
	p := w.publisher(a)
	a.count("/a", 5, 0)
	w.beat(p)
	return server, w, a, p
}

// An instance that was away for longer than a minute does not put all of it into one minute; what it counts is right all the same.
func TestLongGap(t *testing.T) {
	t.Parallel()
	server, w, a, p := beaten(t)
	require.NoError(t, server.Kill())
	for range 10 { // 110 s, of which the first 66 are a gap
		a.count("/a", 100, 0)
		w.clock.move(11 * time.Second)
		require.Error(t, p.beat(background, false))
	}
	require.NoError(t, server.Restart())
	require.NoError(t, redistest.Poll(30*time.Second, func() error { return p.beat(background, false) }))
	require.Equal(t, int64(1005), w.snapshot().Total("/a").Granted)
	require.Equal(t, int64(400), w.history("/a").Granted, "of the last seconds")
	missed := w.publish(p).Missed
	require.InDelta(t, 66*time.Second, missed.Gap, float64(5*time.Second))
	require.GreaterOrEqual(t, missed.Beats, int64(10))
	require.NotEmpty(t, missed.Err)
}

// In a short outage of Redis only points are missing, and no call waits.
func TestShortOutage(t *testing.T) {
	t.Parallel()
	server, w, a, p := beaten(t)
	require.NoError(t, server.Stop())
	hung := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(background, 100*time.Millisecond)
		defer cancel()
		hung <- p.beat(ctx, false)
	}()
	require.Error(t, <-hung)
	require.NoError(t, server.Continue())
	a.count("/a", 7, 0)
	require.NoError(t, redistest.Poll(30*time.Second, func() error { return p.beat(background, false) }))
	require.Equal(t, int64(12), w.history("/a").Granted)
}
