package tokenbucket_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// A request that overflows every member of a choice is an error, as it is of a single limiter, and not a nil limiter without one.
func TestChoiceOverflows(t *testing.T) {
	for name, open := range groupStores(t) {
		t.Run(name, func(t *testing.T) {
			s := tb.WithStore(open())
			c, err := tb.Any(limiter(t, "a", 1e-6, s), limiter(t, "b", 2e-6, s))
			require.NoError(t, err)
			stop, cancel := context.WithCancel(ctx)
			defer cancel()
			time.AfterFunc(20*time.Second, cancel)
			_, _, err = c.Acquire(stop, 1e9)
			require.ErrorIs(t, err, tb.ErrInvalidPermits)
		})
	}
}

// A request that no member of a choice could ever grant in time is an error at its first call, too, and with the members whose switch is off aside. If
// one member could grant it, it is only refused.
func TestChoiceNeverGrants(t *testing.T) {
	for name, open := range groupStores(t) {
		t.Run(name, func(t *testing.T) {
			s, burst := tb.WithStore(open()), tb.WithMaxPermits(1)
			a, b := limiter(t, "a", 1, s, burst), limiter(t, "b", 2, s, burst)
			c, err := tb.Any(a, b)
			require.NoError(t, err)
			for range 2 {
				_, err = c.TryAcquire(ctx, 5, time.Second)
				require.ErrorIs(t, err, tb.ErrNeverGranted)
				var wait *tb.WaitError
				require.ErrorAs(t, err, &wait)
				require.Positive(t, wait.Wait)
			}
			c, err = tb.Any(a, tb.Weighted(b, 1), limiter(t, "c", 10, s, tb.WithMaxPermits(10)))
			require.NoError(t, err)
			for range 2 {
				by, err := c.TryAcquire(ctx, 10, 0)
				require.NoError(t, err)
				if by != nil {
					require.Equal(t, "c", by.Name())
				}
			}
		})
	}
}
