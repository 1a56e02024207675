package tokenbucket

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// many makes limiters of different buckets on one store.
func many(t *testing.T, store Store, n int) []*RateLimiter {
	limiters := make([]*RateLimiter, n)
	for i := range limiters {
		var err error
		limiters[i], err = NewSmoothBursty(fmt.Sprint("many", i), 1000, WithStore(store), WithInitialPermits(1000), WithStoreTimeout(10*time.Second))
		require.NoError(t, err)
	}
	return limiters
}

// Requests to many buckets share calls of the script on a server, and pipelines on a cluster; each bucket's account is
// exactly what was granted from it.
func TestManyBuckets(t *testing.T) {
	const buckets, callers, calls = 1000, 256, 40
	for what, open := range map[string]func(t *testing.T) (client RedisClient, count func() int){
		"server": func(t *testing.T) (RedisClient, func() int) {
			server := redistest.Start(t)
			return server.Client(t), func() int { return commands(t, server.Client(t), "evalsha") }
		},
		"cluster": func(t *testing.T) (RedisClient, func() int) {
			client := redistest.StartCluster(t).Client(t)
			pipelines := new(atomic.Int64)
			client.AddHook(counting{pipelines})
			return client, func() int { return int(pipelines.Load()) }
		},
	} {
		t.Run(what, func(t *testing.T) {
			client, count := open(t)
			limiters := many(t, NewRedisScriptStore(client), buckets)
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
			require.Less(t, scripts, callers*calls/10)
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

// counting counts pipelines, a server each.
type counting struct{ n *atomic.Int64 }

func (counting) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (counting) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (c counting) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.n.Add(1)
		return next(ctx, cmds)
	}
}

// Among many buckets in one call, one that is locked keeps nobody else waiting, and one that is corrupt fails alone.
func TestManyBucketsApart(t *testing.T) {
	client := redistest.Start(t).Client(t)
	limiters := many(t, NewRedisScriptStore(client), 100)
	require.NoError(t, client.Set(background, "tokenbucket:{many0}:lock", "somebody", 2*time.Second).Err())
	require.NoError(t, client.Set(background, "tokenbucket:{many1}", "hello", 0).Err())
	require.NoError(t, client.RPush(background, "tokenbucket:{many2}", 1).Err())
	var wg sync.WaitGroup
	began := time.Now()
	var locked, slowest atomic.Int64
	for range 5 {
		for i, l := range limiters {
			wg.Go(func() {
				ok, err := l.TryAcquire(background, 1, 0)
				took := time.Since(began)
				switch i {
				case 0:
					require.NoError(t, err)
					locked.Store(int64(took))
				case 1, 2:
					require.ErrorIs(t, err, ErrCorruptState)
				default:
					require.NoError(t, err)
					require.True(t, ok)
					for p := slowest.Load(); int64(took) > p && !slowest.CompareAndSwap(p, int64(took)); p = slowest.Load() {
					}
				}
			})
		}
	}
	wg.Wait()
	t.Logf("locked %v, the others at most %v", time.Duration(locked.Load()), time.Duration(slowest.Load()))
	require.Greater(t, locked.Load(), slowest.Load())
	require.Equal(t, "hello", client.Get(background, "tokenbucket:{many1}").Val())
	require.EqualValues(t, 1, client.LLen(background, "tokenbucket:{many2}").Val())
}

// A client that does not know that its server is one of a cluster is told, once, and goes on bucket by bucket.
func TestManyBucketsOnANodeOfACluster(t *testing.T) {
	cluster := redistest.StartCluster(t)
	all := cluster.Client(t)
	node := cluster.Nodes[0].Client(t)
	var mine []*RateLimiter
	store := NewRedisScriptStore(node)
	for i := 0; len(mine) < 50; i++ {
		name := fmt.Sprint("node", i)
		if master, err := all.MasterForKey(background, "tokenbucket:{"+name+"}"); err == nil && master.Options().Addr == node.Options().Addr {
			l, err := NewSmoothBursty(name, 1000, WithStore(store), WithInitialPermits(1000), WithStoreTimeout(20*time.Second))
			require.NoError(t, err)
			mine = append(mine, l)
		}
	}
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
	require.True(t, store.ferry.scattered.Load())
	for _, l := range mine {
		b, err := l.State(background)
		require.NoError(t, err)
		require.EqualValues(t, 21, b.Seq)
	}
}

// A lock that was kept for batches to come is released when none come.
func TestKeptLockIsReleased(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t)
	var wg sync.WaitGroup
	kept := 0
	ctx, cancel := context.WithTimeout(background, time.Second)
	defer cancel()
	var limiters []*RateLimiter
	for range 4 {
		l, err := NewSmoothBursty("x", 1e6, WithStore(NewRedisStore(server.Client(t))), WithInitialPermits(1e6))
		require.NoError(t, err)
		limiters = append(limiters, l)
		for range 4 {
			wg.Go(func() {
				for ctx.Err() == nil {
					ok, err := l.TryAcquire(background, 1, 0)
					require.NoError(t, err)
					require.True(t, ok)
				}
			})
		}
	}
	for ctx.Err() == nil {
		if client.Exists(background, "tokenbucket:{x}:lock").Val() == 1 {
			kept++
		}
	}
	wg.Wait()
	require.Positive(t, kept)
	for _, l := range limiters {
		require.Eventually(t, func() bool {
			l.line.mu.Lock()
			defer l.line.mu.Unlock()
			return !l.line.flying && l.line.memo.token == ""
		}, 10*time.Second, time.Millisecond)
	}
	require.Eventually(t, func() bool { return client.Exists(background, "tokenbucket:{x}:lock").Val() == 0 }, 10*time.Second, time.Millisecond)
}

// A kept lock outlives a process that ends by little.
func TestKeptLockEndsSoon(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	store := NewRedisStore(client, WithKeyPrefix(fmt.Sprint(t.Name(), rand.Uint64(), ":")), WithLockTTL(10*time.Second))
	b := takes("x", 1)
	m := store.recall(b)
	token, waited, err := store.obtain(background, m.lock, new(atomic.Bool))
	require.NoError(t, err)
	require.False(t, waited)
	require.Greater(t, client.PTTL(background, m.lock).Val(), time.Second)
	m.turns = 1
	_, done, err := store.decide(background, b, m, token)
	require.NoError(t, err)
	require.True(t, done)
	require.Equal(t, token, m.token)
	require.LessOrEqual(t, client.PTTL(background, m.lock).Val(), keptTTL)
}

// A server of a cluster or a ring that hangs keeps no bucket of the others from its answers.
func TestOneServerHangs(t *testing.T) {
	const patience = 5 * time.Second // for which the client waits for a server
	for what, open := range map[string]func(t *testing.T) (RedisClient, []*redistest.Server){
		"cluster": func(t *testing.T) (RedisClient, []*redistest.Server) {
			cluster := redistest.StartCluster(t)
			return cluster.Client(t, func(o *redis.ClusterOptions) { o.ReadTimeout = patience }), cluster.Nodes
		},
		"ring": func(t *testing.T) (RedisClient, []*redistest.Server) {
			nodes := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
			addrs := map[string]string{"a": nodes[0].Addr, "b": nodes[1].Addr}
			ring := redis.NewRing(&redis.RingOptions{Addrs: addrs, ReadTimeout: patience})
			t.Cleanup(func() { _ = ring.Close() })
			return ring, nodes
		},
	} {
		t.Run(what, func(t *testing.T) {
			client, nodes := open(t)
			store := NewRedisScriptStore(client)
			hangs := store.server(background, "tokenbucket:{many0}")
			limiters := many(t, store, 200)
			var well, hung []*RateLimiter
			for i, l := range limiters {
				_, err := l.Try(background)
				require.NoError(t, err)
				if store.server(background, fmt.Sprintf("tokenbucket:{many%d}", i)) == hangs {
					hung = append(hung, l)
				} else {
					well = append(well, l)
				}
			}
			require.NotEmpty(t, well)
			node := nodes[slices.IndexFunc(nodes, func(s *redistest.Server) bool { return s.Addr == hangs })]
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
