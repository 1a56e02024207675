package semaphore_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/semaphoretest"
)

func TestRedisBackend(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	semaphoretest.Backend(t, func(t *testing.T) semaphoretest.Place {
		name := fmt.Sprint("backend ", names.Add(1), time.Now().UnixNano())
		return semaphoretest.Place{
			Process: func() semaphore.Backend {
				s, err := semaphore.NewRedis(client, name, 1)
				require.NoError(t, err)
				return semaphore.BackendOf(s)
			},
			SetBack: func(t *testing.T, d time.Duration) {
				setBackRedis(t, client, "semaphore:{"+strings.ReplaceAll(name, " ", "%20")+"}:", d.Microseconds())
			},
		}
	})
}

// setBackRedis moves the times stored as if the clock had been set back.
func setBackRedis(t *testing.T, client *redis.Client, key string, micros int64) {
	require.EqualValues(t, 1, client.Exists(ctx, key+"state").Val(), "%s", key)
	require.NoError(t, client.HIncrBy(ctx, key+"state", "seen", micros).Err())
	for _, id := range client.ZRange(ctx, key+"held", 0, -1).Val() {
		require.NoError(t, client.ZIncrBy(ctx, key+"held", float64(micros), id).Err())
	}
	for process, text := range client.HGetAll(ctx, key+"procs").Val() {
		until, told, _ := strings.Cut(text, " ")
		at, err := strconv.ParseInt(until, 10, 64)
		require.NoError(t, err)
		require.NoError(t, client.HSet(ctx, key+"procs", process, fmt.Sprint(at+micros, " ", told)).Err())
	}
}
