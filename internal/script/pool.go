package script

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"
)

// Server has the methods by which the client of a single server is recognised. A struct that embeds such a client has them as well.
type Server interface {
	Options() *redis.Options
	PoolStats() *redis.PoolStats
}

// Clients of several servers, which can name the server of a key.
type (
	// Cluster is the client of a cluster.
	Cluster interface {
		Options() *redis.ClusterOptions
		MasterForKey(ctx context.Context, key string) (*redis.Client, error)
	}
	// Shards is the client of a ring.
	Shards interface {
		Options() *redis.RingOptions
		GetShardClientForKey(key string) (*redis.Client, error)
	}
)

// ServerOf returns the client of the server that has a key, or nil if the server is unknown.
func ServerOf(ctx context.Context, client Client, key string) Server {
	var node *redis.Client
	var err error
	switch c := client.(type) {
	case Server:
		return c
	case Cluster:
		node, err = c.MasterForKey(ctx, key)
	case Shards:
		node, err = c.GetShardClientForKey(key)
	}
	if node == nil || err != nil {
		return nil
	}
	return node
}

// Ended is a cancelled context. With it a cluster's client looks a key up in the map that it has, without a round trip.
var Ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// PoolUsedUp reports whether all connections to the server that has a key are in use.
func PoolUsedUp(client Client, key string) bool {
	server := ServerOf(Ended, client, key)
	if server == nil {
		return false
	}
	stats := server.PoolStats()
	return stats.IdleConns == 0 && int(stats.TotalConns) >= server.Options().PoolSize
}

// Starved reports whether a command failed with err because it got no connection, although the server replies on one beside the pool. If the
// context of the command ended before the client's PoolTimeout, the client reports only the context's error, so the pool is examined as well.
func Starved(ctx context.Context, client Client, key string, err error) bool {
	starved := errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted)
	if server := ServerOf(Ended, client, key); server != nil && (starved || errors.Is(err, context.DeadlineExceeded) && PoolUsedUp(client, key)) {
		beside := Apart(server.Options())
		defer func() { _ = beside.Close() }()
		return beside.Ping(ctx).Err() == nil
	}
	return false
}
