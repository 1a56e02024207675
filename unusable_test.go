package tokenbucket

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// An error that needs a repair is an ErrStoreUnusable that names the bucket, under every policy and with both stores. It wraps the cause.
func TestUnusable(t *testing.T) {
	server := redistest.Shared(t)
	closed := server.Client(t)
	require.NoError(t, closed.Close())
	wrong := server.Client(t, func(o *redis.Options) { o.Username, o.Password = "nobody", "wrong" })
	for what, client := range map[string]*redis.Client{redis.ErrClosed.Error(): closed, "WRONGPASS": wrong} {
		for _, policy := range []FailurePolicy{FailClosed, FailOpen, LocalShare(1)} {
			for kind, store := range map[string]Store{"lock": NewRedisStore(client), "script": NewRedisScriptStore(client)} {
				t.Run(what+" "+policy.String()+" "+kind, func(t *testing.T) {
					l, err := NewSmoothBursty("x", 5, WithStore(store), WithFailurePolicy(policy), patient)
					require.NoError(t, err)
					for range 3 {
						ok, err := l.Try(background)
						require.False(t, ok)
						require.ErrorIs(t, err, ErrStoreUnusable)
						require.NotErrorIs(t, err, ErrStoreUnavailable)
						require.ErrorContains(t, err, `tokenbucket: store unusable: bucket "x": `)
						require.ErrorContains(t, err, what)
						if client == closed {
							require.ErrorIs(t, err, redis.ErrClosed)
						}
					}
					require.ErrorIs(t, l.SetRate(background, 6), ErrStoreUnusable)
					require.Nil(t, l.limiter.Coordinator.Down())
				})
			}
		}
	}
}
