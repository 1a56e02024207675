package killswitch

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/redis/go-redis/v9"
)

// RedisClient is the method of a client that a Redis switch needs. All clients of go-redis have it.
type RedisClient interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// NewRedis returns a switch of the whole fleet under one key in Redis. The values 1, on and true turn it on, 0, off and false turn it
// off, in upper or lower case. Set writes 1 or 0, without expiry. A missing key means on: limits apply. Any other value is an error, and the
// last known state stays in force. A read is one GET.
func NewRedis(client RedisClient, key string, opts ...Option) (*Switch, error) {
	if v := reflect.ValueOf(client); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, bad("redis client", "nil", "a client")
	}
	if len(key) < 1 || len(key) > 512 {
		return nil, bad("key", fmt.Sprintf("%.40q of %d bytes", key, len(key)), "1 to 512 bytes")
	}
	read := func(ctx context.Context) (bool, error) {
		cmd := redis.NewStringCmd(ctx, "get", key)
		_ = client.Process(ctx, cmd) // its error is the command's
		value, err := cmd.Result()
		if errors.Is(err, redis.Nil) {
			return true, nil
		}
		if err != nil {
			return false, fmt.Errorf("key %q: %w", key, err)
		}
		switch strings.ToLower(value) {
		case "1", "on", "true":
			return true, nil
		case "0", "off", "false":
			return false, nil
		}
		return false, fmt.Errorf("key %q: value %.40q: want 1 or 0", key, value)
	}
	write := func(ctx context.Context, on bool) error {
		value := "0"
		if on {
			value = "1"
		}
		cmd := redis.NewStatusCmd(ctx, "set", key, value)
		_ = client.Process(ctx, cmd)
		if err := cmd.Err(); err != nil {
			return fmt.Errorf("key %q: %w", key, err)
		}
		return nil
	}
	// The caller's options come last, so they may replace write.
	return New(read, append([]Option{WithWrite(write)}, opts...)...)
}
