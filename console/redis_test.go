package console_test

import (
	"context"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
)

// keys is a Redis of texts that answers GET and GETRANGE.
type keys map[string]string

func (k keys) Process(_ context.Context, cmd redis.Cmder) error {
	get := cmd.(*redis.StringCmd)
	value, there := k[get.Args()[1].(string)]
	switch {
	case cmd.Name() == "getrange":
		value = value[:min(len(value), get.Args()[3].(int)+1)]
	case !there:
		return redis.Nil
	}
	get.SetVal(value)
	return nil
}

// A bucket is shown by its fields; of something large in its place, only the beginning.
func TestBucketInRedis(t *testing.T) {
	source := console.NewRedisSource(keys{"tb:{a}": "v1 rate=5: stored=2 bursty", "tb:{two%20words}": "v1 rate=5: stored=2 bursty", "tb:{large}": strings.Repeat("x=1 ", 1<<20)}, "tb:").(console.Buckets)
	key, fields, err := source.Bucket(t.Context(), "a")
	require.NoError(t, err)
	require.Equal(t, "tb:{a}", key)
	require.Equal(t, [][2]string{{"format", "v1"}, {"rate", "5"}, {"stored", "2"}, {"configuration", "bursty"}}, fields)
	key, named, err := source.Bucket(t.Context(), "two words")
	require.NoError(t, err)
	require.Equal(t, "tb:{two%20words}", key, "as the stores encode it")
	require.Equal(t, fields, named)
	_, fields, err = source.Bucket(t.Context(), "large")
	require.NoError(t, err)
	require.Less(t, len(fields), 5000)
	_, fields, err = source.Bucket(t.Context(), "none")
	require.NoError(t, err)
	require.Empty(t, fields)
}
