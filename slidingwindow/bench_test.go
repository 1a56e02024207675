package slidingwindow

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// BenchmarkLone measures a call of a lone caller that Redis allows, beside a PING, and one that the view refuses: with a default client, and
// with one that heeds the deadlines of contexts.
func BenchmarkLone(b *testing.B) {
	server := redistest.Shared(b)
	for _, heeds := range []bool{false, true} {
		client := redis.NewClient(&redis.Options{Addr: server.Addr, ContextTimeoutEnabled: heeds})
		defer func() { _ = client.Close() }()
		run := func(name string, call func() error) {
			b.Run(fmt.Sprintf("heeds=%v/%s", heeds, name), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					require.NoError(b, call())
				}
			})
		}
		open := func(limit int) func() error {
			l, err := New(fmt.Sprint("bench", limit, heeds), limit, time.Minute, time.Second, WithRedis(client))
			require.NoError(b, err)
			return func() error { _, err := l.Allow(ctx); return err }
		}
		run("ping", func() error { return client.Ping(ctx).Err() })
		run("allowed", open(min(maxLimit, math.MaxInt)))
		run("refused", open(1))
	}
}
