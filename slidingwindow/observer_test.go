package slidingwindow

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// events records the events of an observer.
type events struct {
	mu        sync.Mutex
	decisions []Decision
	trips     []Trip
	health    []Health
}

func (e *events) option() Option {
	return WithObserver(Observer{
		Decision: func(_ context.Context, d Decision) {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.decisions = append(e.decisions, d)
		},
		Trip: func(t Trip) {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.trips = append(e.trips, t)
		},
		Health: func(h Health) {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.health = append(e.health, h)
		},
	})
}

// last returns the last decision; there must be one more than before.
func (e *events) last(t *testing.T, n int) Decision {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	require.Len(t, e.decisions, n)
	return e.decisions[n-1]
}

// Every call is reported once, with its decider. So is each round trip, and the beginning and the end of an outage.
func TestObserver(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var e events
		client := &bubbleRedis{way: slow(time.Millisecond)}
		l, err := New("x", 2, time.Minute, time.Second, WithRedis(client), WithFailurePolicy(FailOpen), e.option())
		require.NoError(t, err)
		_, _ = l.AllowN(ctx, 2)
		require.Equal(t, Decision{Limiter: "x", Permits: 2, Granted: true, By: ByStore, Elapsed: time.Millisecond}, e.last(t, 1))
		_, _ = l.Take(ctx, 1)
		d := e.last(t, 2)
		require.Equal(t, []any{1, false, BySnapshot}, []any{d.Permits, d.Granted, d.By})
		require.InDelta(t, time.Minute, d.Wait, float64(time.Second))
		_, _ = l.AllowN(ctx, 3)
		d = e.last(t, 3)
		require.ErrorIs(t, d.Err, ErrInvalidPermits)
		require.Equal(t, ByCheck, d.By)
		_ = l.Wait(ctx)
		d = e.last(t, 4)
		require.True(t, d.Granted)
		require.InDelta(t, time.Minute, d.Wait, float64(2*time.Second))
		synctest.Wait()
		e.mu.Lock()
		require.Equal(t, Trip{"x", 1, time.Millisecond, nil}, e.trips[0])
		require.Empty(t, e.health)
		e.trips = nil
		e.mu.Unlock()

		client.by(failing(refused))
		time.Sleep(2 * time.Minute)
		_, _ = l.Allow(ctx)
		d = e.last(t, 5)
		require.Equal(t, []any{true, ByPolicy}, []any{d.Granted, d.By})
		time.Sleep(maxPause)
		_, _ = l.Allow(ctx)
		synctest.Wait()
		client.by(nil)
		time.Sleep(2 * maxPause)
		_, _ = l.Allow(ctx)
		synctest.Wait()
		e.mu.Lock()
		defer e.mu.Unlock()
		require.Len(t, e.health, 2)
		require.ErrorIs(t, e.health[0].Err, ErrStoreUnavailable)
		require.Equal(t, []any{"x", true, FailOpen}, []any{e.health[0].Limiter, e.health[0].Down, e.health[0].Policy})
		require.Equal(t, Health{Limiter: "x", Policy: FailOpen, After: 3 * maxPause}, e.health[1])
		require.ErrorIs(t, e.trips[0].Err, ErrStoreUnavailable)
		require.NoError(t, e.trips[len(e.trips)-1].Err)
	})
}

// Without Redis there are no trips. An observer without functions has no effect.
func TestObserverOfProcess(t *testing.T) {
	var e events
	l, err := New("x", 1, time.Minute, time.Second, e.option())
	require.NoError(t, err)
	_, _ = l.Allow(ctx)
	require.Equal(t, ByStore, e.last(t, 1).By)
	_, _ = l.Allow(ctx)
	require.False(t, e.last(t, 2).Granted)
	_, _ = l.Allow(ctx)
	require.Equal(t, BySnapshot, e.last(t, 3).By, "the window is full by the last decision")
	require.Empty(t, e.trips)
	_, err = New("x", 1, time.Minute, time.Second, WithObserver(Observer{}))
	require.NoError(t, err)
	require.Equal(t, "store snapshot policy check unknown", ByStore.String()+" "+BySnapshot.String()+" "+ByPolicy.String()+" "+ByCheck.String()+" "+Decider(9).String())
	require.Equal(t, "FailClosed FailOpen LocalShare(9) LocalShare(-9)", fmt.Sprint(FailClosed, FailOpen, LocalShare(9), LocalShare(-9)))
}
