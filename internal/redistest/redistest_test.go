package redistest

import (
	"context"
	"flag"
	"log/slog"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "16"); err != nil { // the tests wait most of the time, however few processors there are
		panic(err)
	}
	Main(m)
}

// What a limiter without a logger says is kept, not printed: a test that passes is quiet on a busy machine too.
func TestDefaultLogIsKept(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	require.IsType(t, &slog.TextHandler{}, before.Handler(), "Main keeps it")
	log := keepLog()
	slog.Warn("the store is away")
	require.Contains(t, log.String(), "the store is away")
}

func TestServers(t *testing.T) {
	a, b := Start(t), Start(t)
	require.NotEqual(t, a.Addr, b.Addr)
	require.NoError(t, a.Client(t).Ping(context.Background()).Err())

	impatient := a.Client(t, func(o *redis.Options) { o.ReadTimeout, o.MaxRetries = 100*time.Millisecond, -1 })
	require.NoError(t, Poll(20*time.Second, func() error { return impatient.Ping(context.Background()).Err() }))
	require.NoError(t, a.Stop())
	require.Error(t, impatient.Ping(context.Background()).Err())
	require.NoError(t, a.Continue())
	require.NoError(t, a.Client(t).Ping(context.Background()).Err())
	require.NoError(t, b.Stop()) // and the cleanup copes with it
}
