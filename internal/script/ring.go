package script

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/redis/go-redis/v9"
)

// ring is *redis.Ring, or a client that embeds one.
type ring interface {
	Options() *redis.RingOptions
	GetShardClientForKey(key string) (*redis.Client, error)
}

// Texts for the error of a constructor that rejects a client because of MovesKeys.
const (
	MovingRing = "a ring that moves the keys of a shard which does not answer"
	PinnedRing = "RingOptions.HeartbeatFn: func(context.Context, *redis.Client) bool { return true }, " +
		"so that each key stays on its shard, for all processes the same"
)

// MovesKeys reports whether a client is a ring that removes a shard when its heartbeats fail. go-redis then sends the keys of that shard to
// the others. So a process that cannot reach the shard would use other buckets than the rest of the fleet, without an error. A ring of one
// shard moves no keys.
//
// Functions cannot be compared, so MovesKeys calls the ring's heartbeat with a shard that does not reply.
func MovesKeys(client any) bool {
	r, ok := client.(ring)
	if !ok || len(r.Options().Addrs) < 2 {
		return false
	}
	dead := redis.NewClient(&redis.Options{
		Addr: "dead", MaxRetries: -1, DialerRetries: 1, DisableIdentity: true,
		Dialer: func(context.Context, string, string) (net.Conn, error) { return nil, errDead },
	})
	dead.AddHook(deadShard{})
	defer func() { _ = dead.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	return !r.Options().HeartbeatFn(ctx, dead)
}

var errDead = errors.New("no such shard")

// deadShard is a hook that fails all commands before a connection is attempted, because go-redis logs each failed attempt.
type deadShard struct{}

// DialHook implements redis.Hook.
func (deadShard) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements redis.Hook.
func (deadShard) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		cmd.SetErr(errDead)
		return errDead
	}
}

// ProcessPipelineHook implements redis.Hook.
func (deadShard) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(_ context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			cmd.SetErr(errDead)
		}
		return errDead
	}
}
