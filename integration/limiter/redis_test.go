package limiter

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Ten thousand callers return by their own deadlines when Redis hangs; callers without a deadline return within their own limiter's store
// timeout. The permits of a batch whose callers have left are refunded.
func TestHungRedis(t *testing.T) {
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			server := redistest.Start(t)
			client := server.Client(t, func(o *redis.Options) { o.ReadTimeout = patient }) // otherwise the client reports a timeout after three seconds
			store := redisStores(client)[which]
			l := open(t, "x", 100, store, tb.WithStoreTimeout(patient))
			impatient := open(t, "x", 100, store, tb.WithStoreTimeout(500*time.Millisecond))
			ok, err := l.Try(background)
			require.NoError(t, err)
			require.True(t, ok)
			require.NoError(t, server.Stop())
			var callers sync.WaitGroup
			began := time.Now()
			for range 10_000 {
				callers.Go(func() {
					c, cancel := context.WithTimeout(background, 300*time.Millisecond)
					defer cancel()
					_, err := l.Acquire(c, 1)
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Error(err)
					}
				})
			}
			callers.Wait()
			t.Logf("10,000 callers with 300 ms returned after %v", time.Since(began))
			require.Less(t, time.Since(began), patient*3/4) // far less when nothing else runs; see the log
			began = time.Now()
			_, err = impatient.TryAcquire(background, 1, 100*time.Millisecond)
			require.ErrorIs(t, err, tb.ErrStoreTimeout)
			require.Less(t, time.Since(began), patient*3/4)
			require.NoError(t, server.Continue())
			require.Eventually(t, func() bool {
				r, err := impatient.TryReserve(background, 1, time.Second)
				return err == nil && r.OK()
			}, 20*time.Second, 10*time.Millisecond)
		})
	}
}

// What FLUSHALL forgets is the debt, and one permit comes; refunds from before find nothing to go back to.
func TestFlushAll(t *testing.T) {
	t.Parallel()
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			client := redistest.Start(t).Client(t)
			const rate = 0.01 // so that no permit comes by itself
			// A busy machine is no outage.
			l := open(t, "x", rate, redisStores(client)[which], tb.WithMaxPermits(50), tb.WithStoreTimeout(20*time.Second))
			var held []*tb.Reservation
			for range 20 {
				r, err := l.Reserve(background, 1)
				require.NoError(t, err)
				held = append(held, r)
			}
			require.NoError(t, client.FlushAll(background).Err())
			require.Eventually(t, func() bool {
				ok, err := l.TryAcquire(background, 1, 0)
				require.NoError(t, err)
				return ok
			}, 20*time.Second, time.Millisecond)
			ok, err := l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.False(t, ok, "one, and no full bucket")
			for _, r := range held {
				require.NoError(t, r.Cancel(background))
			}
			b, err := l.State(background)
			require.NoError(t, err)
			require.Less(t, b.StoredPermits, 1.0)
		})
	}
}

// On a cluster a bucket's keys share a slot, or its scripts would be refused; and no two names share a key.
func TestNamesAndSlots(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	client := cluster.Client(t)
	names := []string{"{}", "{a}{b}", "a}{b", "%7B", "{", "a\r\nSET x 1\r\n", " ", "x", "x:lock", "é", strings.Repeat("{", 512)}
	for len(names) < 500 {
		name := make([]byte, 1+rand.IntN(20))
		for i := range name {
			name[i] = byte(rand.IntN(128))
			if rand.IntN(4) == 0 {
				name[i] = "{}%:"[rand.IntN(4)]
			}
		}
		names = append(names, string(name))
	}
	slices.Sort(names)
	names = slices.Compact(names)
	for which, store := range redisStores(client) {
		for _, name := range names {
			r, err := open(t, name, 1, store, tb.WithStoreTimeout(20*time.Second)).Reserve(background, 1)
			require.NoError(t, err, "%s: %q", which, name)
			require.True(t, r.OK())
		}
	}
	var mu sync.Mutex
	keys := map[string]bool{}
	require.NoError(t, client.ForEachMaster(background, func(ctx context.Context, master *redis.Client) error {
		found, err := master.Keys(ctx, "tokenbucket:{*}").Result()
		mu.Lock()
		defer mu.Unlock()
		for _, key := range found {
			keys[key] = true
		}
		return err
	}))
	require.Len(t, keys, len(names))
}

// many makes limiters of different buckets on one store.
func many(t *testing.T, store tb.Store, n int) []*tb.RateLimiter {
	limiters := make([]*tb.RateLimiter, n)
	for i := range limiters {
		limiters[i] = open(t, fmt.Sprint("many", i), 1000, store, tb.WithInitialPermits(1000), tb.WithStoreTimeout(20*time.Second))
	}
	return limiters
}

// counting counts pipelines, a server each, and replies which say that a bucket's server is one of a cluster.
type counting struct{ pipelines, told atomic.Int64 }

func (*counting) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *counting) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if redis.HasErrorPrefix(err, "CROSSSLOT") {
			c.told.Add(1)
		}
		return err
	}
}

func (c *counting) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.pipelines.Add(1)
		return next(ctx, cmds)
	}
}

// Requests to many buckets share calls of the script on one server, and pipelines on a cluster. Each bucket decreases by exactly the
// permits that were granted from it.
func TestManyBuckets(t *testing.T) {
	const buckets, callers, calls = 1000, 256, 40
	for what, client := range map[string]func(t *testing.T) (client tb.RedisClient, count func() int){
		"server": func(t *testing.T) (tb.RedisClient, func() int) {
			server := redistest.Start(t)
			return server.Client(t), func() int { return evalshas(t, server.Client(t)) }
		},
		"cluster": func(t *testing.T) (tb.RedisClient, func() int) {
			client := redistest.StartCluster(t).Client(t)
			hook := new(counting)
			client.AddHook(hook)
			return client, func() int { return int(hook.pipelines.Load()) }
		},
	} {
		t.Run(what, func(t *testing.T) {
			client, count := client(t)
			limiters := many(t, tb.NewRedisScriptStore(client), buckets)
			granted := make([]atomic.Int64, buckets)
			var wg sync.WaitGroup
			for range callers {
				wg.Go(func() {
					for range calls {
						i := rand.IntN(buckets)
						ok, err := limiters[i].TryAcquire(background, 1, 0)
						require.NoError(t, err)
						require.True(t, ok)
						granted[i].Add(1)
					}
				})
			}
			wg.Wait()
			scripts := count()
			t.Logf("%d calls, %d trips", callers*calls, scripts)
			require.Positive(t, scripts)
			require.Less(t, scripts, callers*calls/5)
			for i, l := range limiters {
				b, err := l.State(background)
				require.NoError(t, err)
				if n := granted[i].Load(); n > 0 {
					require.Equal(t, n, b.Seq-1, "bucket %d", i)
				}
			}
		})
	}
}

// A client of a single server that belongs to a cluster gets one error, and goes on with one call per bucket. Two trips may be in flight at
// that time, and two more for each 250 ms, since a trip that has lasted that long no longer counts.
func TestManyBucketsOnANodeOfACluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	all := cluster.Client(t)
	node := cluster.Nodes[0].Client(t)
	hook := new(counting)
	node.AddHook(hook)
	var mine []*tb.RateLimiter
	store := tb.NewRedisScriptStore(node)
	for i := 0; len(mine) < 50; i++ {
		name := fmt.Sprint("node", i)
		if master, err := all.MasterForKey(background, "tokenbucket:{"+name+"}"); err == nil && master.Options().Addr == node.Options().Addr {
			mine = append(mine, open(t, name, 1000, store, tb.WithInitialPermits(1000), tb.WithStoreTimeout(20*time.Second)))
		}
	}
	ask := func() {
		var wg sync.WaitGroup
		for range 20 {
			for _, l := range mine {
				wg.Go(func() {
					ok, err := l.TryAcquire(background, 1, 0)
					require.NoError(t, err)
					require.True(t, ok)
				})
			}
		}
		wg.Wait()
	}
	began := time.Now()
	ask()
	told := hook.told.Load()
	t.Logf("told %d times in %v", told, time.Since(began))
	require.Positive(t, told)
	require.LessOrEqual(t, told, 2*(1+int64(time.Since(began)/(250*time.Millisecond))))
	ask()
	require.Equal(t, told, hook.told.Load(), "it knows")
	for _, l := range mine {
		b, err := l.State(background)
		require.NoError(t, err)
		require.EqualValues(t, 41, b.Seq)
	}
}

// A server of a cluster or a ring that hangs keeps no bucket of the others from its answers.
func TestOneServerHangs(t *testing.T) {
	t.Parallel()
	const patience = 15 * time.Second // the client's timeout for a server; no test waits for its end
	type connected struct {
		client tb.RedisClient
		nodes  []*redistest.Server
		node   func(key string) (*redis.Client, error)
	}
	for what, connect := range map[string]func(t *testing.T) connected{
		"cluster": func(t *testing.T) connected {
			cluster := redistest.StartCluster(t)
			client := cluster.Client(t, func(o *redis.ClusterOptions) { o.ReadTimeout = patience })
			return connected{client, cluster.Nodes, func(key string) (*redis.Client, error) { return client.MasterForKey(background, key) }}
		},
		"ring": func(t *testing.T) connected {
			nodes := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
			addrs := map[string]string{"a": nodes[0].Addr, "b": nodes[1].Addr}
			pinned := func(context.Context, *redis.Client) bool { return true }
			ring := redis.NewRing(&redis.RingOptions{Addrs: addrs, ReadTimeout: patience, HeartbeatFn: pinned})
			t.Cleanup(func() { _ = ring.Close() })
			return connected{ring, nodes, ring.GetShardClientForKey}
		},
	} {
		t.Run(what, func(t *testing.T) {
			c := connect(t)
			server := func(i int) string {
				node, err := c.node(fmt.Sprintf("tokenbucket:{many%d}", i))
				require.NoError(t, err)
				return node.Options().Addr
			}
			hangs := server(0)
			limiters := many(t, tb.NewRedisScriptStore(c.client), 200)
			var well, hung []*tb.RateLimiter
			for i, l := range limiters {
				_, err := l.Try(background)
				require.NoError(t, err)
				if server(i) == hangs {
					hung = append(hung, l)
				} else {
					well = append(well, l)
				}
			}
			require.NotEmpty(t, well)
			node := c.nodes[slices.IndexFunc(c.nodes, func(s *redistest.Server) bool { return s.Addr == hangs })]
			require.NoError(t, node.Stop())
			ctx, cancel := context.WithCancel(background)
			var others, wg sync.WaitGroup
			for _, l := range hung {
				others.Go(func() { _, _ = l.TryAcquire(ctx, 1, 0) })
			}
			began := time.Now()
			for _, l := range well {
				wg.Go(func() {
					for range 3 {
						_, err := l.TryAcquire(background, 1, 0)
						require.NoError(t, err)
					}
				})
			}
			wg.Wait()
			took := time.Since(began)
			cancel()
			others.Wait()
			require.NoError(t, node.Continue())
			t.Logf("%d buckets had three answers each after %v, while %d hung", len(well), took, len(hung))
			require.Less(t, took, patience)
		})
	}
}

// Under overload, refusing asks the server ten times a second, not once a call.
func TestRefusingCostsNoRoundTrip(t *testing.T) {
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			server := redistest.Start(t)
			client := server.Client(t)
			l := open(t, "x", 1, redisStores(server.Client(t))[which], tb.WithStoreTimeout(patient))
			_, err := l.Reserve(background, 3600)
			require.NoError(t, err)
			before := evalshas(t, client)
			var refused atomic.Int64
			var enough atomic.Bool
			var callers sync.WaitGroup
			began := time.Now()
			for range 64 {
				callers.Go(func() {
					for !enough.Load() && time.Since(began) < time.Minute {
						ok, err := l.TryAcquire(background, 1, time.Millisecond)
						require.NoError(t, err)
						require.False(t, ok)
						refused.Add(1)
					}
				})
			}
			for !enough.Load() && time.Since(began) < time.Minute { // a second, where nothing else runs
				time.Sleep(time.Second)
				enough.Store(refused.Load() > 10_000 && evalshas(t, client)-before >= 5)
			}
			callers.Wait()
			asked := evalshas(t, client) - before
			t.Logf("%d refused, %d scripts in %v", refused.Load(), asked, time.Since(began))
			require.Greater(t, refused.Load(), int64(10_000))
			scripts := 2 // a question: one, and one of those that came while it was under way
			if which == "lock" {
				scripts = 6
			}
			require.LessOrEqual(t, asked, int(time.Since(began)/(100*time.Millisecond)+2)*scripts)
			require.GreaterOrEqual(t, asked, 5, "and asked anew")
		})
	}
}
