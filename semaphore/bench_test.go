package semaphore_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// BenchmarkPair measures an acquire and its release by a lone caller, beside two PINGs: with a default client, and with one that heeds the
// deadlines of contexts. Run several rounds (-count) and compare medians: the speed of a machine varies.
func BenchmarkPair(b *testing.B) {
	server := redistest.Shared(b)
	for _, heeds := range []bool{false, true} {
		client := redis.NewClient(&redis.Options{Addr: server.Addr, ContextTimeoutEnabled: heeds})
		defer func() { _ = client.Close() }()
		b.Run(fmt.Sprintf("heeds=%v/pings", heeds), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				require.NoError(b, client.Ping(ctx).Err())
				require.NoError(b, client.Ping(ctx).Err())
			}
		})
		s, err := semaphore.NewRedis(client, "pair", 4)
		require.NoError(b, err)
		b.Run(fmt.Sprintf("heeds=%v/semaphore", heeds), func(b *testing.B) {
			b.ReportAllocs()
			require.NoError(b, client.ConfigResetStat(ctx).Err())
			for b.Loop() {
				p, err := s.Acquire(ctx, 1)
				if err == nil {
					err = p.Release(ctx)
				}
				require.NoError(b, err)
			}
			info := client.Info(ctx, "commandstats").Val()
			_, info, _ = strings.Cut(info, "cmdstat_evalsha:")
			_, info, _ = strings.Cut(info, "usec_per_call=")
			text, _, _ := strings.Cut(info, ",")
			script, err := strconv.ParseFloat(text, 64)
			require.NoError(b, err)
			b.ReportMetric(script, "µs/script") // in the server
		})
		require.NoError(b, s.Close(ctx))
	}
}
