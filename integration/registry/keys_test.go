package registry

import (
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A client that makes up keys does not fill a Redis of 8 MB that evicts nothing: the limits of all others go on.
func TestMadeUpKeysFillNoRedis(t *testing.T) {
	server := redistest.Start(t, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
	client := redis.NewClient(&redis.Options{Addr: server.Addr})
	t.Cleanup(func() { _ = client.Close() })
	limits, err := registry.New(registry.Static{{Name: "*", Rate: 1000, PerKey: true}, {Name: "acme", Rate: 1000}}, tokenbucket.NewRedisScriptStore(client),
		registry.WithLogger(slog.New(slog.DiscardHandler)), registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(20*time.Second)))
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	const callers, calls = 100, 300
	var calling sync.WaitGroup
	for caller := range callers {
		calling.Go(func() {
			for i := range calls {
				if _, err := limits.Enter(t.Context(), fmt.Sprintf("made-up-tenant-%d-%d", caller, i)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	calling.Wait()
	_, err = limits.Enter(t.Context(), "acme")
	require.NoError(t, err)
	keys, err := client.DBSize(t.Context()).Result()
	require.NoError(t, err)
	require.LessOrEqual(t, keys, int64(10_002))
	require.Equal(t, callers*calls-10_000, limits.Stats().Shared)
	t.Logf("%d keys", keys)
	for range 100 {
		key := client.RandomKey(t.Context()).Val()
		if left := client.PTTL(t.Context(), key).Val(); key != "tokenbucket:{acme}" {
			require.LessOrEqual(t, left, 63*time.Second, "%s expires a minute after it is full", key)
		}
	}
}

// The key of a caller's bucket expires a minute after the bucket is full, also if the row has a version and saves up permits: the next bucket
// begins full, with the row's configuration. A bucket whose rate was set is kept for a day.
func TestKeysOfCallersExpire(t *testing.T) {
	client := redistest.Start(t).Client(t)
	for which, newStore := range map[string]func(...tokenbucket.RedisOption) tokenbucket.Store{
		"script": func(opts ...tokenbucket.RedisOption) tokenbucket.Store {
			return tokenbucket.NewRedisScriptStore(client, opts...)
		},
		"lock": func(opts ...tokenbucket.RedisOption) tokenbucket.Store {
			return tokenbucket.NewRedisStore(client, opts...)
		},
	} {
		t.Run(which, func(t *testing.T) {
			const burst = 10
			most := float64(burst)
			rows := registry.Static{{Name: "*", Rate: 0.1, Burst: &most, Version: 1_700_000_000, PerKey: true}}
			open := func() *registry.Registry {
				limits, err := registry.New(rows, newStore(tokenbucket.WithKeyPrefix(which+":")), registry.WithLogger(slog.New(slog.DiscardHandler)),
					registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(20*time.Second)))
				require.NoError(t, err)
				t.Cleanup(limits.Close)
				return limits
			}
			takesBurst := func(limits *registry.Registry) {
				t.Helper()
				for i := range burst + 1 {
					a, err := limits.Enter(t.Context(), "acme")
					require.NoError(t, err)
					require.Equal(t, i < burst, a.OK)
				}
			}
			takesBurst(open())
			keys, err := client.Keys(t.Context(), which+":*acme*").Result()
			require.NoError(t, err)
			require.Len(t, keys, 1)
			left := func() time.Duration { return client.PTTL(t.Context(), keys[0]).Val() }
			require.Greater(t, left(), 100*time.Second, "it is full then")
			require.LessOrEqual(t, left(), 260*time.Second)
			require.NoError(t, client.Del(t.Context(), keys[0]).Err()) // as if it had expired
			another := open()
			takesBurst(another)
			limiter, err := another.Limiter("acme")
			require.NoError(t, err)
			require.NoError(t, limiter.SetRate(t.Context(), 0.2))
			require.Greater(t, left(), 24*time.Hour)
		})
	}
}
