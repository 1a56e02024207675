package network

import (
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

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
