package tokenbucket

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The figure of LocalShare's comment: each local bucket saves up a permit, however small its share. So n instances that were idle let n
// calls go at once, where the quota's own bucket would let one go; from then on, they keep to the rate.
func TestLocalSharesOfASmallQuota(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const n = 10
		var limiters []*RateLimiter
		for range n {
			s := &sick{}
			l, err := NewQuota("x", 5, time.Second, 0, WithStore(s), WithFailurePolicy(LocalShare(n)), Logged(t))
			require.NoError(t, err)
			s.away(t, l, true)
			limiters = append(limiters, l)
		}
		grants := func() (granted int) {
			for _, l := range limiters {
				ok, err := l.TryAcquire(background, 1, 0)
				require.NoError(t, err)
				if ok {
					granted++
				}
			}
			return granted
		}
		require.Zero(t, grants(), "they begin empty")
		time.Sleep(time.Minute) // idle
		require.Equal(t, n, grants(), "at once")
		granted := 0
		for range 1000 {
			time.Sleep(10 * time.Millisecond)
			granted += grants()
		}
		require.LessOrEqual(t, granted, 5*10)
		require.GreaterOrEqual(t, granted, 4*10)
	})
}
