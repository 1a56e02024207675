package tokenbucket_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// It does not matter what time a limiter's clock shows: a caller waits, or is due, at 0 microseconds since 1970 as at any other time.
func TestClockAtZero(t *testing.T) {
	for _, start := range []time.Duration{0, -time.Second, -6 * time.Second, -5850 * time.Millisecond, 400_000 * time.Hour} {
		t.Run(start.String(), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				clock := clockwork.NewFakeClockAt(time.Unix(0, 0).Add(start))
				began := clock.Now()
				l, err := tb.NewSmoothBursty("x", 1, tb.WithClock(clock), tb.WithInitialPermits(0))
				require.NoError(t, err)
				_, err = l.Reserve(ctx, 5)
				require.NoError(t, err)
				var waited, passed time.Duration
				done := make(chan struct{})
				go func() {
					defer close(done)
					waited, err = l.Acquire(ctx, 1)
					passed = clock.Since(began)
				}()
				synctest.Wait() // it waits
				for clock.Since(began) < 8*time.Second {
					clock.Advance(50 * time.Millisecond)
					synctest.Wait()
					select {
					case <-done:
						require.NoError(t, err)
						require.Equal(t, 6*time.Second, waited)
						require.Equal(t, 6*time.Second, passed)
						return
					default:
					}
				}
				t.Fatal("it still waits after 8 s")
			})
		})
	}
}
