package slidingwindow_test

import (
	"context"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// Windows work on miniredis, with which many users test: processes share a limit, a refund, a limit that was set, and the passing of time.
func TestMiniredis(t *testing.T) {
	server := miniredis.RunT(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer func() { _ = client.Close() }()
	ctx := context.Background()
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	server.SetTime(now)
	open := func() *slidingwindow.Limiter {
		l, err := slidingwindow.New("x", 3, time.Hour, time.Minute, slidingwindow.WithRedis(client))
		require.NoError(t, err)
		return l
	}
	a := open()
	taken, err := a.Take(ctx, 2)
	require.NoError(t, err)
	require.True(t, taken.Allowed)
	ask := func(n int, want bool) { // each time a process that knows nothing yet
		t.Helper()
		ok, err := open().AllowN(ctx, n)
		require.NoError(t, err)
		require.Equal(t, want, ok)
	}
	ask(2, false)
	ask(1, true)
	require.NoError(t, a.Refund(ctx, taken, 1))
	ask(2, false)
	ask(1, true)
	require.NoError(t, a.SetLimit(ctx, 5))
	ask(3, false)
	ask(2, true)
	server.SetTime(now.Add(2 * time.Hour))
	ask(5, true)
}
