package tokenbucket_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Limits of one name: 5 a second and 1,000 a day, over a month in full size. Neither is exceeded, and the day's is used to 99 %.
func TestLimits(t *testing.T) {
	days := tb.Sized(30, 1)
	synctest.Test(t, func(t *testing.T) {
		g, err := tb.NewLimits("fares", tb.PerSecond(5), tb.PerDay(1000).Burst(5))
		require.NoError(t, err)
		var perSecond, perDay ledger
		began, calls := time.Now(), 0
		for time.Since(began) < time.Duration(days)*24*time.Hour {
			_, err := g.Acquire(ctx, 1)
			require.NoError(t, err)
			calls++
			perSecond.used(time.Since(began), 1)
			perDay.used(time.Since(began), 1)
		}
		late := 30 * time.Second // the second's permit is due before the day's
		require.LessOrEqual(t, perSecond.excess(5, 5, late), 1e-6)
		require.LessOrEqual(t, perDay.excess(1000.0/86400, 5, 0), 1e-6)
		require.GreaterOrEqual(t, calls, days*990)
		names := []string{}
		for _, l := range g.Members() {
			names = append(names, l.Name())
		}
		require.Equal(t, []string{"fares/second", "fares/day"}, names)
	})
	for name, args := range map[string][]tb.LimitsOption{
		"none": {}, "only options": {tb.WithMaxWait(time.Second)}, "nil": {nil}, "zero": {tb.PerSecond(0)}, "window": {tb.Per(1, 0)},
		"the same window": {tb.PerSecond(1), tb.PerSecond(2)}, "burst": {tb.PerSecond(1).Burst(-1)},
	} {
		_, err := tb.NewLimits("x", args...)
		require.ErrorIs(t, err, tb.ErrInvalidConfig, name)
	}
}

// The buckets of a slot are under keys that share the part in braces, and no other bucket has their keys.
func TestSlot(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint(t.Name(), rand.Uint64(), ":")
	for _, store := range []tb.Store{tb.NewRedisScriptStore(client, tb.WithKeyPrefix(prefix)), tb.NewRedisStore(client, tb.WithKeyPrefix(prefix))} {
		for _, opts := range [][]tb.Option{nil, {tb.WithSlot("s}")}, {tb.WithSlot("a")}} {
			l := limiter(t, "a", 1, append(opts, tb.WithStore(store))...)
			require.Equal(t, "a", l.Name())
			_, err := l.TryAcquire(ctx, 1, 0)
			require.NoError(t, err)
		}
	}
	for _, key := range []string{tb.RedisKey(prefix, "a"), tb.RedisSlotKey(prefix, "s}", "a"), tb.RedisSlotKey(prefix, "a", "a")} {
		require.Equal(t, int64(1), client.Exists(ctx, key).Val(), key)
	}
	require.Equal(t, prefix+"{s%7D}{a}", tb.RedisSlotKey(prefix, "s}", "a"))
	for _, slot := range []string{"", "\xff", strings.Repeat("x", 500)} {
		_, err := tb.NewSmoothBursty("a", 1, tb.WithSlot(slot))
		require.ErrorIs(t, err, tb.ErrInvalidConfig)
	}
}

// On a cluster, buckets of one slot are decided on in one step. Others are asked one after the other, and a refusal gives back what was taken.
func TestGroupOnACluster(t *testing.T) {
	cluster := redistest.StartCluster(t)
	client := cluster.Client(t, func(o *redis.ClusterOptions) { o.ReadTimeout = time.Minute })
	for name, store := range map[string]tb.Store{"script": tb.NewRedisScriptStore(client), "lock": tb.NewRedisStore(client)} {
		for _, slot := range []string{"one", ""} {
			t.Run(name+slot, func(t *testing.T) {
				slow := 1.0 / 3600
				opts := []tb.Option{tb.WithStore(store), tb.WithMaxPermits(10), tb.WithStoreTimeout(time.Minute)}
				if slot != "" {
					opts = append(opts, tb.WithSlot(slot))
				}
				var members []tb.Member
				for i, n := range []float64{10, 3, 7} {
					members = append(members, limiter(t, fmt.Sprint(name, i), slow*(1+float64(i)), append(opts, tb.WithInitialPermits(n))...))
				}
				g, err := tb.All(members...)
				require.NoError(t, err)
				granted := 0
				for range 10 {
					ok, err := g.TryAcquire(ctx, 1, 0)
					require.NoError(t, err)
					if ok {
						granted++
					}
				}
				require.Equal(t, 3, granted)
				require.NoError(t, redistest.Poll(20*time.Second, func() error { // until what goes back has arrived
					for i, want := range []float64{7, 0, 4} {
						if have, _ := stored(t, members[i].(*tb.RateLimiter)); have < want || have > want+0.1 {
							return fmt.Errorf("member %d has %v, want %v", i, have, want)
						}
					}
					return nil
				}))
				require.Zero(t, g.Lost())
			})
		}
	}
}
