package slidingwindow

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// One key is one slot: a cluster is as good.
func TestCluster(t *testing.T) {
	cluster := redistest.StartCluster(t)
	client := cluster.Client(t)
	l, err := slidingwindow.NewKey(math.MaxUint64, 3, time.Hour, time.Minute, slidingwindow.WithRedis(client), patient)
	require.NoError(t, err)
	n := 0
	for range 5 {
		ok, err := l.Allow(ctx)
		require.NoError(t, err)
		if ok {
			n++
		}
	}
	require.Equal(t, 3, n)
	require.Equal(t, "18446744073709551615", l.Name())
	require.NotEmpty(t, client.Get(ctx, "slidingwindow:key:{ffffffffffffffff}:1h0m0s").Val())
	moved := 0
	for _, node := range cluster.Nodes { // of which one at most has the key
		alone, err := slidingwindow.NewKey(math.MaxUint64, 5, time.Hour, time.Minute, slidingwindow.WithRedis(node.Client(t)), patient, slidingwindow.WithFailurePolicy(slidingwindow.FailOpen))
		require.NoError(t, err)
		if _, err = alone.Allow(ctx); err != nil {
			require.ErrorIs(t, err, slidingwindow.ErrStoreUnusable)
			require.ErrorContains(t, err, "MOVED")
			moved++
		}
	}
	require.Equal(t, len(cluster.Nodes)-1, moved)
}
