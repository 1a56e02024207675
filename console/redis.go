package console

import (
	"context"
	"errors"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// redisSource is a fleet's Reader that also shows buckets.
type redisSource struct {
	*fleet.Reader
	client fleet.Client
	prefix string
}

// NewRedisSource returns a Source of what the instances publish through a Redis, and of its buckets. The prefix is that of the limiters'
// keys; tokenbucket: by default.
func NewRedisSource(client fleet.Client, keyPrefix string) Source {
	return &redisSource{fleet.NewReader(client, fleet.WithKeyPrefix(keyPrefix)), client, keyPrefix}
}

// Bucket implements Buckets: the words of the state, as redis-cli get shows them.
func (s *redisSource) Bucket(ctx context.Context, name string) (key string, fields [][2]string, err error) {
	key = s.prefix + "{" + name + "}"
	get := redis.NewStringCmd(ctx, "get", key)
	if err := s.client.Process(ctx, get); err != nil {
		if errors.Is(err, redis.Nil) {
			return key, nil, nil
		}
		return key, nil, err
	}
	var configuration []string
	for i, word := range strings.Fields(get.Val()) {
		field, value, named := strings.Cut(word, "=")
		switch {
		case named:
			fields = append(fields, [2]string{field, strings.TrimSuffix(value, ":")})
		case i == 0:
			fields = append(fields, [2]string{"format", word})
		default:
			configuration = append(configuration, word)
		}
	}
	return key, append(fields, [2]string{"configuration", strings.Join(configuration, " ")}), nil
}
