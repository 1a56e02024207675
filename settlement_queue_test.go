package tokenbucket

import (
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
)

// A settlement that gives permits back moves the reservations up that this process holds, and one that is not due itself needs fewer permits. The next
// grant follows behind them.
func TestSettleMovesUp(t *testing.T) {
	clock := clockwork.NewFakeClock()
	l, err := NewSmoothBursty("x", 5, WithClock(clock), WithMaxPermits(1000), WithInitialPermits(20))
	require.NoError(t, err)
	reserve := func() *Reservation {
		r, err := l.Reserve(background, 20)
		require.NoError(t, err)
		return r
	}
	due := reserve()
	all := []*Reservation{reserve(), reserve(), reserve()} // due after 4, 8 and 12 s
	for _, r := range all[1:] {
		require.NoError(t, r.Settle(background, 5))
	}
	require.Equal(t, 30.0, settles(t, l), "6 s of debt")
	all = append(all, reserve())
	require.NoError(t, due.Settle(background, 15))
	require.Equal(t, 45.0, settles(t, l), "9 s of debt")
	all = append(all, reserve())
	delays := []time.Duration{3 * time.Second, 4 * time.Second, 5 * time.Second, 9 * time.Second, 13 * time.Second}
	for i, r := range all {
		require.Equal(t, delays[i], r.Delay(), "reservation %d", i)
	}
	began := clock.Now()
	for i, r := range all {
		clock.Advance(delays[i] - clock.Since(began) - time.Millisecond)
		require.False(t, isReady(r), "reservation %d is ready too early", i)
		clock.Advance(time.Millisecond)
		<-r.Ready()
	}
	require.Zero(t, settles(t, l))
}

// Neither a charge nor a call that a shadow has let pass waits for permits, although they are not due.
func TestNobodyWaitsForWhatWasUsed(t *testing.T) {
	clock := clockwork.NewFakeClock()
	store := NewMemoryStore()
	for _, shadow := range []bool{false, true} {
		opts := []Option{WithClock(clock), WithStore(store), WithMaxPermits(1)}
		if shadow {
			opts = append(opts, WithShadow())
		}
		l, err := NewSmoothBursty("x", 5, opts...)
		require.NoError(t, err)
		if shadow {
			for range 5 {
				ok, err := l.TryAcquire(background, 1, time.Second)
				require.NoError(t, err)
				require.True(t, ok)
			}
		} else {
			r, err := l.Reserve(background, 1)
			require.NoError(t, err)
			require.NoError(t, r.Settle(background, 5))
		}
		calls, longest := l.Waiting()
		require.Zero(t, calls, "shadow %v", shadow)
		require.Zero(t, longest)
	}
}
