package limiter

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// What each policy gives while Redis is hung or killed, for every kind of store: an outage is noticed, from then on a call
// costs far less than a round trip, and when Redis is back, that is noticed by itself.
func TestFailurePolicies(t *testing.T) {
	t.Parallel()
	faults := map[string]struct{ begin, end func(*redistest.Server) error }{
		"hung":    {(*redistest.Server).Stop, (*redistest.Server).Continue},
		"refused": {(*redistest.Server).Kill, (*redistest.Server).Restart},
	}
	for name, fault := range faults {
		for _, which := range []string{"script", "lock"} {
			t.Run(name+"/"+which, func(t *testing.T) {
				t.Parallel()
				server := redistest.Start(t)
				store := redisStores(server.Client(t, once))[which]
				use := func(bucket string, store tb.Store, opts ...tb.Option) *tb.RateLimiter {
					l := open(t, bucket, 10, store, append(opts, tb.WithMaxPermits(20), tb.WithInitialPermits(20), tb.WithStoreTimeout(unhurried))...)
					ok, err := l.Try(background)
					require.NoError(t, err)
					require.True(t, ok)
					return l
				}
				instances := func(n int64) {
					client := server.Client(t)
					require.Eventually(t, func() bool { return client.ZCard(background, "tokenbucket:instances").Val() == n }, 20*time.Second, time.Millisecond)
				}
				for i := range 3 { // instances, a store each
					other := use("share", redisStores(server.Client(t))[which], tb.WithFailurePolicy(tb.LocalShare(1)))
					defer runtime.KeepAlive(other)
					instances(int64(i + 1))
				}
				var health told
				closed := use("closed", store, health.option())
				opened := use("open", store, tb.WithFailurePolicy(tb.FailOpen))
				shared := use("share", store, tb.WithFailurePolicy(tb.LocalShare(5)))
				beaten(t, server.Client(t), 4, 1) // it knows all four; with fewer, the share would be another

				require.NoError(t, fault.begin(server))
				began := time.Now()
				_, err := closed.Try(background)
				require.Error(t, err)
				health.away(t, true)
				t.Logf("noticed after %v: %v", time.Since(began), err)
				require.Error(t, health.last.Err)
				require.Equal(t, tb.FailClosed, health.last.Policy)

				costs := make([]time.Duration, 1001)
				for i := range costs {
					began := time.Now()
					ok, err := closed.Try(background)
					costs[i] = time.Since(began)
					require.False(t, ok)
					require.ErrorIs(t, err, tb.ErrStoreUnavailable)
					require.ErrorContains(t, err, `"closed"`)
				}
				slices.Sort(costs)
				t.Logf("a call costs %v (median of %d; wanted less than 100 µs)", costs[500], len(costs))
				require.Less(t, costs[500], time.Millisecond)
				_, err = closed.State(background)
				require.ErrorIs(t, err, tb.ErrStoreUnavailable)

				for range 100 {
					ok, err := opened.Try(background)
					require.NoError(t, err)
					require.True(t, ok)
				}
				r, err := opened.Reserve(background, 3)
				require.NoError(t, err)
				<-r.Ready()
				require.NoError(t, r.Cancel(background))
				_, err = opened.Acquire(background, 1)
				require.NoError(t, err)
				_, err = opened.TryAcquire(background, 0, 0)
				require.ErrorIs(t, err, tb.ErrInvalidPermits, "a policy is not for bad input")
				over, cancel := context.WithCancel(background)
				cancel()
				_, err = opened.Try(over)
				require.ErrorIs(t, err, context.Canceled)

				began = time.Now()
				passed := 0
				for time.Since(began) < 2*time.Second {
					ok, err := shared.TryAcquire(background, 1, 0)
					require.NoError(t, err)
					if ok {
						passed++
					}
					time.Sleep(time.Millisecond)
				}
				span := time.Since(began).Seconds()
				t.Logf("a local share of a quarter of 10/s let %d pass in %.2f s", passed, span)
				require.LessOrEqual(t, float64(passed), 2.5*span)
				require.GreaterOrEqual(t, passed, 2)
				ok, err := shared.TryAcquire(background, 20, time.Second)
				require.NoError(t, err, "the whole bucket could grant it, so it is no mistake")
				require.False(t, ok)
				waited, err := shared.Acquire(background, 1)
				require.NoError(t, err)
				require.LessOrEqual(t, waited, 400*time.Millisecond)

				require.NoError(t, fault.end(server))
				t.Logf("back %v after the server (wanted less than 1 s)", health.away(t, false))
				require.Positive(t, health.last.After)
				for _, l := range []*tb.RateLimiter{closed, opened, shared} {
					served(t, func() error { _, err := l.State(background); return err })
					served(t, func() error { _, err := l.Try(background); return err })
				}
				downs, ups := health.counts()
				require.Equal(t, []int{1, 1}, []int{downs, ups})
			})
		}
	}
}

// A lost reply shuts out no caller: the probe is answered. On a busy machine it may be late, but not five times in a row.
func TestLostReplyIsNoOutage(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	lose := func() (failed, downs int) {
		proxy := redistest.StartProxy(t, server.Addr)
		proxy.Match("evalsha", redistest.Only(3, redistest.LoseReply))
		client := redis.NewClient(&redis.Options{Addr: proxy.Addr, ReadTimeout: patient})
		t.Cleanup(func() { _ = client.Close() })
		var health told
		l := open(t, "x", 1000, tb.NewRedisScriptStore(client), tb.WithStoreTimeout(unhurried), health.option())
		for range 50 {
			if _, err := l.Try(background); err != nil {
				require.ErrorIs(t, err, tb.ErrStoreUnavailable)
				failed++
			}
		}
		downs, _ = health.counts()
		return failed, downs
	}
	failed, downs := lose()
	for attempt := 1; downs > 0 && attempt < 5; attempt++ {
		t.Logf("%d calls failed in %d outages", failed, downs)
		failed, downs = lose()
	}
	require.Zero(t, downs)
	require.Equal(t, 1, failed)
}

// The instances of a fleet count themselves: each has its part, and who has gone counts no longer than seven seconds.
func TestInstancesAreCounted(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	client := server.Client(t)
	var fleet []*tb.RateLimiter
	var health [3]told
	for i := range health { // a store each, as in processes of their own
		store := tb.NewRedisScriptStore(client)
		l := open(t, "x", 3, store, tb.WithFailurePolicy(tb.LocalShare(100)), health[i].option())
		defer runtime.KeepAlive(open(t, "y", 3, store, tb.WithFailurePolicy(tb.LocalShare(100)))) // a process is counted once
		fleet = append(fleet, l)
	}
	beaten(t, client, 3, 2) // and has had an answer when all were there
	require.EqualValues(t, 3, client.ZCard(background, "tokenbucket:instances").Val())
	ttl := client.PTTL(background, "tokenbucket:instances").Val()
	require.Positive(t, ttl)
	require.LessOrEqual(t, ttl, 7*time.Second)
	require.NoError(t, server.Kill())
	for i, l := range fleet {
		requireLocalRate(t, 1, l, &health[i]) // a third of 3/s, not a hundredth
	}
}

// requireLocalRate requires the rate of a process's local share while the store is unavailable, by the time that ten permits take. The
// decision of each reservation is known to within the duration of its call.
func requireLocalRate(t *testing.T, want float64, l *tb.RateLimiter, health *told) {
	t.Helper()
	due := func(permits int) (from, to time.Time) {
		asked := time.Now()
		r, err := l.Reserve(background, permits)
		require.NoError(t, err)
		return asked.Add(r.Delay()), time.Now().Add(r.Delay())
	}
	due(1)
	health.away(t, true)
	due(5) // the debt is then so large that a pause stores no permits
	firstFrom, firstTo := due(1)
	lastFrom, lastTo := due(10)
	require.LessOrEqual(t, 10/lastTo.Sub(firstFrom).Seconds(), want+0.01)
	require.GreaterOrEqual(t, 10/lastFrom.Sub(firstTo).Seconds(), want-0.01)
}

// If an error that needs a repair prevents the count of instances, the configured number is used.
func TestUncountable(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	client := server.Client(t)
	var health told
	l := open(t, "x", 5, tb.NewRedisScriptStore(client), tb.WithFailurePolicy(tb.LocalShare(7)), tb.WithStoreTimeout(patient), health.option())
	_, err := l.Try(background)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return client.ZCard(background, "tokenbucket:instances").Val() == 1 }, 20*time.Second, time.Millisecond)
	require.NoError(t, client.Set(background, "tokenbucket:instances", "another's", 0).Err())
	require.Eventually(t, func() bool { // it is asked every two seconds, and has had the first of two answers
		return counted(t, client, "errorstats", "errorstat_WRONGTYPE:count=") >= 2
	}, 20*time.Second, 5*time.Millisecond)
	require.NoError(t, server.Kill())
	requireLocalRate(t, 5.0/7, l, &health)
}

// A shadow costs no more than the store's timeout when Redis hangs, and the call passes.
func TestShadow(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	l := open(t, "hung", 5, tb.NewRedisScriptStore(server.Client(t)), tb.WithShadow())
	require.NoError(t, server.Stop())
	ok, err := l.Try(background)
	require.NoError(t, err)
	require.True(t, ok)
}

// Limiters that differ in their timeouts share this process's part.
func TestShareOfAllTimeouts(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := tb.NewRedisScriptStore(server.Client(t))
	var all []*tb.RateLimiter
	var health [4]told
	for i := range health {
		l := open(t, "x", 10, store, tb.WithFailurePolicy(tb.LocalShare(1)), tb.WithStoreTimeout(patient+time.Duration(i)), health[i].option())
		_, err := l.State(background)
		require.NoError(t, err)
		all = append(all, l)
	}
	require.NoError(t, server.Kill())
	for i, l := range all {
		_, _ = l.Try(background)
		health[i].away(t, true)
	}
	began := time.Now()
	within := 0
	for i := range 40 {
		r, err := all[i%4].Reserve(background, 1)
		require.NoError(t, err)
		if r.Delay() <= time.Second {
			within++
		}
	}
	require.Positive(t, within)
	require.LessOrEqual(t, float64(within), 1+10*(1+time.Since(began).Seconds()))
}

// A lock that others hold is no outage: its error says so, under every policy. The store is asked whether it is there for as long as
// three of its answers took, and one of them takes a second, so that a machine that stalls is no outage either.
func TestHeldLockOpensNoGate(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t)
	for which, store := range redisStores(client, tb.WithLockTTL(time.Minute)) {
		slow := open(t, "slow", 10, store, tb.WithStoreTimeout(patient))
		t.Cleanup(func() { runtime.KeepAlive(slow) }) // the longest timeout of the limiters in use counts for probes
		require.NoError(t, server.Stop())
		time.AfterFunc(time.Second, func() { _ = server.Continue() })
		_, err := slow.Try(background)
		require.NoError(t, err)
		for _, policy := range []tb.FailurePolicy{tb.FailClosed, tb.FailOpen, tb.LocalShare(1)} {
			t.Run(which+" "+fmt.Sprint("policy ", policy), func(t *testing.T) {
				t.Parallel()
				name := fmt.Sprintf("%s-%d-%d", which, policy, rand.Uint64())
				l := open(t, name, 10, store, tb.WithFailurePolicy(policy), tb.WithStoreTimeout(2*time.Second),
					tb.WithMaxPermits(1000), tb.WithInitialPermits(1000)) // so that no call is refused by a snapshot
				_, err := l.Try(background)
				require.NoError(t, err)
				require.Eventually(t, func() bool { // none that was kept is left
					return client.SetNX(background, "tokenbucket:{"+name+"}:lock", "other", time.Minute).Val()
				}, 20*time.Second, time.Millisecond)
				for range 3 {
					ok, err := l.TryAcquire(background, 1, 0)
					require.ErrorIs(t, err, tb.ErrLockNotObtained)
					require.False(t, ok)
				}
			})
		}
	}
}

// A ring that knows no server that is well says so in words of its own. Its outages, one a bucket, end with their buckets.
func TestRingAway(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": server.Addr}})
	t.Cleanup(func() { _ = ring.Close() })
	store := tb.NewRedisScriptStore(ring)
	var health told
	func() {
		l := open(t, "x", 10, store, tb.WithFailurePolicy(tb.FailOpen), tb.WithStoreTimeout(unhurried), health.option())
		_, err := l.Try(background)
		require.NoError(t, err)
		require.NoError(t, server.Kill())
		_, _ = l.Try(background)
		health.away(t, true)
		for began := time.Now(); time.Since(began) < 4*time.Second; time.Sleep(5 * time.Millisecond) {
			ok, err := l.Try(background)
			require.NoError(t, err)
			require.True(t, ok)
		}
		downs, ups := health.counts()
		require.Equal(t, []int{1, 0}, []int{downs, ups})
	}()
	require.Eventually(t, func() bool {
		runtime.GC()
		_, ups := health.counts()
		return ups == 1
	}, 20*time.Second, 20*time.Millisecond)
}

// An outage goes on though who noticed it is used no more.
func TestOutageOutlivesALimiter(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := tb.NewRedisScriptStore(server.Client(t, once))
	var health told
	a := open(t, "a", 10, store, tb.WithStoreTimeout(patient), health.option())
	_, err := a.Try(background)
	require.NoError(t, err)
	require.NoError(t, server.Kill())
	_, err = a.Try(background)
	require.Error(t, err)
	health.away(t, true)
	func() {
		b := open(t, "b", 10, store)
		_, err = b.Try(background)
		require.Error(t, err)
	}()
	for range 50 { // nothing happens when the one is collected
		runtime.GC()
		time.Sleep(20 * time.Millisecond)
	}
	_, err = a.Try(background)
	require.ErrorIs(t, err, tb.ErrStoreUnavailable)
	_, ups := health.counts()
	require.Zero(t, ups)
	require.NoError(t, server.Restart())
	health.away(t, false)
	served(t, func() error { _, err := a.Try(background); return err })
}

// A limiter's observer that was notified of the beginning of an outage is notified of its end, even if the limiter is no longer in use.
func TestOutageOfTheLastLimiter(t *testing.T) {
	t.Parallel()
	for name, connect := range map[string]func(*testing.T, *redistest.Server) tb.RedisClient{
		"client": func(t *testing.T, server *redistest.Server) tb.RedisClient { return server.Client(t) },
		"ring": func(t *testing.T, server *redistest.Server) tb.RedisClient { // each bucket by itself
			ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"one": server.Addr}})
			t.Cleanup(func() { _ = ring.Close() })
			return ring
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			store := tb.NewRedisScriptStore(connect(t, server))
			var health told
			func() {
				l := open(t, "x", 10, store, tb.WithStoreTimeout(unhurried), health.option())
				_, err := l.Try(background)
				require.NoError(t, err)
				require.NoError(t, server.Stop())
				_, err = l.Try(background)
				require.Error(t, err)
				health.away(t, true)
				runtime.KeepAlive(l) // otherwise there is no limiter to be notified of its beginning
			}()
			require.Eventually(t, func() bool {
				runtime.GC()
				downs, ups := health.counts()
				return downs == 1 && ups == 1
			}, 20*time.Second, 20*time.Millisecond)
			require.NoError(t, server.Continue())
			_, err := open(t, "x", 10, store).Try(background)
			var met interface{ StoreFailure() error } // as this call may on a busy machine
			if !errors.As(err, &met) {
				require.NoError(t, err, "no outage is left")
			}
		})
	}
}

// A policy is for who waits for a lock, too, when the store goes away meanwhile; and no longer than that is it a matter of locks.
func TestOutageUnderALock(t *testing.T) {
	t.Parallel()
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			client := server.Client(t)
			store := redisStores(client, tb.WithLockTTL(time.Minute))[which]
			const timeout = unhurried
			var health told
			l := open(t, "x", 1000, store, tb.WithFailurePolicy(tb.FailOpen), tb.WithStoreTimeout(timeout), health.option(),
				tb.WithMaxPermits(1000), tb.WithInitialPermits(1000)) // so that no call is refused by a snapshot
			_, err := l.Try(background)
			require.NoError(t, err)
			require.NoError(t, client.Set(background, "tokenbucket:{x}:lock", "other", time.Minute).Err())
			time.AfterFunc(time.Second, func() { _ = server.Stop() })
			ok, err := l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
			require.NoError(t, server.Continue())
			health.away(t, false)
			require.NoError(t, client.Ping(background).Err()) // calls that have asked for the lock meanwhile have not got it
			require.NoError(t, client.Del(background, "tokenbucket:{x}:lock").Err())
			require.Eventually(t, func() bool {
				_, err := l.Try(background)
				return err == nil
			}, 20*time.Second, time.Millisecond)
			for range 20 {
				_, err := l.Try(background)
				require.NoError(t, err)
			}
			closed := open(t, "x", 1000, store, tb.WithStoreTimeout(timeout), tb.WithMaxPermits(1000))
			require.NoError(t, server.Stop())
			_, err = closed.TryAcquire(background, 1, 0)
			require.ErrorIs(t, err, tb.ErrStoreTimeout)
			require.NoError(t, server.Continue())
			health.away(t, false)
		})
	}
}

// A wrong password opens no gate of a ring, which calls shards down that refuse its heartbeats. A shard that the machine gives no time
// cannot reply with the reason, and the gate opens. That takes the whole timeout, and does not happen five times in a row.
func TestRingWithAWrongPassword(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	require.NoError(t, server.Client(t).Do(background, "ACL", "SETUSER", "ring", "on", ">right", "~*", "+@all").Err())
	for _, c := range []struct {
		password string
		opens    bool
	}{{"wrong", false}, {"right", true}} {
		client := redis.NewRing(&redis.RingOptions{
			Addrs: map[string]string{"one": server.Addr}, Username: "ring", Password: c.password, HeartbeatFrequency: 20 * time.Millisecond,
		})
		t.Cleanup(func() { _ = client.Close() })
		if c.opens {
			require.NoError(t, client.Ping(background).Err())
			require.NoError(t, server.Kill())
		}
		require.Eventually(t, func() bool {
			err := client.Ping(background).Err()
			return err != nil && script.Unreachable(err.Error())
		}, 20*time.Second, 10*time.Millisecond)
		l := open(t, "x", 10, tb.NewRedisScriptStore(client), tb.WithFailurePolicy(tb.FailOpen))
		for range 20 {
			began := time.Now()
			ok, err := l.Try(background)
			for attempt := 1; ok && !c.opens && attempt < 5; attempt++ {
				if attempt == 1 {
					require.GreaterOrEqual(t, time.Since(began), outage.ProbeTimeout, "it was opened, and the shard was not waited for")
				}
				time.Sleep(5 * outage.ProbePause) // until the shard is found again
				ok, err = l.Try(background)
			}
			if c.opens {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, "WRONGPASS")
			}
			require.Equal(t, c.opens, ok)
		}
	}
}

// Every call that meets a store which is away gets the same sentinel: also the first ones, before the outage was noticed.
func TestFirstFailuresHaveTheSentinel(t *testing.T) {
	t.Parallel()
	for _, which := range []string{"script", "lock"} {
		for fault, begin := range map[string]func(*redistest.Server) error{"killed": (*redistest.Server).Kill, "stopped": (*redistest.Server).Stop} {
			t.Run(which+" "+fault, func(t *testing.T) {
				t.Parallel()
				server := redistest.Start(t)
				// Longer than several locks last, which a busy machine may leave behind.
				l := open(t, "x", 1000, redisStores(server.Client(t))[which], tb.WithStoreTimeout(unhurried))
				var served, failed atomic.Int64
				var callers sync.WaitGroup
				ctx, stop := context.WithCancel(t.Context())
				check := func(err error) {
					if err == nil {
						served.Add(1)
						return
					}
					failed.Add(1)
					assert.ErrorIs(t, err, tb.ErrStoreUnavailable)
				}
				for range 8 {
					callers.Go(func() {
						for ctx.Err() == nil {
							_, err := l.Try(background)
							check(err)
							_, err = l.State(background)
							check(err)
							r, err := l.TryReserve(background, 1, time.Second)
							check(err)
							if err == nil && r.OK() {
								check(r.Cancel(background))
							}
							time.Sleep(time.Millisecond)
						}
					})
				}
				require.Eventually(t, func() bool { return served.Load() > 100 }, 20*time.Second, time.Millisecond)
				require.NoError(t, begin(server))
				require.Eventually(t, func() bool { return failed.Load() > 100 }, 20*time.Second, time.Millisecond)
				time.Sleep(500 * time.Millisecond) // the outage is noticed, and probed
				stop()
				callers.Wait()
			})
		}
	}
}
