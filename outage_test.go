package tokenbucket

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// ailing is a store that fails, or hangs, or whose probes fail, as it is told.
type ailing struct {
	store             MemoryStore
	fails, hangs, ill atomic.Bool
	stuck             chan struct{} // probes wait for it; nil: they do not
}

func (s *ailing) Apply(ctx context.Context, b *Batch) (Outcome, error) {
	if s.hangs.Load() {
		<-ctx.Done()
		return Outcome{}, fmt.Errorf("%w: hung", ErrStoreTimeout)
	}
	if s.fails.Load() && len(b.Requests) > 0 {
		return Outcome{}, fmt.Errorf("%w: failed", ErrStoreTimeout)
	}
	return s.store.Apply(ctx, b)
}

// sick is an ailing store with a probe of its own.
type sick struct{ ailing }

func (s *sick) probe(context.Context, string) error {
	if s.stuck != nil {
		<-s.stuck
	}
	if s.ill.Load() {
		return fmt.Errorf("%w: no", ErrStoreUnavailable)
	}
	return nil
}

func (s *sick) away(t *testing.T, l *RateLimiter, is bool) {
	s.ill.Store(is)
	s.fails.Store(is)
	if is {
		_, _ = l.Reserve(background, 1)
	}
	healthy(t, l, !is)
}

// What is reserved in an outage counts in the next one: short outages in a row give nobody more than one long outage.
func TestShareOutlivesOutages(t *testing.T) {
	for name, open := range map[string]func(opts ...Option) (*RateLimiter, error){
		"bursty": func(opts ...Option) (*RateLimiter, error) { return NewSmoothBursty("x", 1, opts...) },
		"pay later": func(opts ...Option) (*RateLimiter, error) {
			return NewSmoothBursty("x", 1, append(opts, WithPayment(PayLater))...)
		},
		"warm-up": func(opts ...Option) (*RateLimiter, error) { return NewSmoothWarmingUp("x", 1, 10*time.Second, opts...) },
	} {
		t.Run(name, func(t *testing.T) {
			s := &sick{}
			l, err := open(WithStore(s), WithFailurePolicy(LocalShare(1)))
			require.NoError(t, err)
			began := time.Now()
			const span = 12 * time.Second
			within := 0
			for range 5 {
				s.away(t, l, true)
				for range 10 {
					r, err := l.Reserve(background, 1)
					require.NoError(t, err)
					require.True(t, r.OK())
					if time.Since(began)+r.Delay() <= span {
						within++
					}
				}
				s.away(t, l, false)
				_, err = l.Reserve(background, 1) // the store serves the bucket
				require.NoError(t, err)
			}
			t.Logf("%d of 50 permits fall due in %v of outages", within, span)
			require.Positive(t, within)
			require.LessOrEqual(t, within, 1+int(span.Seconds()))
		})
	}
}

// Calls that fail while probes do not are no reason to begin anew either.
func TestShareOfSingleFailures(t *testing.T) {
	s := &sick{}
	l, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(LocalShare(1)), WithStoreTimeout(50*time.Millisecond))
	require.NoError(t, err)
	_, err = l.Try(background)
	require.NoError(t, err)
	s.hangs.Store(true)
	var passed atomic.Int64
	var wg sync.WaitGroup
	began := time.Now()
	for range 100 {
		wg.Go(func() {
			for time.Since(began) < 2*time.Second {
				if ok, _ := l.TryAcquire(background, 1, 500*time.Millisecond); ok {
					passed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	span := time.Since(began).Seconds()
	t.Logf("10/s: %d in %.1f s", passed.Load(), span)
	require.Positive(t, passed.Load())
	require.LessOrEqual(t, float64(passed.Load()), 1+10*span)
}

// Limiters that differ in their timeouts share this process's part.
func TestShareOfAllTimeouts(t *testing.T) {
	t.Run("script", func(t *testing.T) {
		server := redistest.Start(t)
		shareOfAllTimeouts(t, NewRedisScriptStore(server.Client(t)), func() { require.NoError(t, server.Kill()) })
	})
	t.Run("own", func(t *testing.T) {
		s := &sick{}
		shareOfAllTimeouts(t, s, func() {
			s.ill.Store(true)
			s.fails.Store(true)
		})
	})
}

func shareOfAllTimeouts(t *testing.T, store Store, kill func()) {
	var all []*RateLimiter
	for i := range 4 {
		l, err := NewSmoothBursty("x", 10, WithStore(store), WithFailurePolicy(LocalShare(1)), WithStoreTimeout(time.Second+time.Duration(i)))
		require.NoError(t, err)
		_, err = l.State(background)
		require.NoError(t, err)
		all = append(all, l)
	}
	kill()
	for _, l := range all {
		_, _ = l.Try(background)
		healthy(t, l, false)
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

// A penalty that is known of holds in an outage, too.
func TestShareKeepsThePenalty(t *testing.T) {
	s := &sick{}
	l, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(LocalShare(1)))
	require.NoError(t, err)
	require.NoError(t, l.Penalize(background, time.Minute))
	s.away(t, l, true)
	r, err := l.Reserve(background, 1)
	require.NoError(t, err)
	require.Greater(t, r.Delay(), 50*time.Second)
}

// A processor has nothing to do for those who wait while the store is away.
func TestOutageCostsNoProcessor(t *testing.T) {
	s := &sick{}
	l, err := NewSmoothBursty("x", 1, WithStore(s))
	require.NoError(t, err)
	for range 10 {
		_, err = l.Reserve(background, 1)
		require.NoError(t, err)
	}
	s.away(t, l, true)
	time.Sleep(listenMicros*time.Microsecond + 100*time.Millisecond)
	used := func() time.Duration {
		var u syscall.Rusage
		require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := used()
	time.Sleep(time.Second)
	spent := used() - before
	t.Logf("%v of a second", spent)
	require.Less(t, spent, 300*time.Millisecond)
}

// A lock that others hold is no outage: its error says so, under every policy.
func TestHeldLockOpensNoGate(t *testing.T) {
	client := redistest.Start(t).Client(t)
	for which, store := range redisStores(client) {
		for _, policy := range []FailurePolicy{FailClosed, FailOpen, LocalShare(1)} {
			t.Run(which+" "+policy.String(), func(t *testing.T) {
				name := which + policy.String()
				l, err := NewSmoothBursty(name, 10, WithStore(store), WithFailurePolicy(policy), WithStoreTimeout(200*time.Millisecond))
				require.NoError(t, err)
				_, err = l.Try(background)
				require.NoError(t, err)
				time.Sleep(200 * time.Millisecond)
				for range 5 {
					require.NoError(t, client.Set(background, "tokenbucket:{"+name+"}:lock", "other", 450*time.Millisecond).Err())
					ok, err := l.TryAcquire(background, 1, 0)
					require.ErrorIs(t, err, ErrLockNotObtained)
					require.False(t, ok)
				}
			})
		}
	}
}

// A ring that knows no server that is well says so in words of its own. Its outages, one a bucket, end with their buckets.
func TestRingAway(t *testing.T) {
	server := redistest.Start(t)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": server.Addr}})
	t.Cleanup(func() { _ = ring.Close() })
	store := NewRedisScriptStore(ring)
	l, err := NewSmoothBursty("x", 10, WithStore(store), WithFailurePolicy(FailOpen))
	require.NoError(t, err)
	_, err = l.Try(background)
	require.NoError(t, err)
	require.NoError(t, server.Kill())
	_, _ = l.Try(background)
	healthy(t, l, false)
	for began := time.Now(); time.Since(began) < 4*time.Second; time.Sleep(5 * time.Millisecond) {
		ok, err := l.Try(background)
		require.NoError(t, err)
		require.True(t, ok)
	}
	require.NotNil(t, l.line.down())
	require.EqualValues(t, 1, store.outages.Load())
	l = nil
	require.Eventually(t, func() bool {
		runtime.GC()
		return store.outages.Load() == 0
	}, 20*time.Second, 20*time.Millisecond)
}

// An outage goes on though who noticed it is used no more.
func TestOutageOutlivesALimiter(t *testing.T) {
	t.Run("observed", func(t *testing.T) { outageOutlivesALimiter(t, true) })
	t.Run("not observed", func(t *testing.T) { outageOutlivesALimiter(t, false) })
}

func outageOutlivesALimiter(t *testing.T, observed bool) {
	server := redistest.Start(t)
	store := NewRedisScriptStore(server.Client(t))
	var back atomic.Bool
	var opts []Option
	if observed {
		opts = append(opts, WithObserver(Observer{Health: func(h Health) {
			if !h.Down {
				back.Store(true)
			}
		}}))
	}
	a, err := NewSmoothBursty("a", 10, append(opts, WithStore(store))...)
	require.NoError(t, err)
	_, err = a.Try(background)
	require.NoError(t, err)
	require.NoError(t, server.Kill())
	_, err = a.Try(background)
	require.Error(t, err)
	healthy(t, a, false)
	func() {
		b, err := NewSmoothBursty("b", 10, WithStore(store))
		require.NoError(t, err)
		_, err = b.Try(background)
		require.Error(t, err)
	}()
	collected := func() bool {
		store.health.mu.Lock()
		defer store.health.mu.Unlock()
		last := store.health.last.Value()
		return last == nil || last == a.line
	}
	require.Eventually(t, func() bool { runtime.GC(); return collected() }, 10*time.Second, 20*time.Millisecond)
	time.Sleep(3 * probePause)
	require.False(t, back.Load())
	require.NotNil(t, a.line.down())
	require.NoError(t, server.Restart())
	healthy(t, a, true)
	if observed {
		require.Eventually(t, back.Load, 10*time.Second, time.Millisecond)
	}
}

// Who was told of an outage is told of its end, though the limiter that it was told of is used no more.
func TestOutageOfTheLastLimiter(t *testing.T) {
	server := redistest.Start(t)
	for name, client := range map[string]RedisClient{
		"client": server.Client(t),
		"ring":   redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"one": server.Addr}}), // each bucket by itself
	} {
		t.Run(name, func(t *testing.T) {
			if ring, ok := client.(*redis.Ring); ok {
				t.Cleanup(func() { _ = ring.Close() })
			}
			store := NewRedisScriptStore(client)
			var down, up atomic.Int64
			func() {
				l, err := NewSmoothBursty("x", 10, WithStore(store), WithObserver(Observer{Health: func(h Health) {
					if h.Down {
						down.Add(1)
					} else {
						up.Add(1)
					}
				}}))
				require.NoError(t, err)
				_, err = l.Try(background)
				require.NoError(t, err)
				require.NoError(t, server.Stop())
				defer func() { require.NoError(t, server.Continue()) }()
				_, err = l.Try(background)
				require.Error(t, err)
				require.Eventually(t, func() bool { return down.Load() == 1 }, 20*time.Second, time.Millisecond)
				require.Zero(t, up.Load())
				l = nil
				require.Eventually(t, func() bool {
					runtime.GC()
					return up.Load() == 1
				}, 20*time.Second, 20*time.Millisecond)
			}()
			require.Zero(t, store.outages.Load())
		})
	}
}

// Whether a store answers can be found out whatever kind of bucket it has.
func TestProbeOfTheOtherKind(t *testing.T) {
	s := &ailing{}
	l, err := NewSmoothWarmingUp("x", 10, time.Second, WithStore(s), WithFailurePolicy(FailOpen))
	require.NoError(t, err)
	_, err = l.Try(background)
	require.NoError(t, err)
	s.fails.Store(true)
	ok, err := l.Try(background)
	require.NoError(t, err)
	require.True(t, ok)
}

// A call returns within its timeout and the store's, though it is decided elsewhere at last: the local bucket could grant it after
// 800 ms, when 1.2 of 1.5 s have gone by.
func TestPolicyInTime(t *testing.T) {
	s := &distant{Store: NewMemoryStore()}
	const timeout, store = 900 * time.Millisecond, 600 * time.Millisecond
	l, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(LocalShare(8)), WithStoreTimeout(store))
	require.NoError(t, err)
	s.trip.Store(int64(250 * time.Millisecond)) // so that a probe may take as long as a call
	_, err = l.Try(background)
	require.NoError(t, err)
	s.trip.Store(int64(time.Hour))
	began := time.Now()
	ok, err := l.TryAcquire(background, 1, timeout)
	took := time.Since(began)
	t.Logf("%v after %v", ok, took)
	require.NoError(t, err)
	require.False(t, ok)
	require.GreaterOrEqual(t, took, 2*store-50*time.Millisecond)
	require.Less(t, took, timeout+store+200*time.Millisecond)
	ok, err = l.TryAcquire(background, 1, math.MinInt64)
	require.NoError(t, err)
	require.False(t, ok)
	s.trip.Store(0)
	healthy(t, l, true)
}

// A policy is for who waits for a lock, too, when the store goes away meanwhile; and no longer than that is it a matter of locks.
func TestOutageUnderALock(t *testing.T) {
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			server := redistest.Start(t)
			client := server.Client(t)
			l, err := NewSmoothBursty("x", 1000, WithStore(redisStores(client)[which]), WithFailurePolicy(FailOpen), WithStoreTimeout(300*time.Millisecond))
			require.NoError(t, err)
			_, err = l.Try(background)
			require.NoError(t, err)
			require.NoError(t, client.Set(background, "tokenbucket:{x}:lock", "other", 20*time.Second).Err())
			time.AfterFunc(100*time.Millisecond, func() { _ = server.Stop() })
			ok, err := l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
			require.NoError(t, server.Continue())
			healthy(t, l, true)
			require.NoError(t, client.Del(background, "tokenbucket:{x}:lock").Err())
			require.Eventually(t, func() bool {
				_, err := l.Try(background)
				return err == nil
			}, 10*time.Second, time.Millisecond)
			for range 20 {
				_, err := l.Try(background)
				require.NoError(t, err)
			}
			closed, err := NewSmoothBursty("x", 1000, WithStore(l.line.store), WithStoreTimeout(300*time.Millisecond))
			require.NoError(t, err)
			require.NoError(t, server.Stop())
			_, err = closed.TryAcquire(background, 1, 0)
			require.ErrorIs(t, err, ErrStoreTimeout)
			require.NoError(t, server.Continue())
			healthy(t, l, true)
		})
	}
}

// The local bucket of a process that was not served between two outages begins empty in the second, too.
func TestShareBeginsEmpty(t *testing.T) {
	s := &sick{}
	l, err := NewSmoothBursty("x", 5, WithMaxPermits(1000), WithStore(s), WithFailurePolicy(LocalShare(1)))
	require.NoError(t, err)
	_, err = l.Try(background)
	require.NoError(t, err)
	s.away(t, l, true)
	s.away(t, l, false)
	time.Sleep(time.Second) // would save up five
	s.ill.Store(true)
	l.line.health.suspect(l.line)
	healthy(t, l, false)
	began := time.Now()
	passed := 0
	for range 50 {
		if ok, _ := l.TryAcquire(background, 1, 0); ok {
			passed++
		}
	}
	require.LessOrEqual(t, float64(passed), 1+5*time.Since(began).Seconds())
	s.away(t, l, false)
}

// Fewer instances are believed when they have been fewer for as long as a silent one counts, and were asked for.
func TestCountOfInstances(t *testing.T) {
	m := &member{}
	for _, n := range []int64{10, 1, 3} {
		m.count(n)
		require.EqualValues(t, 10, m.live.Load())
	}
	m.seen = m.seen.Add(-liveFor - 1)
	m.count(3)
	require.EqualValues(t, 3, m.live.Load())
	m.count(4)
	require.EqualValues(t, 4, m.live.Load())
}

// Negative zeros are zeros, in Lua and Go.
func TestNegativeZero(t *testing.T) {
	zero := math.Copysign(0, -1)
	for which, store := range redisStores(redistest.Shared(t).Client(t)) {
		for i, opts := range [][]Option{{WithInitialPermits(zero)}, {WithMaxPermits(zero)}, {WithMaxPermits(5e-324), WithInitialPermits(zero)}} {
			l, err := NewSmoothBursty(fmt.Sprint(t.Name(), which, i), 1e7, append(opts, WithStore(store))...)
			require.NoError(t, err)
			require.NoError(t, l.SetRate(background, 1.0/3))
			for range 3 {
				_, err = l.Reserve(background, 1)
				require.NoError(t, err)
			}
		}
	}
}

// A wrong password opens no gate of a ring, which says of shards that refuse its heartbeats that they are down.
func TestRingWithAWrongPassword(t *testing.T) {
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
		l, err := NewSmoothBursty("x", 10, WithStore(NewRedisScriptStore(client)), WithFailurePolicy(FailOpen))
		require.NoError(t, err)
		for range 20 {
			ok, err := l.Try(background)
			if c.opens {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, "WRONGPASS")
			}
			require.Equal(t, c.opens, ok)
		}
	}
}

// A call waits for the probe of another no longer than for one of its own.
func TestProbeOfAPatientLimiter(t *testing.T) {
	s := &sick{}
	patient, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(FailOpen), WithStoreTimeout(time.Minute))
	require.NoError(t, err)
	l, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(FailOpen), WithStoreTimeout(100*time.Millisecond))
	require.NoError(t, err)
	l.line.health = patient.line.health // as of limiters of one Redis
	release := make(chan struct{})
	s.stuck = release
	defer close(release)
	s.fails.Store(true)
	go func() { _, _ = patient.Try(background) }()
	require.Eventually(t, func() bool {
		patient.line.health.mu.Lock()
		defer patient.line.health.mu.Unlock()
		return patient.line.health.asked != nil
	}, 10*time.Second, time.Millisecond)
	answered := make(chan bool)
	go func() {
		ok, err := l.Try(background)
		answered <- ok && err == nil
	}()
	select {
	case passed := <-answered:
		require.True(t, passed)
	case <-time.After(20 * time.Second):
		t.Fatal("it waits for the other's probe")
	}
}

// Whether a store answers is found out without touching the bucket, even if the store's clock was set back.
func TestProbeLeavesTheBucketAlone(t *testing.T) {
	s := &ailing{}
	clock := clockwork.NewFakeClock()
	l, err := NewSmoothBursty("x", 10, WithStore(s), WithClock(clock), WithFailurePolicy(FailOpen), WithInitialPermits(10))
	require.NoError(t, err)
	_, err = l.Try(background)
	require.NoError(t, err)
	before, err := l.State(background)
	require.NoError(t, err)
	clock.Advance(-time.Hour)
	require.NoError(t, l.line.health.reach(background, l.line))
	clock.Advance(time.Hour)
	after, err := l.State(background)
	require.NoError(t, err)
	require.Equal(t, before, after)
}

// Instances that cannot be counted any more, since somebody must repair something, are those that were given.
func TestUncountable(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t)
	l, err := NewSmoothBursty("x", 5, WithStore(NewRedisScriptStore(client)), WithFailurePolicy(LocalShare(7)))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return l.member.live.Load() == 1 }, 20*time.Second, time.Millisecond)
	require.NoError(t, client.Set(background, "tokenbucket:instances", "another's", 0).Err())
	require.Eventually(t, func() bool { return l.member.live.Load() == 0 }, 20*time.Second, time.Millisecond)
	share, err := l.locally()
	require.NoError(t, err)
	require.InDelta(t, 5.0/7, share.own.Rate, 1e-9)
}

// What not even a process's part could ever grant is an error, not an Acquire that has returned.
func TestShareOfTooMuch(t *testing.T) {
	s := &sick{}
	l, err := NewSmoothBursty("x", 0.001, WithStore(s), WithFailurePolicy(LocalShare(1_000_000)))
	require.NoError(t, err)
	s.away(t, l, true)
	_, err = l.Acquire(background, 100_000) // 3 years of the whole, 3 million of the part
	require.ErrorIs(t, err, ErrInvalidPermits)
	require.ErrorIs(t, err, ErrStoreUnavailable)
}

// What the batch that came back last has kept is what the next one uses; what was kept by one that came back too late ends.
func TestLateMemo(t *testing.T) {
	l, err := NewSmoothBursty("x", 5, WithStore(NewRedisStore(redistest.Shared(t).Client(t))))
	require.NoError(t, err)
	late, last := &flight{late: true, limiter: l}, &flight{limiter: l}
	late.batch.memo, last.batch.memo = new(memo), &memo{token: "kept"}
	l.line.mu.Lock()
	defer l.line.mu.Unlock()
	l.line.settle(late, &Outcome{}, ErrStoreTimeout)
	l.line.settle(last, &Outcome{}, ErrStoreTimeout)
	require.Same(t, last.batch.memo, l.line.memo)
	last.batch.memo.token = ""
}
