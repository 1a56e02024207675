package semaphore_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/semaphoretest"
)

// Semaphores work on miniredis, with which many users test: it has no Lua library struct.
func TestMiniredis(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: miniredis.RunT(t).Addr()})
	defer func() { _ = client.Close() }()
	var names atomic.Int64
	semaphoretest.Semaphore(t, func(t *testing.T, permits int, opts ...semaphore.Option) func() *semaphore.Semaphore {
		name := fmt.Sprint(names.Add(1))
		return func() *semaphore.Semaphore {
			s, err := semaphore.NewRedis(client, name, permits, opts...)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, s.Close(context.Background())) })
			return s
		}
	})
	ctx := context.Background()
	for _, key := range client.Keys(ctx, "*:state").Val() {
		require.False(t, client.HExists(ctx, key, "quiet").Val(), "%s", key)
		require.True(t, strings.HasPrefix(client.HGet(ctx, key, "permits").Val(), "3 "), "%s", key)
	}
}
