package script

import (
	"context"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// A ring keeps each key on its shard if its heartbeat never removes a shard, or if it has one shard. The same holds for clients that embed a
// ring.
func TestMovesKeys(t *testing.T) {
	ring := func(heartbeat func(context.Context, *redis.Client) bool, addrs ...string) *redis.Ring {
		shards := map[string]string{}
		for _, addr := range addrs {
			shards[addr] = addr
		}
		r := redis.NewRing(&redis.RingOptions{Addrs: shards, HeartbeatFn: heartbeat})
		t.Cleanup(func() { _ = r.Close() })
		return r
	}
	pinned := func(context.Context, *redis.Client) bool { return true }
	ping := func(ctx context.Context, c *redis.Client) bool { return c.Ping(ctx).Err() == nil }
	type traced struct{ *redis.Ring }
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	t.Cleanup(func() { _ = client.Close() })
	require.True(t, MovesKeys(ring(nil, "127.0.0.1:1", "127.0.0.1:2")))
	require.True(t, MovesKeys(ring(ping, "127.0.0.1:1", "127.0.0.1:2")))
	require.True(t, MovesKeys(traced{ring(nil, "127.0.0.1:1", "127.0.0.1:2")}))
	require.True(t, MovesKeys(&traced{ring(nil, "127.0.0.1:1", "127.0.0.1:2")}))
	require.False(t, MovesKeys(ring(nil, "127.0.0.1:1")))
	require.False(t, MovesKeys(ring(pinned, "127.0.0.1:1", "127.0.0.1:2")))
	require.False(t, MovesKeys(traced{ring(pinned, "127.0.0.1:1", "127.0.0.1:2")}))
	require.False(t, MovesKeys(client))
	require.False(t, MovesKeys(nil))
}
