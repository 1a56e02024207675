package console

import (
	"context"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// redisSource is a fleet.Reader that also shows buckets.
type redisSource struct {
	*fleet.Reader
	client fleet.Client
	prefix string
}

// NewRedisSource returns a Source that reads what the instances publish through a Redis, and its buckets. The prefix is that
// of the limiters' keys, by default "tokenbucket:".
func NewRedisSource(client fleet.Client, keyPrefix string) Source {
	return &redisSource{fleet.NewReader(client, fleet.WithKeyPrefix(keyPrefix)), client, keyPrefix}
}

// mostBucket exceeds the size of any bucket. A foreign value under the key may be of any length.
const mostBucket = 16 << 10

// Bucket implements Buckets: it returns the fields of the state as redis-cli get shows them.
func (s *redisSource) Bucket(ctx context.Context, name string) (key string, fields [][2]string, err error) {
	key = tokenbucket.RedisKey(s.prefix, name)
	get := redis.NewStringCmd(ctx, "getrange", key, 0, mostBucket-1)
	if err := s.client.Process(ctx, get); err != nil || get.Val() == "" {
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
