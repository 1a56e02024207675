package redistest

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { Main(m) }

func TestServers(t *testing.T) {
	a, b := Start(t), Start(t)
	require.NotEqual(t, a.Addr, b.Addr)
	require.NoError(t, a.Client(t).Ping(context.Background()).Err())

	impatient := a.Client(t, func(o *redis.Options) { o.ReadTimeout, o.MaxRetries = 100*time.Millisecond, -1 })
	require.NoError(t, impatient.Ping(context.Background()).Err())
	require.NoError(t, a.Stop())
	require.Error(t, impatient.Ping(context.Background()).Err())
	require.NoError(t, a.Continue())
	require.NoError(t, a.Client(t).Ping(context.Background()).Err())
	require.NoError(t, b.Stop()) // and the cleanup copes with it
}

func TestCluster(t *testing.T) {
	c := StartCluster(t)
	require.Len(t, c.Nodes, 6)
	require.NoError(t, c.Client(t).Set(context.Background(), "key", "value", time.Minute).Err())
}
