package tokenbucket_test

import (
	"testing"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/storetest"
)

func TestConformance(t *testing.T) {
	for _, s := range stores {
		t.Run(s.name, func(t *testing.T) {
			storetest.Run(t, func(t *testing.T) func() tb.Store {
				open := s.open(t)
				return func() tb.Store { return open(false) }
			})
		})
	}
	t.Run("lock and script mixed", func(t *testing.T) {
		storetest.Run(t, func(t *testing.T) func() tb.Store {
			client, prefix, n := redisClient(t), tb.WithKeyPrefix(prefixOf(t)), 0
			return func() tb.Store {
				if n++; n%2 == 0 {
					return tb.NewRedisStore(client, prefix)
				}
				return tb.NewRedisScriptStore(client, prefix)
			}
		})
	})
}
