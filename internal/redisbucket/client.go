package redisbucket

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// besides sends the commands of an AutoPipeliner past its queues. In a queue a command would wait for commands to other servers, even dead
// ones. The engine has combined its requests already.
type besides struct{ *redis.AutoPipeliner }

// Process implements Client.
func (c besides) Process(ctx context.Context, cmd redis.Cmder) error {
	pipe := c.Pipeline()
	if err := pipe.Process(ctx, cmd); err != nil {
		return err
	}
	_, err := pipe.Exec(ctx)
	return err
}

// examine determines the kind of the client. The error is non-nil if the client cannot work; the limiter returns it as ErrInvalidConfig.
func (s *Store) examine() error {
	if err := script.Usable(s.client); err != nil {
		return fmt.Errorf("redis client %w: want a client", err)
	}
	switch c := s.client.(type) {
	case *redis.AutoPipeliner:
		s.client = besides{c}
	case script.Server: // all of its buckets share its outages; those of other clients are noticed bucket by bucket
		s.oneServer, s.readTimeout = true, c.Options().ReadTimeout
	case script.Cluster:
		s.readTimeout = c.Options().ReadTimeout
	case script.Shards:
		if script.MovesKeys(c) {
			return fmt.Errorf("redis client %s: want %s", script.MovingRing, script.PinnedRing)
		}
		s.readTimeout = c.Options().ReadTimeout
	}
	return nil
}

// Used logs a warning, once, if the client's ReadTimeout is shorter than a store timeout: slower replies would be lost, but their permits
// would be taken.
func (s *Store) Used(timeout time.Duration) {
	if 0 < s.readTimeout && s.readTimeout < timeout && !s.warned.Swap(true) {
		s.logger.Get().Warn("tokenbucket: the client's ReadTimeout is shorter than the store timeout, so slower replies are lost; "+
			"raise the one, or lower the other (WithStoreTimeout)", "ReadTimeout", s.readTimeout, "store timeout", timeout)
	}
}

// serverOf returns the client of the server that has a key, or nil if the server is unknown.
func (s *Store) serverOf(ctx context.Context, key string) script.Server {
	return script.ServerOf(ctx, s.client, key)
}

// poolUsedUp reports whether all connections to the server that has a key are in use.
func (s *Store) poolUsedUp(key string) bool { return script.PoolUsedUp(s.client, key) }

// Busy returns an ErrPoolExhausted if no command can be sent because this process uses all connections.
func (s *Store) Busy(key string) error {
	bucket, _ := s.Keys(key)
	if s.poolUsedUp(bucket) {
		return fmt.Errorf("%w: key %q", permit.ErrPoolExhausted, bucket)
	}
	return nil
}

// poolError returns an ErrPoolExhausted if a command failed because it got no connection, else err. If the context ends before the client's
// PoolTimeout, the client reports only the context's error, so the pool is examined as well. The error of a missing password names it.
func (s *Store) poolError(key string, err error) error {
	err = script.Unauthenticated(err)
	switch {
	case err == nil, errors.Is(err, permit.ErrPoolExhausted):
		return err
	case errors.Is(err, redis.ErrPoolTimeout), errors.Is(err, redis.ErrPoolExhausted):
	case errors.Is(err, context.DeadlineExceeded) && s.poolUsedUp(key):
	default:
		return err
	}
	return fmt.Errorf("%w: key %q: %w", permit.ErrPoolExhausted, key, err)
}

// Probe checks whether the store can serve a bucket, by a write in the bucket's slot: a replica, a full server or one without enough replicas
// refuses it as it would refuse the bucket's.
//
// If the pool has no free connection, Probe opens one of its own. If the server answers there, the error is ErrPoolExhausted. A pool can be
// exhausted without any connection, by attempts to connect to a server that cannot be reached.
func (s *Store) Probe(ctx context.Context, key string) error {
	bucket, _ := s.Keys(key)
	write := func(client Client) error {
		cmd := redis.NewCmd(ctx, "set", bucket+":probe", "", "px", 1000)
		err := client.Process(ctx, script.Once{Cmd: cmd})
		if err == nil {
			err = cmd.Err()
		}
		return err
	}
	exhausted := fmt.Errorf("%w: key %q", permit.ErrPoolExhausted, bucket)
	if !s.poolUsedUp(bucket) {
		err := s.poolError(bucket, write(s.bounded))
		if !errors.Is(err, permit.ErrPoolExhausted) {
			if _, ring := s.client.(script.Shards); !ring && !s.oneServer && !script.Lasting(err) && script.Away(err) {
				script.Locate(s.client, bucket)
			}
			return script.ShardsError(ctx, s.client, err)
		}
		exhausted = err
	}
	server := s.serverOf(script.Ended, bucket)
	if server == nil {
		return exhausted
	}
	apart := script.Apart(server.Options())
	defer func() { _ = apart.Close() }()
	if err := write(apart); err != nil {
		return err
	}
	return exhausted
}
