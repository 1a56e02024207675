package limiter

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Two gateways share a ring of two shards, and one of them does not reach one shard. go-redis would send that shard's keys to the other
// shard: both gateways would then be granted the whole rate. Such a ring is refused. With a heartbeat that never takes a shard out, the
// gateway that does not reach it has an outage, and the fleet keeps to the rate.
func TestRingSeenByTwo(t *testing.T) {
	t.Parallel()
	const rate = 50.0
	type traced struct{ *redis.Ring } // as tracing libraries make them
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			t.Parallel()
			nodes := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
			proxy := redistest.StartProxy(t, nodes[1].Addr)
			ring := func(second string, heartbeat func(context.Context, *redis.Client) bool) *redis.Ring {
				r := redis.NewRing(&redis.RingOptions{
					Addrs: map[string]string{"a": nodes[0].Addr, "b": second}, HeartbeatFrequency: 20 * time.Millisecond, HeartbeatFn: heartbeat,
				})
				t.Cleanup(func() { _ = r.Close() })
				return r
			}
			for _, client := range []tb.RedisClient{ring(proxy.Addr, nil), traced{ring(proxy.Addr, nil)}} {
				_, err := tb.NewSmoothBursty("x", rate, tb.WithStore(redisStores(client)[which]))
				require.ErrorIs(t, err, tb.ErrInvalidConfig)
				require.ErrorContains(t, err, "HeartbeatFn")
			}

			pinned := func(context.Context, *redis.Client) bool { return true }
			near := ring(nodes[1].Addr, pinned)
			name := ""
			for i := 0; name == ""; i++ {
				shard, err := near.GetShardClientForKey(fmt.Sprintf("tokenbucket:{%d}", i))
				require.NoError(t, err)
				if shard.Options().Addr == nodes[1].Addr {
					name = fmt.Sprint(i)
				}
			}
			reaches := open(t, name, rate, redisStores(near)[which], tb.WithStoreTimeout(patient))
			cut := open(t, name, rate, redisStores(ring(proxy.Addr, pinned))[which])
			first := time.Now() // from here on the bucket stores permits
			_, err := cut.Try(background)
			require.NoError(t, err)
			proxy.Set(redistest.Down)
			var granted, failed atomic.Int64
			var callers sync.WaitGroup
			began := time.Now()
			for _, l := range []*tb.RateLimiter{reaches, cut} {
				for range 50 {
					callers.Go(func() {
						for time.Since(began) < 2*time.Second {
							switch ok, err := l.Try(background); {
							case ok:
								granted.Add(1)
							case errors.Is(err, tb.ErrStoreUnavailable):
								failed.Add(1)
								time.Sleep(time.Millisecond)
							case err != nil:
								t.Error(err)
							}
						}
					})
				}
			}
			callers.Wait()
			elapsed := time.Since(first)
			t.Logf("%d granted in %v, %d failed", granted.Load(), elapsed, failed.Load())
			require.LessOrEqual(t, float64(granted.Load()), 2+rate*elapsed.Seconds())
			require.Positive(t, granted.Load())
			require.Positive(t, failed.Load(), "an outage of the one that does not reach the shard")
		})
	}
}
