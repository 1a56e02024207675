package tokenbucket

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/assert"
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

// Permits that another process gives back move a reservation up with the next grant, also if that is due before all of what is owned here. So a
// cancel gives back the latest time, and none is lost.
func TestWhatAnotherSettlesIsNotLost(t *testing.T) {
	for _, less := range []int{2, 4} {
		bubble(t, func(t *testing.T) {
			memory := NewMemoryStore()
			open := func() *RateLimiter { // in a process of its own
				l, err := NewSmoothBursty("x", 10, WithStore(&distant{Store: memory}), WithMaxPermits(1000), WithInitialPermits(4))
				require.NoError(t, err)
				return l
			}
			reserve := func(l *RateLimiter, n int) *Reservation {
				r, err := l.Reserve(background, n)
				require.NoError(t, err)
				return r
			}
			there, here := open(), open()
			due := reserve(there, 4)
			reserve(there, 3) // due after 300 ms
			first := reserve(here, 1)
			require.Equal(t, 400*time.Millisecond, first.Delay())
			require.NoError(t, due.Settle(background, 4-less))
			second := reserve(here, 1)
			owed := time.Duration(4-less) * 100 * time.Millisecond // without the second
			require.Equal(t, owed, first.Delay())
			require.Equal(t, owed+100*time.Millisecond, second.Delay())
			require.NoError(t, first.Cancel(background))
			if less == 2 { // the first was not due
				require.Equal(t, owed, second.Delay())
				require.Equal(t, 2.0, settles(t, here), "200 ms of debt")
			}
		})
	}
}

// Permits that a settlement gives back move up the callers that wait for permits of a former rate, or of before a penalty. They serve no later caller
// before these. Permits of a former rate that was higher lie closer together, so more would be due than were given back: they keep their due times.
func TestSettlementsKeepTheOrder(t *testing.T) {
	for name, change := range map[string]struct {
		held time.Duration
		rate float64
	}{
		"nothing":       {},
		"a higher rate": {rate: 20},
		"a lower rate":  {rate: 5},
		"a penalty":     {held: 200 * time.Millisecond},
		"both":          {200 * time.Millisecond, 20},
	} {
		for _, there := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, settled there: %v", name, there), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					memory := NewMemoryStore()
					open := func() *RateLimiter { // in a process of its own
						l, err := NewSmoothBursty("x", 10, WithStore(&distant{Store: memory}), WithMaxPermits(1000), WithInitialPermits(4))
						require.NoError(t, err)
						return l
					}
					l := open()
					from := l
					if there {
						from = open()
					}
					due, err := from.Reserve(background, 4)
					require.NoError(t, err)
					began := time.Now()
					var served [16]time.Duration
					var calls sync.WaitGroup
					line := func(from int) {
						for i := range 8 {
							calls.Go(func() {
								_, err := l.Acquire(context.Background(), 1)
								assert.NoError(t, err)
								served[from+i] = time.Since(began)
							})
							synctest.Wait()
						}
					}
					line(0)
					time.Sleep(50 * time.Millisecond)
					if change.held > 0 {
						require.NoError(t, l.Penalize(background, change.held))
					}
					if change.rate > 0 {
						require.NoError(t, l.SetRate(background, change.rate))
					}
					require.NoError(t, due.Settle(background, 0))
					line(8)
					calls.Wait()
					if change.rate == 5 {
						for i := range 7 { // the last one waits beyond the look-ahead
							require.Equal(t, time.Duration(i+1)*100*time.Millisecond, served[i])
						}
						return
					}
					require.IsNonDecreasing(t, served[:])
					require.Less(t, served[7], 800*time.Millisecond+change.held)
				})
			})
		}
	}
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
