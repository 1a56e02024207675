package tokenbucket_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// A group refuses at once what cannot be due within the timeout, however long that is: a member owes more than its look-ahead.
func TestGroupRefusesAtOnce(t *testing.T) {
	for _, s := range stores {
		t.Run(s.name, func(t *testing.T) {
			open := s.open(t)
			free, err := tb.NewSmoothBursty("free", 100, tb.WithStore(open(false)))
			require.NoError(t, err)
			owes := func(name string) *tb.RateLimiter {
				l, err := tb.NewSmoothBursty(name, 5, tb.WithStore(open(false)))
				require.NoError(t, err)
				other, err := tb.NewSmoothBursty(name, 5, tb.WithStore(open(false)))
				require.NoError(t, err)
				_, err = other.Reserve(ctx, 1000)
				require.NoError(t, err)
				return l
			}
			all, err := tb.All(free, owes("a"))
			require.NoError(t, err)
			any, err := tb.Any(owes("b"), owes("c"))
			require.NoError(t, err)
			began := time.Now()
			ok, err := all.TryAcquire(ctx, 1, 30*time.Second)
			require.NoError(t, err)
			require.False(t, ok)
			by, err := any.TryAcquire(ctx, 1, 30*time.Second)
			require.NoError(t, err)
			require.Nil(t, by)
			require.Less(t, time.Since(began), 10*time.Second)
		})
	}
}
