package clocks

import (
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

type clientOf = redis.UniversalClient

// longestGap is the longest time between two neighbours of from, the times in between, in any order, and to. All are
// microseconds.
func longestGap(from, to int64, at []int64) (longest time.Duration) {
	all := append(slices.Clone(at), from, to)
	slices.Sort(all)
	for i := range len(all) - 1 {
		longest = max(longest, time.Duration(all[i+1]-all[i])*time.Microsecond)
	}
	return longest
}

func TestLongestGap(t *testing.T) {
	require.Equal(t, 10*time.Microsecond, longestGap(0, 10, nil))
	require.Equal(t, 5*time.Microsecond, longestGap(0, 10, []int64{8, 3, 4}[:2]))
	require.Equal(t, 6*time.Microsecond, longestGap(0, 10, []int64{4}))
}
