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
