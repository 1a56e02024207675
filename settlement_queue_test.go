package tokenbucket

import (
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
)

// A settlement that gives permits back changes no due time of this process's other reservations, and neither do the grants after it. Without
// internal/schedule.Overlaps, the reservation of 20 permits that comes last would go first, and the one due in 4 s would wait until 10 s.
func TestSettleKeepsDueTimes(t *testing.T) {
	clock := clockwork.NewFakeClock()
	l, err := NewSmoothBursty("x", 5, WithClock(clock), WithMaxPermits(1000), WithInitialPermits(0))
	require.NoError(t, err)
	reserve := func() *Reservation {
		r, err := l.Reserve(background, 20)
		require.NoError(t, err)
		return r
	}
	all := []*Reservation{reserve(), reserve(), reserve()}
	for _, r := range all[1:] {
		require.NoError(t, r.Settle(background, 5))
	}
	require.Equal(t, 30.0, settles(t, l), "6 s of debt")
	all = append(all, reserve())
	due := []time.Duration{4 * time.Second, 8 * time.Second, 12 * time.Second, 10 * time.Second}
	for i, r := range all {
		require.Equal(t, due[i], r.Delay(), "reservation %d", i)
	}
	began := clock.Now()
	for _, i := range []int{0, 1, 3, 2} {
		clock.Advance(due[i] - clock.Since(began) - time.Millisecond)
		select {
		case <-all[i].Ready():
			t.Fatalf("reservation %d is ready too early", i)
		default:
		}
		clock.Advance(time.Millisecond)
		<-all[i].Ready()
	}
	require.Zero(t, settles(t, l)+5*2, "the bucket has stored what the rate has made since: 12 s less 10 s of debt")
}
