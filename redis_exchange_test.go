package tokenbucket

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// lockedRedis is a client of a server on which another process holds every lock until a time.
type lockedRedis struct {
	redis.Scripter
	until time.Time
}

func (c *lockedRedis) Process(_ context.Context, cmd redis.Cmder) error {
	call, ok := cmd.(script.Call)
	if !ok { // the question whether the server evicts buckets
		return cmd.Err()
	}
	switch args := cmd.Args(); {
	case time.Now().Before(c.until):
		call.SetVal([]string{"locked", "100"})
	case *args[3+2+2].(*string) == "":
		call.SetVal([]string{"read", *args[3+2].(*string), ""})
	default:
		call.SetVal([]string{"done"})
	}
	return cmd.Err()
}

// By the local clock a batch of another's making is decided at the time at which the lock is free, not at that at which it was asked for:
// the bucket would take a time so old for a clock that was set back.
func TestExchangeLocalTime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		free := time.Now().Add(5 * time.Second)
		s := NewRedisStore(&lockedRedis{until: free}, WithLocalTime())
		ctx, cancel := context.WithTimeout(background, time.Minute)
		defer cancel()
		decided := int64(0)
		require.NoError(t, s.Apply(ctx, &Batch{Names: []string{"x"}, Decide: func(now int64, _ [][]byte) ([][]byte, time.Duration, error) {
			decided = now
			return [][]byte{[]byte("state")}, time.Minute, nil
		}}))
		require.GreaterOrEqual(t, decided, free.UnixMicro())
	})
}
