package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

var prefixes atomic.Int64

// prefixOf gives a test keys of its own, also when it runs again.
func prefixOf(t *testing.T) string { return fmt.Sprintf("%s:%d:", t.Name(), prefixes.Add(1)) }

// many makes limiters of different buckets on one store.
func many(t *testing.T, store Store, n int) []*RateLimiter {
	limiters := make([]*RateLimiter, n)
	for i := range limiters {
		var err error
		limiters[i], err = NewSmoothBursty(fmt.Sprint("many", i), 1000, WithStore(store), WithInitialPermits(1000), patient)
		require.NoError(t, err)
	}
	return limiters
}

// counting counts calls of scripts, and pipelines.
type counting struct{ scripts, pipelines atomic.Int64 }

func (*counting) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *counting) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" {
			c.scripts.Add(1)
		}
		return next(ctx, cmd)
	}
}

func (c *counting) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.pipelines.Add(1)
		return next(ctx, cmds)
	}
}

// Requests to many buckets share calls of the script on one server, and pipelines on several. Each bucket decreases by exactly the permits
// that were granted from it.
func TestManyBuckets(t *testing.T) {
	const buckets, callers, calls = 300, 128, 20
	server := redistest.Shared(t)
	for what, open := range map[string]func(c *counting) (RedisClient, *atomic.Int64){
		"server": func(c *counting) (RedisClient, *atomic.Int64) {
			client := server.Client(t)
			client.AddHook(c)
			return client, &c.scripts
		},
		"ring": func(c *counting) (RedisClient, *atomic.Int64) {
			client := ringOf(t, map[string]*counting{"a": c, "b": c})
			return client, &c.pipelines
		},
	} {
		t.Run(what, func(t *testing.T) {
			client, trips := open(new(counting))
			limiters := many(t, NewRedisScriptStore(client, WithKeyPrefix(prefixOf(t))), buckets)
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
			t.Logf("%d calls, %d trips", callers*calls, trips.Load())
			require.Positive(t, trips.Load())
			require.Less(t, trips.Load(), int64(callers*calls/4))
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

// ringOf is a client of two servers that are one, with a hook each.
func ringOf[H redis.Hook](t *testing.T, hooks map[string]H) *redis.Ring {
	server := redistest.Shared(t)
	_, port, err := net.SplitHostPort(server.Addr)
	require.NoError(t, err)
	addrs := map[string]string{"a": server.Addr, "b": net.JoinHostPort("localhost", port)}
	pinned := func(context.Context, *redis.Client) bool { return true }
	ring := redis.NewRing(&redis.RingOptions{Addrs: addrs, HeartbeatFn: pinned, NewClient: func(o *redis.Options) *redis.Client {
		client := redis.NewClient(o)
		for name, hook := range hooks {
			if addrs[name] == o.Addr {
				client.AddHook(hook)
			}
		}
		return client
	}})
	t.Cleanup(func() { _ = ring.Close() })
	return ring
}

// Of many buckets in one call, a locked one delays no other, and a corrupt one fails alone.
func TestManyBucketsApart(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := prefixOf(t)
	limiters := many(t, NewRedisScriptStore(client, WithKeyPrefix(prefix), WithLockTTL(time.Minute)), 100)
	lock := prefix + "{many0}:lock"
	require.NoError(t, client.Set(background, lock, "somebody", time.Minute).Err())
	require.NoError(t, client.Set(background, prefix+"{many1}", "hello", 0).Err())
	require.NoError(t, client.RPush(background, prefix+"{many2}", 1).Err())
	var locked, others sync.WaitGroup
	var unlocked atomic.Bool
	for range 5 {
		for i, l := range limiters {
			wg := &others
			if i == 0 {
				wg = &locked
			}
			wg.Go(func() {
				ok, err := l.TryAcquire(background, 1, 0)
				switch i {
				case 0:
					require.NoError(t, err)
					require.True(t, unlocked.Load())
				case 1, 2:
					require.ErrorIs(t, err, ErrCorruptState)
				default:
					require.NoError(t, err)
					require.True(t, ok)
				}
			})
		}
	}
	others.Wait()
	unlocked.Store(true)
	require.NoError(t, client.Del(background, lock).Err())
	locked.Wait()
	require.Equal(t, "hello", client.Get(background, prefix+"{many1}").Val())
	require.EqualValues(t, 1, client.LLen(background, prefix+"{many2}").Val())
}

// node is a hook of a client that does not know that its server is one of a cluster.
type node struct {
	counting
	told atomic.Int64
}

type crossSlot string

func (e crossSlot) Error() string { return string(e) }
func (crossSlot) RedisError()     {}

func (n *node) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" && cmd.Args()[2].(int) > 2 {
			n.told.Add(1)
			cmd.SetErr(crossSlot("CROSSSLOT Keys in request don't hash to the same slot"))
			return cmd.Err()
		}
		return next(ctx, cmd)
	}
}

// A client of a single server that belongs to a cluster gets an error, and goes on with one call per bucket.
func TestManyBucketsOnANodeOfACluster(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	hook := new(node)
	client.AddHook(hook)
	mine := many(t, NewRedisScriptStore(client, WithKeyPrefix(prefixOf(t))), 50)
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
	require.Positive(t, hook.told.Load())
	require.LessOrEqual(t, hook.told.Load(), int64(2), "once, and another call may have been under way")
	require.Positive(t, hook.pipelines.Load())
	for _, l := range mine {
		b, err := l.State(background)
		require.NoError(t, err)
		require.EqualValues(t, 21, b.Seq)
	}
}

// hung is a hook that lets pipelines wait until they are given up, or it ends.
type hung struct {
	counting
	on   atomic.Bool
	over chan struct{}
}

func (h *hung) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if h.on.Load() {
			h.pipelines.Add(1)
			<-h.over
		}
		return next(ctx, cmds)
	}
}

// A server of a ring that hangs keeps no bucket of the others from its answers.
func TestOneServerHangs(t *testing.T) {
	hook := &hung{over: make(chan struct{})}
	ring := ringOf(t, map[string]*hung{"a": hook})
	prefix := prefixOf(t)
	limiters := many(t, NewRedisScriptStore(ring, WithKeyPrefix(prefix)), 200)
	var well, hangs []*RateLimiter
	for _, l := range limiters {
		_, err := l.Try(background)
		require.NoError(t, err)
		node, err := ring.GetShardClientForKey(prefix + "{" + l.Name() + "}")
		require.NoError(t, err)
		if node.Options().Addr == redistest.Shared(t).Addr {
			hangs = append(hangs, l)
		} else {
			well = append(well, l)
		}
	}
	require.NotEmpty(t, well)
	require.NotEmpty(t, hangs)
	hook.on.Store(true)
	var others, wg sync.WaitGroup
	var returned atomic.Int64
	for _, l := range hangs {
		others.Go(func() {
			_, _ = l.TryAcquire(background, 1, 0)
			returned.Add(1)
		})
	}
	for _, l := range well {
		wg.Go(func() {
			for range 3 {
				_, err := l.TryAcquire(background, 1, 0)
				require.NoError(t, err)
			}
		})
	}
	wg.Wait()
	require.Positive(t, hook.pipelines.Load())
	require.Zero(t, returned.Load())
	close(hook.over)
	others.Wait()
}

// asker is a hook that notes which goroutine sends a script.
type asker struct {
	counting
	goroutine atomic.Value
}

func (a *asker) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return a.counting.ProcessHook(func(ctx context.Context, cmd redis.Cmder) error {
		a.goroutine.Store(goroutine())
		return next(ctx, cmd)
	})
}

// goroutine names the one that asks.
func goroutine() string {
	buf := make([]byte, 30)
	return string(buf[:runtime.Stack(buf, false)])
}

// A lone caller whose context cannot be cancelled asks Redis itself; one that can be called back does not. The hooks of a client that
// heeds deadlines see it, and those of another do not.
func TestLoneCallerAsksItself(t *testing.T) {
	for name, heeds := range map[string]bool{"default": false, "heeds deadlines": true} {
		t.Run(name, func(t *testing.T) {
			client := redis.NewClient(&redis.Options{Addr: redistest.Shared(t).Addr, ContextTimeoutEnabled: heeds})
			t.Cleanup(func() { _ = client.Close() })
			hook := new(asker)
			client.AddHook(hook)
			l := many(t, NewRedisScriptStore(client, WithKeyPrefix(prefixOf(t))), 1)[0]
			itself := func(ctx context.Context) bool {
				before := hook.scripts.Load()
				_, err := l.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				if seen := hook.scripts.Load() - before; heeds || seen > 0 {
					require.EqualValues(t, 1, seen)
					return hook.goroutine.Load() == goroutine()
				}
				return true
			}
			cancelled, cancel := context.WithCancel(background)
			defer cancel()
			for range 3 {
				require.NoError(t, redistest.Poll(20*time.Second, func() error { // the last trip may not be quite over
					if !itself(background) {
						return errors.New("another goroutine asks")
					}
					return nil
				}))
				require.False(t, itself(cancelled))
			}
		})
	}
}

// A lone caller returns in time though the server hangs, and its client would wait for longer.
func TestLoneCallerReturnsInTime(t *testing.T) {
	proxy := redistest.StartProxy(t, redistest.Shared(t).Addr)
	client := redis.NewClient(&redis.Options{Addr: proxy.Addr, ReadTimeout: time.Minute})
	t.Cleanup(func() { _ = client.Close() })
	const timeout = 300 * time.Millisecond
	l, err := NewSmoothBursty("x", 1000, WithStore(NewRedisScriptStore(client, WithKeyPrefix(prefixOf(t)))), WithStoreTimeout(timeout))
	require.NoError(t, err)
	for range 2 {
		require.Eventually(t, func() bool { _, err := l.Try(background); return err == nil }, 20*time.Second, time.Millisecond)
	}
	proxy.Set(redistest.Stalled)
	began := time.Now()
	_, err = l.Try(background)
	require.ErrorIs(t, err, ErrStoreTimeout)
	require.Less(t, time.Since(began), 10*time.Second)
}

// tardyConn is a connection whose answers take a while, as long as that is not 0.
type tardyConn struct {
	net.Conn
	by    *atomic.Int64
	until atomic.Pointer[time.Time]
}

func (c *tardyConn) SetReadDeadline(t time.Time) error {
	c.until.Store(&t)
	return c.Conn.SetReadDeadline(t)
}

func (c *tardyConn) Read(p []byte) (int, error) {
	wait := time.Duration(c.by.Load())
	if until := c.until.Load(); until != nil && !until.IsZero() {
		wait = min(wait, time.Until(*until))
	}
	time.Sleep(wait)
	return c.Conn.Read(p)
}

// SyscallConn lets the client find out that the connection was closed.
func (c *tardyConn) SyscallConn() (syscall.RawConn, error) {
	return c.Conn.(syscall.Conn).SyscallConn()
}

// A lone caller returns in time, too, if its call takes several replies of a slow server: the script has to be sent once more, or a connection
// has to be made and greeted.
func TestLoneCallerOfASlowServer(t *testing.T) {
	for name, unsettle := range map[string]func(server *redis.Client) error{
		"without the script": func(c *redis.Client) error { return c.ScriptFlush(background).Err() },
		"without a connection": func(c *redis.Client) error {
			return c.ClientKillByFilter(background, "TYPE", "normal", "SKIPME", "yes").Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			const timeout = time.Second
			once := func() (took time.Duration) {
				var by atomic.Int64
				client := redis.NewClient(&redis.Options{Addr: server.Addr, Dialer: func(_ context.Context, network, addr string) (net.Conn, error) {
					conn, err := net.Dial(network, addr)
					return &tardyConn{Conn: conn, by: &by}, err
				}})
				defer func() { _ = client.Close() }()
				l, err := NewSmoothBursty("x", 1000, WithStore(NewRedisScriptStore(client)), WithStoreTimeout(timeout), Logged(t))
				require.NoError(t, err)
				for range 3 {
					require.Eventually(t, func() bool { _, err := l.Try(background); return err == nil }, 20*time.Second, time.Millisecond)
					time.Sleep(10 * time.Millisecond) // the trip is quite over
				}
				require.NoError(t, unsettle(server.Client(t)))
				by.Store(int64(timeout * 8 / 10))
				began := time.Now()
				_, err = l.Try(background)
				require.ErrorIs(t, err, ErrStoreTimeout)
				return time.Since(began)
			}
			var took []time.Duration
			for range 5 { // others may keep this machine busy
				took = append(took, once())
				if took[len(took)-1] < timeout*14/10 {
					return
				}
			}
			t.Error("the caller returned after", took)
		})
	}
}

// Limiters of one name with different store timeouts have a coordinator each, so one round trip may carry several batches of the same
// bucket. Each is decided on the state that the one before has left.
func TestBucketTwiceInATrip(t *testing.T) {
	const limiters, calls, rounds = 8, 40, 50
	store := NewRedisScriptStore(redistest.Shared(t).Client(t), WithKeyPrefix(prefixOf(t)))
	var all []*RateLimiter
	for i := range limiters {
		l, err := NewSmoothBursty("x", 0.001, WithStore(store), WithMaxPermits(limiters*calls*rounds), WithInitialPermits(limiters*calls*rounds),
			WithStoreTimeout(time.Minute+time.Duration(i)*time.Second))
		require.NoError(t, err)
		all = append(all, l)
	}
	for range rounds {
		var wg sync.WaitGroup
		for _, l := range all {
			for range calls {
				wg.Go(func() {
					ok, err := l.TryAcquire(background, 1, 0)
					if !ok || err != nil {
						t.Error(ok, err)
					}
				})
			}
		}
		wg.Wait()
	}
	state, err := all[0].State(background)
	require.NoError(t, err)
	require.EqualValues(t, 1+limiters*calls*rounds, state.Seq)
	require.Less(t, state.StoredPermits, 1.0)
}
