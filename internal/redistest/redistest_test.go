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
	if err := flag.Set("test.parallel", "16"); err != nil { // the tests mostly wait, so few processors suffice
		panic(err)
	}
	Main(m)
}

// Main keeps the log of limiters without a logger, and does not print it for tests that pass.
func TestDefaultLogIsKept(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	require.IsType(t, &slog.TextHandler{}, before.Handler(), "Main replaces the logger")
	log := keepLog()
	slog.Warn("an outage of the store has begun")
	require.Contains(t, log.String(), "an outage of the store has begun")
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
	require.NoError(t, b.Stop()) // the cleanup must end a stopped server, too
}
