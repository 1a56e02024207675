package tokenbucket

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// unhurried gives a client a ReadTimeout that no store timeout exceeds, so that none is logged.
func unhurried(o *redis.Options) { o.ReadTimeout = 2 * time.Minute }

// A store logs, once, that its server evicts keys.
func TestEvictionIsLogged(t *testing.T) {
	server := redistest.Start(t, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
	for name, newStore := range map[string]func(RedisClient) Store{
		"lock":    func(c RedisClient) Store { return NewRedisStore(c, WithKeyPrefix(prefixOf(t))) },
		"script":  func(c RedisClient) Store { return NewRedisScriptStore(c, WithKeyPrefix(prefixOf(t))) },
		"wrapped": func(c RedisClient) Store { return renaming{NewRedisStore(c, WithKeyPrefix(prefixOf(t)))} },
	} {
		t.Run(name, func(t *testing.T) {
			store, log := newStore(server.Client(t, unhurried)), new(recorder)
			var lines []string
			try := func() error { // both buckets, twice
				for _, bucket := range []string{"a", "b"} {
					l, err := NewSmoothBursty(bucket, 1000, WithStore(store), patient, log.option())
					require.NoError(t, err)
					for range 2 {
						_, err := l.Try(background)
						require.NoError(t, err)
					}
				}
				if lines = append(lines, log.logged()...); len(lines) == 0 {
					return errors.New("nothing was logged")
				}
				return nil
			}
			require.NoError(t, redistest.Poll(20*time.Second, try))
			require.NoError(t, try())
			require.Len(t, lines, 1)
			require.Contains(t, lines[0], "level=WARN")
			require.Contains(t, lines[0], "maxmemory-policy=allkeys-lru")
		})
	}
}

// A server may refuse to return its policy. Then nothing is logged, and calls go on.
func TestEvictionThatMayNotBeAsked(t *testing.T) {
	server := redistest.Start(t, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
	admin := server.Client(t)
	require.NoError(t, admin.Do(background, "acl", "setuser", "gateway", "on", ">secret", "~*", "+@all", "-info").Err())
	log := new(recorder)
	store := NewRedisScriptStore(server.Client(t, func(o *redis.Options) { o.Username, o.Password = "gateway", "secret"; unhurried(o) }))
	l, err := NewSmoothBursty("x", 1000, WithStore(store), patient, log.option())
	require.NoError(t, err)
	require.NoError(t, redistest.Poll(20*time.Second, func() error {
		_, err := l.Try(background)
		require.NoError(t, err)
		denied, err := admin.Do(background, "acl", "log").Slice()
		require.NoError(t, err)
		if len(denied) == 0 {
			return errors.New("the server was not asked")
		}
		return nil
	}))
	require.Empty(t, strings.Join(log.logged(), "\n"))
}
