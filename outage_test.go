package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Reservations of an outage count in the next one: several short outages grant no more than one long outage.
func TestShareOutlivesOutages(t *testing.T) {
	for name, open := range map[string]func(opts ...Option) (*RateLimiter, error){
		"bursty": func(opts ...Option) (*RateLimiter, error) { return NewSmoothBursty("x", 1, opts...) },
		"pay later": func(opts ...Option) (*RateLimiter, error) {
			return NewSmoothBursty("x", 1, append(opts, WithPayment(PayLater))...)
		},
		"warm-up": func(opts ...Option) (*RateLimiter, error) { return NewSmoothWarmingUp("x", 1, 10*time.Second, opts...) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &sick{}
				l, err := open(WithStore(s), WithFailurePolicy(LocalShare(1)), Logged(t))
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
		})
	}
}

// Failed calls without a failed probe do not empty the local share either.
func TestShareOfSingleFailures(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &sick{}
		l, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(LocalShare(1)), WithStoreTimeout(50*time.Millisecond), Logged(t))
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
		s.hangs.Store(false)
	})
}

// Limiters that differ in their timeouts share this process's part.
func TestShareOfAllTimeouts(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &sick{}
		var all []*RateLimiter
		for i := range 4 {
			l, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(LocalShare(1)),
				WithStoreTimeout(time.Second+time.Duration(i)), Logged(t))
			require.NoError(t, err)
			_, err = l.State(background)
			require.NoError(t, err)
			all = append(all, l)
		}
		for _, l := range all {
			s.away(t, l, true)
		}
		within := 0
		for i := range 40 {
			r, err := all[i%4].Reserve(background, 1)
			require.NoError(t, err)
			if r.Delay() <= time.Second {
				within++
			}
		}
		require.Positive(t, within)
		require.LessOrEqual(t, within, 1+10)
	})
}

// A penalty that is known of holds in an outage, too.
func TestShareKeepsThePenalty(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &sick{}
		l, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(LocalShare(1)), Logged(t))
		require.NoError(t, err)
		require.NoError(t, l.Penalize(background, time.Minute))
		s.away(t, l, true)
		r, err := l.Reserve(background, 1)
		require.NoError(t, err)
		require.Greater(t, r.Delay(), 50*time.Second)
	})
}

// consulted is a clock that counts how often it is looked at.
type consulted struct {
	clockwork.Clock
	looks atomic.Int64
}

func (c *consulted) Since(from time.Time) time.Duration {
	if c.looks.Add(1) > 100_000 {
		panic("the clock is looked at again and again, and time cannot go on")
	}
	return c.Clock.Since(from)
}

// A processor has nothing to do for those who wait while the store is away.
func TestOutageCostsNoProcessor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &sick{}
		clock := &consulted{Clock: clockwork.NewRealClock()}
		l, err := NewSmoothBursty("x", 1, WithStore(s), WithClock(clock), Logged(t))
		require.NoError(t, err)
		var held []*Reservation
		for range 100 {
			r, err := l.Reserve(background, 1)
			require.NoError(t, err)
			held = append(held, r)
		}
		s.away(t, l, true)
		time.Sleep(2 * engine.ListenMicros * time.Microsecond)
		before := clock.looks.Load()
		time.Sleep(10 * time.Second)
		looks := clock.looks.Load() - before
		t.Logf("the clock is looked at %d times in ten seconds", looks)
		// Ten reservations fall due, and twenty times the line looks whether the bucket is held back.
		require.LessOrEqual(t, looks, int64(300))
		for _, r := range held {
			_ = r.Cancel(background)
		}
	})
}

// A lock that others hold is no outage: its error says so, under every policy.
func TestHeldLockOpensNoGate(t *testing.T) {
	for _, which := range []string{"lock", "script"} {
		for _, policy := range []FailurePolicy{FailClosed, FailOpen, LocalShare(1)} {
			t.Run(which+" "+policy.String(), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					client := new(fakeRedis)
					client.locked.Store(true)
					l, err := NewSmoothBursty("x", 10, WithStore(redisStores(client)[which]), WithFailurePolicy(policy), WithStoreTimeout(200*time.Millisecond))
					require.NoError(t, err)
					for range 5 {
						began := time.Now()
						ok, err := l.TryAcquire(background, 1, 0)
						require.ErrorIs(t, err, ErrLockNotObtained)
						require.False(t, ok)
						require.LessOrEqual(t, time.Since(began), 200*time.Millisecond)
					}
				})
			})
		}
	}
}

// renaming is a store with a tenant's names, that has all else of its own.
type renaming struct{ *RedisStore }

func (s renaming) Apply(ctx context.Context, b *Batch) error {
	return s.RedisStore.Apply(ctx, &Batch{Names: []string{"tenant/" + b.Names[0]}, Decide: b.Decide})
}

// So it does also to those who come while others wait for the lock, and behind a wrapper.
func TestHeldLockOpensNoGateToACrowd(t *testing.T) {
	for name, wrap := range map[string]func(*RedisStore) Store{
		"lock": func(s *RedisStore) Store { return s }, "other names": func(s *RedisStore) Store { return renaming{s} },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				client := new(fakeRedis)
				client.locked.Store(true)
				l, err := NewSmoothBursty("x", 10, WithStore(wrap(NewRedisStore(client))), WithFailurePolicy(FailOpen), WithStoreTimeout(200*time.Millisecond))
				require.NoError(t, err)
				var wg sync.WaitGroup
				for i := range 20 {
					time.AfterFunc(time.Duration(i)*30*time.Millisecond, func() {
						wg.Go(func() {
							began := time.Now()
							ok, err := l.TryAcquire(background, 1, 0)
							require.ErrorIs(t, err, ErrLockNotObtained, "caller %d", i)
							require.False(t, ok)
							require.LessOrEqual(t, time.Since(began), 200*time.Millisecond)
						})
					})
				}
				time.Sleep(2 * time.Second)
				wg.Wait()
			})
		})
	}
}

// That others held the lock once says nothing of a store that hangs later.
func TestHangBehindAHeldLock(t *testing.T) {
	for name, store := range map[string]func(*fakeRedis) Store{
		"lock":        func(c *fakeRedis) Store { return NewRedisStore(c) },
		"script":      func(c *fakeRedis) Store { return NewRedisScriptStore(c) },
		"other names": func(c *fakeRedis) Store { return renaming{NewRedisStore(c)} },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				client := new(fakeRedis)
				client.locked.Store(true)
				l, err := NewSmoothBursty("x", 10, WithStore(store(client)), WithStoreTimeout(200*time.Millisecond))
				require.NoError(t, err)
				_, err = l.TryAcquire(background, 1, 0)
				require.ErrorIs(t, err, ErrLockNotObtained)
				time.Sleep(time.Second)
				client.locked.Store(false)
				client.hangs.Store(true)
				defer client.hangs.Store(false)
				_, err = l.TryAcquire(background, 1, 0)
				require.ErrorIs(t, err, ErrStoreUnavailable)
				require.NotErrorIs(t, err, ErrLockNotObtained)
			})
		})
	}
}

// collect runs the garbage collector until something has been collected. It waits outside of a bubble's time.
func collect(t *testing.T, collected func() bool) {
	t.Helper()
	for i := 0; !collected(); i++ {
		require.Less(t, i, 2000, "it is still used")
		runtime.GC()
		runtime.Gosched() // what follows runs in a goroutine of the runtime's
	}
}

// An outage goes on though who noticed it is used no more.
func TestOutageOutlivesALimiter(t *testing.T) {
	t.Run("observed", func(t *testing.T) { outageOutlivesALimiter(t, true) })
	t.Run("not observed", func(t *testing.T) { outageOutlivesALimiter(t, false) })
}

func outageOutlivesALimiter(t *testing.T, observed bool) {
	bubble(t, func(t *testing.T) {
		store := newOneServer()
		var back atomic.Bool
		opts := []Option{WithStore(store), Logged(t)}
		if observed {
			opts = append(opts, WithObserver(Observer{Health: func(h Health) {
				if !h.Down {
					back.Store(true)
				}
			}}))
		}
		a, err := NewSmoothBursty("a", 10, opts...)
		require.NoError(t, err)
		_, err = a.Try(background)
		require.NoError(t, err)
		store.away(t, a, true)
		func() {
			b, err := NewSmoothBursty("b", 10, WithStore(store))
			require.NoError(t, err)
			_, err = b.Try(background)
			require.Error(t, err)
		}()
		collect(t, func() bool {
			last := a.limiter.Coordinator.Health.Last()
			return last == nil || last == a.limiter.Coordinator
		})
		time.Sleep(3 * outage.ProbePause)
		require.False(t, back.Load())
		require.NotNil(t, a.limiter.Coordinator.Down())
		store.away(t, a, false)
		require.Equal(t, observed, back.Load())
	})
}

// The observer that received an outage receives its end, even if its limiter is no longer used.
func TestOutageOfTheLastLimiter(t *testing.T) {
	t.Run("one server", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			s := newOneServer()
			outageOfTheLastLimiter(t, s, &s.sick)
			require.Zero(t, s.outages.Outages())
		})
	})
	t.Run("bucket by bucket", func(t *testing.T) { // as with a ring
		bubble(t, func(t *testing.T) {
			s := new(sick)
			outageOfTheLastLimiter(t, s, s)
		})
	})
}

func outageOfTheLastLimiter(t *testing.T, store Store, s *sick) {
	var down, up atomic.Int64
	func() {
		l, err := NewSmoothBursty("x", 10, WithStore(store), Logged(t), WithObserver(Observer{Health: func(h Health) {
			if h.Down {
				down.Add(1)
			} else {
				up.Add(1)
			}
		}}))
		require.NoError(t, err)
		_, err = l.Try(background)
		require.NoError(t, err)
		s.away(t, l, true)
		synctest.Wait() // for the observer's call
		require.EqualValues(t, 1, down.Load())
		require.Zero(t, up.Load())
	}()
	collect(t, func() bool {
		time.Sleep(outage.ProbePause) // the next probe finds no limiter
		return up.Load() == 1
	})
}

// Whether a store answers can be found out whatever kind of bucket it has.
func TestProbeOfTheOtherKind(t *testing.T) {
	s := &ailing{}
	l, err := NewSmoothWarmingUp("x", 10, time.Second, WithStore(s), WithFailurePolicy(FailOpen), Logged(t))
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
	bubble(t, func(t *testing.T) {
		s := &distant{Store: NewMemoryStore()}
		const timeout, store = 900 * time.Millisecond, 600 * time.Millisecond
		l, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(LocalShare(8)), WithStoreTimeout(store), Logged(t))
		require.NoError(t, err)
		s.trip.Store(int64(250 * time.Millisecond)) // so that a probe may take as long as a call
		_, err = l.Try(background)
		require.NoError(t, err)
		s.trip.Store(int64(time.Hour))
		began := time.Now()
		ok, err := l.TryAcquire(background, 1, timeout)
		took := time.Since(began)
		require.NoError(t, err)
		require.False(t, ok)
		require.GreaterOrEqual(t, took, 2*store)
		require.LessOrEqual(t, took, timeout+store)
		ok, err = l.TryAcquire(background, 1, math.MinInt64)
		require.NoError(t, err)
		require.False(t, ok)
		s.trip.Store(0)
		healthy(t, l, true)
	})
}

// A policy is for who waits for a lock, too, when the store goes away meanwhile; and no longer than that is it a matter of locks.
func TestOutageUnderALock(t *testing.T) {
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				client := new(fakeRedis)
				store := redisStores(client)[which]
				l, err := NewSmoothBursty("x", 1000, WithStore(store), WithFailurePolicy(FailOpen), WithStoreTimeout(300*time.Millisecond), Logged(t))
				require.NoError(t, err)
				client.locked.Store(true)
				time.AfterFunc(100*time.Millisecond, func() { client.hangs.Store(true) })
				ok, err := l.TryAcquire(background, 1, 0)
				require.NoError(t, err)
				require.True(t, ok)
				healthy(t, l, false)
				client.hangs.Store(false)
				healthy(t, l, true)
				_, err = l.TryAcquire(background, 1, 0)
				require.ErrorIs(t, err, ErrLockNotObtained, "the store is back, and the lock is still held")
				client.locked.Store(false)
				for range 20 {
					_, err := l.Try(background)
					require.ErrorIs(t, err, ErrCorruptState, "it was asked")
				}
				closed, err := NewSmoothBursty("x", 1000, WithStore(store), WithStoreTimeout(300*time.Millisecond))
				require.NoError(t, err)
				client.hangs.Store(true)
				_, err = closed.TryAcquire(background, 1, 0)
				require.ErrorIs(t, err, ErrStoreTimeout)
				healthy(t, l, false)
				client.hangs.Store(false)
				healthy(t, l, true)
			})
		})
	}
}

// The local bucket of a process that was not served between two outages begins empty in the second, too.
func TestShareBeginsEmpty(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &sick{}
		l, err := NewSmoothBursty("x", 5, WithMaxPermits(1000), WithStore(s), WithFailurePolicy(LocalShare(1)), Logged(t))
		require.NoError(t, err)
		_, err = l.Try(background)
		require.NoError(t, err)
		s.away(t, l, true)
		s.away(t, l, false)
		time.Sleep(time.Second) // would save up five
		s.ill.Store(true)
		l.limiter.Coordinator.Health.Suspect(l.limiter.Coordinator)
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
	})
}

// Negative zeros are zeros, in Lua and Go.
func TestNegativeZero(t *testing.T) {
	zero := math.Copysign(0, -1)
	for which, store := range redisStores(redistest.Shared(t).Client(t)) {
		for i, opts := range [][]Option{{WithInitialPermits(zero)}, {WithMaxPermits(zero)}, {WithMaxPermits(5e-324), WithInitialPermits(zero)}} {
			l, err := NewSmoothBursty(fmt.Sprint(t.Name(), which, i), 1e7, append(opts, WithStore(store), patient)...)
			require.NoError(t, err)
			require.NoError(t, l.SetRate(background, 1.0/3))
			for range 3 {
				_, err = l.Reserve(background, 1)
				require.NoError(t, err)
			}
		}
	}
}

// A call waits for the probe of another no longer than for one of its own.
func TestProbeOfAPatientLimiter(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newOneServer()
		patient, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(FailOpen), WithStoreTimeout(time.Minute), Logged(t))
		require.NoError(t, err)
		l, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(FailOpen), WithStoreTimeout(100*time.Millisecond))
		require.NoError(t, err)
		release := make(chan struct{})
		s.stuck = release
		defer close(release)
		s.fails.Store(true)
		go func() { _, _ = patient.Try(background) }()
		synctest.Wait() // for the probe
		began := time.Now()
		ok, err := l.Try(background)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, 100*time.Millisecond, time.Since(began))
	})
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
	require.NoError(t, l.limiter.Coordinator.Reach(background))
	clock.Advance(time.Hour)
	after, err := l.State(background)
	require.NoError(t, err)
	require.Equal(t, before, after)
}

// What not even a process's part could ever grant is an error, not an Acquire that has returned.
func TestShareOfTooMuch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &sick{}
		l, err := NewSmoothBursty("x", 0.001, WithStore(s), WithFailurePolicy(LocalShare(1_000_000)), Logged(t))
		require.NoError(t, err)
		s.away(t, l, true)
		_, err = l.Acquire(background, 100_000) // 3 years of the whole, 3 million of the part
		require.ErrorIs(t, err, ErrInvalidPermits)
		require.ErrorIs(t, err, ErrStoreUnavailable)
	})
}

// refusing is a store that replies to probes, with an error that needs a repair.
type refusing struct {
	sick
	refuses atomic.Bool
}

func (s *refusing) describe() traits { return traits{self: s, probe: s.probe} }

func (s *refusing) probe(ctx context.Context, name string) error {
	if s.refuses.Load() {
		return fmt.Errorf("%w: of another", ErrCorruptState)
	}
	return s.sick.probe(ctx, name)
}

// A store that replies is not in an outage, whatever the reply: an error that needs a repair ends an outage, and lets no call pass.
func TestRefusalEndsAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := new(refusing)
		l, err := NewSmoothBursty("x", 10, WithStore(s), WithFailurePolicy(FailOpen), Logged(t))
		require.NoError(t, err)
		s.away(t, l, true)
		ok, err := l.Try(background)
		require.NoError(t, err)
		require.True(t, ok, "the policy's")
		s.refuses.Store(true)
		require.Less(t, healthy(t, l, true), time.Second)
		s.refuses.Store(false)
		s.away(t, l, false)
	})
}

// scattered is a store whose buckets are away one by one, as those of a cluster are. It notes which of them is probed.
type scattered struct {
	sick
	outages outage.Group
	one     bool // server, or each bucket has its own
	mu      sync.Mutex
	down    map[string]bool
	probed  []string
}

func (s *scattered) describe() traits {
	return traits{self: s, probe: s.probe, outages: &s.outages, oneServer: s.one}
}

func (s *scattered) Apply(ctx context.Context, b *Batch) error {
	s.mu.Lock()
	down := s.down[b.asked.Name]
	s.mu.Unlock()
	if down {
		return fmt.Errorf("%w: failed", ErrStoreUnavailable)
	}
	return s.sick.Apply(ctx, b)
}

func (s *scattered) probe(_ context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.probed = append(s.probed, name)
	if s.down[name] {
		return fmt.Errorf("%w: no", ErrStoreUnavailable)
	}
	return nil
}

func (s *scattered) set(name string, down bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down == nil {
		s.down = map[string]bool{}
	}
	s.down[name] = down
}

// Of many buckets that are away the first is logged, and when they are all back. That the last was only forgotten is not.
func TestLogOfManyOutages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var log recorder
		s := new(scattered)
		open := func(name string) *RateLimiter {
			l, err := NewSmoothBursty(name, 10, WithStore(s), log.option())
			require.NoError(t, err)
			return l
		}
		fails := func(l *RateLimiter) {
			s.set(l.Name(), true)
			_, err := l.Try(background)
			require.Error(t, err)
			healthy(t, l, false)
		}
		a, b := open("a"), open("b")
		fails(a)
		require.Len(t, log.logged(), 1)
		fails(b)
		s.set("a", false)
		healthy(t, a, true)
		require.Empty(t, log.logged())
		s.set("b", false)
		healthy(t, b, true)
		lines := log.logged()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "the outage of the store has ended")

		func() { fails(open("c")) }()
		require.Len(t, log.logged(), 1)
		collect(t, func() bool {
			time.Sleep(outage.ProbePause)
			return s.outages.Outages() == 0
		})
		require.Empty(t, log.logged())
	})
}

// Of the buckets of one server, the one that a call last needed is probed: the others may be fine.
func TestProbeOfTheBucketWanted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := new(scattered)
		var all []*RateLimiter
		s.one = true
		for _, name := range []string{"a", "b", "c"} {
			l, err := NewSmoothBursty(name, 10, WithStore(s), Logged(t))
			require.NoError(t, err)
			all = append(all, l)
			s.set(name, true)
		}
		for _, l := range append(all, all[0]) {
			_, err := l.Try(background)
			require.Error(t, err)
			s.mu.Lock()
			s.probed = nil
			s.mu.Unlock()
			time.Sleep(10 * outage.ProbePause)
			s.mu.Lock()
			require.NotEmpty(t, s.probed)
			for _, name := range s.probed[1:] { // one may have been under way
				require.Equal(t, l.Name(), name)
			}
			s.mu.Unlock()
		}
		for _, l := range all {
			s.set(l.Name(), false)
		}
		healthy(t, all[0], true)
	})
}

// A limiter with less time than the store needs costs others nothing: neither its calls nor the probes that they cause make an outage.
func TestImpatientLimiter(t *testing.T) {
	for _, policy := range []FailurePolicy{FailClosed, FailOpen} {
		t.Run(policy.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newOneServer()
				s.trip.Store(int64(10 * time.Millisecond))
				patient, err := NewSmoothBursty("patient", 1e5, WithStore(s), Logged(t))
				require.NoError(t, err)
				hasty, err := NewSmoothBursty("hasty", 1e5, WithStore(s), WithStoreTimeout(5*time.Millisecond), WithFailurePolicy(policy), Logged(t))
				require.NoError(t, err)
				require.Same(t, patient.limiter.Coordinator.Health, hasty.limiter.Coordinator.Health)
				began := time.Now()
				for range 300 {
					ok, err := patient.Try(background)
					require.NoError(t, err)
					require.True(t, ok)
					for range 3 {
						asked := time.Now()
						ok, err = hasty.Try(background)
						require.Equal(t, policy == FailOpen, ok)
						require.Equal(t, policy == FailClosed, errors.Is(err, ErrStoreUnavailable), "%v", err)
						require.LessOrEqual(t, time.Since(asked), 10*time.Millisecond, "its timeout, and one for the probe")
					}
					require.Nil(t, patient.limiter.Coordinator.Down())
				}
				t.Log(time.Since(began))
			})
		})
	}
}

// If all limiters have little time, so have probes.
func TestProbeOfImpatientLimiters(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newOneServer()
		l, err := NewSmoothBursty("x", 10, WithStore(s), WithStoreTimeout(5*time.Millisecond), Logged(t))
		require.NoError(t, err)
		s.trip.Store(int64(time.Second))
		_, err = l.Try(background)
		require.ErrorIs(t, err, ErrStoreTimeout)
		require.LessOrEqual(t, healthy(t, l, false), 10*time.Millisecond)
		s.trip.Store(0)
		healthy(t, l, true) // no probe is in flight when the bubble ends
	})
}

// A long store timeout keeps no bucket whose limiters are gone: timers do not hold what they would look after.
func TestLongTimeoutKeepsNothing(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	for what, store := range map[string]Store{
		"script": NewRedisScriptStore(client, WithKeyPrefix(prefixOf(t))), "lock": NewRedisStore(client, WithKeyPrefix(prefixOf(t))),
		"own": &distant{Store: NewMemoryStore()},
	} {
		t.Run(what, func(t *testing.T) {
			const buckets = 100
			prefix := t.Name()
			kept := func() (n int) {
				for c := range coordinators.All {
					if strings.HasPrefix(c.Name, prefix) {
						n++
					}
				}
				return n
			}
			func() {
				for i := range buckets {
					l, err := NewSmoothBursty(fmt.Sprint(prefix, i), 100, WithStore(store), WithStoreTimeout(time.Hour), quietly)
					require.NoError(t, err)
					for range 2 {
						_, err = l.Try(background)
						require.NoError(t, err)
					}
				}
			}()
			require.Eventually(t, func() bool {
				runtime.GC()
				return kept() <= buckets/10 // the last ones may still be on some stack
			}, 20*time.Second, 20*time.Millisecond, "most of %d are kept", buckets)
			runtime.KeepAlive(store)
		})
	}
}

// The figure of LocalShare's comment: each local bucket saves up a permit, however small its share. So n instances that were idle let n
// calls go at once, where the quota's own bucket would let one go; from then on, they keep to the rate.
func TestLocalSharesOfASmallQuota(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const n = 10
		var limiters []*RateLimiter
		for range n {
			s := &sick{}
			l, err := NewQuota("x", 5, time.Second, 0, WithStore(s), WithFailurePolicy(LocalShare(n)), Logged(t))
			require.NoError(t, err)
			s.away(t, l, true)
			limiters = append(limiters, l)
		}
		grants := func() (granted int) {
			for _, l := range limiters {
				ok, err := l.TryAcquire(background, 1, 0)
				require.NoError(t, err)
				if ok {
					granted++
				}
			}
			return granted
		}
		require.Zero(t, grants(), "they begin empty")
		time.Sleep(time.Minute) // idle
		require.Equal(t, n, grants(), "at once")
		granted := 0
		for range 1000 {
			time.Sleep(10 * time.Millisecond)
			granted += grants()
		}
		require.LessOrEqual(t, granted, 5*10)
		require.GreaterOrEqual(t, granted, 4*10)
	})
}
