package network

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// The master of a bucket hangs for less than a failover takes, again and again, under a cluster's client as it comes and one
// that loses patience sooner than that: a cluster's client has redirections to follow and so cannot be forbidden to try
// again, but what takes permits is executed at most once a call.
func TestB3Cluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	for name, change := range map[string]func(*redis.ClusterOptions){
		"default": func(*redis.ClusterOptions) {},
		"hasty":   func(o *redis.ClusterOptions) { o.ReadTimeout = 100 * time.Millisecond },
	} {
		for _, which := range stores {
			t.Run(which+"/"+name, func(t *testing.T) {
				random := faultlab.Seed(t)
				direct := cluster.Client(t)
				require.NoError(t, direct.Del(background, prefix+"{bucket}").Err())
				master, err := direct.MasterForKey(background, prefix+"{bucket}")
				require.NoError(t, err)
				var node *redistest.Server
				for _, n := range cluster.Nodes {
					if n.Addr == master.Options().Addr {
						node = n
					}
				}
				var calls outcomes
				l := limiter(t, faultlab.Stores[which](cluster.Client(t, change)), slow, size, time.Second, calls.count())
				other := limiter(t, faultlab.Stores["script"](direct), slow, size, 5*time.Second, calls.count())
				var healthy, delayed int64
				for range 5 {
					for range 10 {
						if calls.call(t, background, l, 1) == nil {
							healthy++
						}
					}
					// Another's call, and one that finds it: the next is decided by the server as of when it arrives, not as of now.
					_ = calls.call(t, background, other, 1)
					_ = calls.call(t, background, l, 1)
					pause := 150*time.Millisecond + time.Duration(random.IntN(450))*time.Millisecond
					was := calls.received.Load()
					require.NoError(t, node.Stop())
					var callers sync.WaitGroup
					for range 8 {
						callers.Go(func() { _ = calls.call(t, background, l, 1) })
					}
					time.Sleep(pause)
					delayed += was + 8 - calls.received.Load()
					require.NoError(t, node.Continue())
					callers.Wait()
				}
				faultlab.Bit(t, int(healthy), int(delayed))
				if name == "hasty" {
					time.Sleep(2 * time.Second) // in which it would have tried again
				}
				n := int64(taken(state(t, direct, slow, size), size))
				t.Logf("%v; taken %d", &calls, n)
				faultlab.Figure(t, "permits that nobody received", n-calls.received.Load())
				faultlab.Figure(t, "executed twice", max(0, n-calls.sent.Load()))
				require.GreaterOrEqual(t, n, calls.received.Load())
				require.LessOrEqual(t, n, calls.most(1), "nothing was executed twice")
				if name == "hasty" {
					require.Positive(t, calls.failed.Load(), "the client lost its patience")
				}
				if name == "hasty" && which == "script" {
					require.Greater(t, n, calls.received.Load(), "and what it had sent was executed")
				}
				faultlab.CleanUp(t, direct, prefix)
			})
		}
	}
}

// embedding and wrapping are clients of a user's own: one has all methods of a cluster's client, the other the two that a store needs.
type (
	embedding struct{ *redis.ClusterClient }
	wrapping  struct{ tokenbucket.RedisClient }
)

// A master that is dead takes no bucket of another master with it, whatever the client of the cluster is.
func TestOutageServerByServer(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	direct := cluster.Client(t)
	masterOf := func(bucket string) string {
		master, err := direct.MasterForKey(background, prefix+"{"+bucket+"}")
		require.NoError(t, err)
		return master.Options().Addr
	}
	victim := masterOf("bucket0")
	clients := map[string]tokenbucket.RedisClient{"cluster": cluster.Client(t)}
	clients["embedding"] = embedding{cluster.Client(t)}
	clients["wrapping"] = wrapping{cluster.Client(t)}
	joining, err := cluster.Client(t).AutoPipeline()
	require.NoError(t, err)
	clients["AutoPipeliner"] = joining
	type pair struct{ healthy, dead *tokenbucket.RateLimiter }
	pairs := map[string]pair{}
	buckets := 0
	for what, client := range clients {
		for _, which := range stores {
			store := faultlab.Stores[which](client)
			// Buckets of its own: the lock of another's store would delay it, too.
			open := func(dead bool) *tokenbucket.RateLimiter {
				name := ""
				for name == "" || (masterOf(name) == victim) != dead {
					buckets++
					name = fmt.Sprint("bucket", buckets)
				}
				l, err := tokenbucket.NewSmoothBursty(name, 1e5, tokenbucket.WithStore(store))
				require.NoError(t, err)
				_, err = l.Try(background)
				require.NoError(t, err, what)
				return l
			}
			pairs[which+"/"+what] = pair{open(false), open(true)}
		}
	}
	for _, node := range cluster.Nodes {
		if node.Addr == victim {
			require.NoError(t, node.Kill())
		}
	}
	var all sync.WaitGroup
	for what, p := range pairs {
		all.Go(func() {
			var calls, failed, unavailable atomic.Int64
			began := time.Now()
			var callers sync.WaitGroup
			for range 4 {
				callers.Go(func() {
					for time.Since(began) < 6*time.Second {
						_, err := p.dead.Try(background)
						if errors.Is(err, tokenbucket.ErrStoreUnavailable) {
							unavailable.Add(1)
						} else {
							t.Errorf("%s: the dead master: %v", what, err)
						}
						time.Sleep(10 * time.Millisecond)
					}
				})
				callers.Go(func() {
					for time.Since(began) < 6*time.Second {
						calls.Add(1)
						if _, err := p.healthy.Try(background); err != nil {
							if failed.Add(1) == 1 {
								t.Logf("%s: %v", what, err)
							}
						}
						time.Sleep(10 * time.Millisecond)
					}
				})
			}
			callers.Wait()
			t.Logf("%s: of %d calls for a bucket on a healthy master %d failed; %d on the dead one", what, calls.Load(), failed.Load(), unavailable.Load())
			if calls.Load() < 100 || unavailable.Load() < 10 {
				t.Errorf("%s: too few calls", what)
			}
			if failed.Load() > 0 {
				t.Errorf("%s: %d of %d calls failed", what, failed.Load(), calls.Load())
			}
		})
	}
	all.Wait()
	for _, node := range cluster.Nodes { // a replica is elected
		if node.Addr != victim {
			require.NoError(t, node.Client(t).ConfigSet(background, "cluster-node-timeout", "1000").Err())
		}
	}
	began := time.Now()
	for what, p := range pairs {
		all.Go(func() {
			if err := redistest.Poll(40*time.Second, func() error {
				_, err := p.dead.Try(background)
				return err
			}); err != nil {
				t.Errorf("%s: after the failover: %v", what, err)
			}
			t.Logf("%s: served again after %v", what, time.Since(began).Round(time.Millisecond))
		})
	}
	all.Wait()
}
