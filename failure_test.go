package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// The result of each policy while the store hangs or fails. Once the outage is noticed, calls wait for nothing. The end of the outage is
// noticed without a call. Beginning and end are logged once for all limiters of the store.
func TestFailurePolicies(t *testing.T) {
	for name, fault := range map[string]func(s *oneServer, is bool){
		"hung":    func(s *oneServer, is bool) { s.hangs.Store(is); s.ill.Store(is) },
		"refused": func(s *oneServer, is bool) { s.fails.Store(is); s.ill.Store(is) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) { failurePolicies(t, newOneServer(), fault) })
		})
	}
}

func failurePolicies(t *testing.T, store *oneServer, fault func(*oneServer, bool)) {
	var log recorder
	open := func(bucket string, opts ...Option) *RateLimiter {
		l, err := NewSmoothBursty(bucket, 10, append(opts, WithStore(store), WithMaxPermits(20), WithInitialPermits(20), log.option())...)
		require.NoError(t, err)
		ok, err := l.Try(background)
		require.NoError(t, err)
		require.True(t, ok)
		return l
	}
	var told atomic.Int64
	closed := open("closed", WithObserver(Observer{Health: func(h Health) {
		if h.Down {
			require.Error(t, h.Err)
			require.Equal(t, FailClosed, h.Policy)
			told.Add(1)
		} else {
			require.Positive(t, h.After)
			told.Add(100)
		}
	}}))
	opened := open("open", WithFailurePolicy(FailOpen))
	shared := open("share", WithFailurePolicy(LocalShare(4)))

	fault(store, true)
	_, err := closed.Try(background)
	require.Error(t, err)
	require.True(t, away(err), "%v", err)
	require.LessOrEqual(t, healthy(t, closed, false), defaultStoreTimeout+outage.ProbeTimeout)
	require.Len(t, log.logged(), 1)

	began := time.Now()
	for range 1000 {
		ok, err := closed.Try(background)
		require.False(t, ok)
		require.ErrorIs(t, err, ErrStoreUnavailable)
		require.ErrorContains(t, err, `"closed"`)
	}
	_, err = closed.State(background)
	require.ErrorIs(t, err, ErrStoreUnavailable)

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
	require.ErrorIs(t, err, ErrInvalidPermits, "a policy is not for bad input")
	over, cancel := context.WithCancel(background)
	cancel()
	_, err = opened.Try(over)
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, time.Since(began), "nobody waits")

	passed := 0
	for range 2000 {
		ok, err := shared.TryAcquire(background, 1, 0)
		require.NoError(t, err)
		if ok {
			passed++
		}
		time.Sleep(time.Millisecond)
	}
	require.InDelta(t, 4.5, passed, 0.5, "a quarter of 10/s, for two seconds, from an empty bucket")
	ok, err := shared.TryAcquire(background, 20, time.Second)
	require.NoError(t, err, "the whole bucket could grant it, so it is no mistake")
	require.False(t, ok)
	waited, err := shared.Acquire(background, 1)
	require.NoError(t, err)
	require.LessOrEqual(t, waited, 400*time.Millisecond)

	fault(store, false)
	require.Less(t, healthy(t, closed, true), time.Second)
	for _, l := range []*RateLimiter{closed, opened, shared} {
		_, err := l.State(background)
		require.NoError(t, err)
		_, err = l.Try(background)
		require.NoError(t, err)
	}
	require.EqualValues(t, 101, told.Load())
	require.Len(t, log.logged(), 1)

	time.Sleep(10 * time.Second)
	fault(store, true)
	_, err = closed.Try(background)
	require.Error(t, err)
	healthy(t, closed, false)
	ok, err = shared.TryAcquire(background, 1, 0)
	require.NoError(t, err)
	require.False(t, ok, "the next outage begins with an empty bucket")
	fault(store, false)
	healthy(t, closed, true)
}

// Messages, their levels and their number.
func TestWithLogger(t *testing.T) {
	t.Run("outage", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			var log recorder
			s := newOneServer()
			l, err := NewSmoothBursty("x", 10, WithStore(s), log.option())
			require.NoError(t, err)
			other, err := NewSmoothBursty("y", 10, WithStore(s)) // without a logger of its own it leaves the store's
			require.NoError(t, err)
			s.away(t, l, true)
			for range 10 {
				_, err := other.Try(background)
				require.ErrorIs(t, err, ErrStoreUnavailable)
			}
			require.Equal(t, []string{`level=WARN msg="tokenbucket: an outage of the store has begun: the failure policy decides calls until it ends; check the store" policy=FailClosed error="tokenbucket: store unavailable: no"`}, log.logged())
			time.Sleep(5*time.Minute + time.Second)
			reminders := log.logged()
			require.Len(t, reminders, 5, "one a minute")
			require.Equal(t, `level=WARN msg="tokenbucket: the outage of the store goes on: the failure policy decides calls until it ends; check the store" for=1m0s policy=FailClosed error="tokenbucket: store unavailable: no"`, reminders[0])
			_, err = NewSmoothBursty("z", 10, WithStore(s), WithFailurePolicy(FailOpen))
			require.NoError(t, err)
			time.Sleep(time.Minute)
			require.Contains(t, log.logged()[0], "policy=several")
			s.away(t, l, false)
			lines := log.logged()
			require.Len(t, lines, 1)
			require.Contains(t, lines[0], `level=INFO msg="tokenbucket: the outage of the store has ended: it decides calls again" after=`)
		})
	})
	t.Run("conflict", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			var log recorder
			store := NewMemoryStore()
			for _, rate := range []float64{10, 20} {
				l, err := NewSmoothBursty("x", rate, WithStore(store), WithVersion(1), log.option())
				require.NoError(t, err)
				for range 3 {
					_, err = l.Reserve(background, 1)
					require.NoError(t, err)
				}
			}
			synctest.Wait()
			lines := log.logged()
			require.Len(t, lines, 1)
			require.Contains(t, lines[0], `level=WARN msg="tokenbucket: two configurations have the same version`)
			require.Contains(t, lines[0], "bucket=x version=1")
		})
	})
	t.Run("overruled", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			shared := NewMemoryStore()
			open := func(log *recorder) *RateLimiter { // in a process of its own
				l, err := NewSmoothBursty("x", 10, WithStore(&Distant{shared, time.Millisecond}), log.option())
				require.NoError(t, err)
				return l
			}
			reserve := func(l *RateLimiter) {
				for range 3 {
					_, err := l.Reserve(background, 1)
					require.NoError(t, err)
				}
				synctest.Wait()
			}
			var log, others recorder
			sets := open(&log)
			reserve(sets)
			require.NoError(t, sets.SetRate(background, 20))
			reserve(sets)
			require.Empty(t, log.logged(), "this process did it")
			overruled := open(&others)
			reserve(overruled)
			require.Equal(t, 20.0, overruled.Rate())
			lines := others.logged()
			require.Len(t, lines, 1)
			require.Contains(t, lines[0], `level=WARN msg="tokenbucket: the configuration of this limiter has no version`)
			require.Contains(t, lines[0], `bucket=x own="bursty now 10 10 1 0" "in force"="bursty now 20 20 1 1"`)
			require.NoError(t, overruled.SetRate(background, 30))
			reserve(sets)
			require.Empty(t, log.logged())
			require.Empty(t, others.logged(), "once")
		})
	})
	t.Run("a handler that asks the limiter", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			var l *RateLimiter
			told := make(chan error, 1)
			handler := slog.NewTextHandler(writer(func(line []byte) {
				_, err := l.State(background)
				told <- err
			}), nil)
			store := NewMemoryStore()
			for _, rate := range []float64{10, 20} {
				var err error
				l, err = NewSmoothBursty("x", rate, WithStore(store), WithVersion(1), WithLogger(slog.New(handler)))
				require.NoError(t, err)
				_, err = l.Reserve(background, 1)
				require.NoError(t, err)
			}
			require.NoError(t, <-told)
		})
	})
	_, err := NewSmoothBursty("x", 1, WithLogger(nil))
	require.ErrorIs(t, err, ErrInvalidConfig)
	require.ErrorContains(t, err, "logger")
}

// writer is an io.Writer that passes each line to a function.
type writer func(line []byte)

func (w writer) Write(line []byte) (int, error) {
	w(line)
	return len(line), nil
}

// forgetful is a store that loses one reply.
type forgetful struct {
	Store
	loses int64 // which
	calls atomic.Int64
}

func (s *forgetful) Apply(ctx context.Context, b *Batch) error {
	err := s.Store.Apply(ctx, b)
	if s.calls.Add(1) == s.loses {
		<-ctx.Done()
		return ctx.Err()
	}
	return err
}

// One lost reply causes no outage, because the probe gets a reply.
func TestLostReplyIsNoOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		downs := 0
		l, err := NewSmoothBursty("x", 1000, WithStore(&forgetful{Store: NewMemoryStore(), loses: 3}), WithStoreTimeout(200*time.Millisecond), Logged(t),
			WithObserver(Observer{Health: func(Health) { downs++ }}))
		require.NoError(t, err)
		failed := 0
		for range 50 {
			if _, err := l.Try(background); err != nil {
				require.ErrorIs(t, err, ErrStoreTimeout)
				failed++
			}
		}
		require.Equal(t, 1, failed)
		require.Zero(t, downs)
	})
}

// A store that has suddenly become slower than a probe waits for is not away for longer than it takes to answer, and once that
// is known a caller's deadline is no reason to doubt.
func TestSlowIsNotAway(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := &distant{Store: NewMemoryStore()}
		store.trip.Store(int64(time.Millisecond))
		l, err := NewSmoothBursty("x", 1000, WithStore(store), WithStoreTimeout(20*time.Second), Logged(t))
		require.NoError(t, err)
		for range 50 {
			_, err := l.Try(background)
			require.NoError(t, err)
		}
		const trip = 600 * time.Millisecond
		store.trip.Store(int64(trip))
		hasty := func() {
			ctx, cancel := context.WithTimeout(background, 100*time.Millisecond)
			defer cancel()
			_, err := l.Try(ctx)
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		hasty()
		healthy(t, l, false)
		require.LessOrEqual(t, healthy(t, l, true), trip)
		_, err = l.Try(background)
		require.NoError(t, err)
		hasty()
		for range int(2 * trip / time.Millisecond) {
			require.Nil(t, l.limiter.Coordinator.Down(), "its answers are known to take that long")
			time.Sleep(time.Millisecond)
		}
	})
}

// A failure that needs a repair lets no call pass.
func TestAway(t *testing.T) {
	for _, err := range []error{
		&WaitError{Reason: context.DeadlineExceeded}, ErrLockNotObtained, fmt.Errorf("%w: a list", ErrCorruptState), redis.ErrClosed,
		errors.New("NOAUTH Authentication required."), errors.New("WRONGPASS invalid username-password pair"),
		errors.New("NOPERM this user has no permissions"), errors.New("ERR The user executing the script can't run this command or subcommand"),
		ErrInvalidConfig, ErrInvalidPermits, ErrTooManyWaiters, context.Canceled, &net.OpError{Op: "remote error", Err: errors.New("tls: bad certificate")},
		errors.New("tokenbucket: Redis decided otherwise"),
		&net.OpError{Op: "dial", Err: &net.AddrError{Err: "missing port in address", Addr: "redis"}},
		&net.OpError{Op: "dial", Err: net.UnknownNetworkError("tcp9")},
		&net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", syscall.EACCES)},
	} {
		require.False(t, away(err), "%v", err)
	}
	for _, err := range []error{
		ErrStoreTimeout, ErrStoreUnavailable, context.DeadlineExceeded, &net.OpError{Op: "dial", Err: errors.New("connection refused")},
		errors.New("redis: all ring shards are down"), redis.ErrPoolTimeout, errors.New("LOADING Redis is loading the dataset in memory"), errors.New("OOM command not allowed"),
		errors.New("ERR max number of clients reached"), errors.New("redis: all sentinels specified in configuration are unreachable"),
	} {
		require.True(t, away(err), "%v", err)
	}
}

// The instances of a fleet count themselves, and who has gone counts no longer than seven seconds.
func TestInstancesAreCounted(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint(t.Name(), time.Now().UnixNano(), ":")
	for n := int64(1); n <= 3; n++ { // a store each, as in processes of their own
		store := NewRedisScriptStore(client, WithKeyPrefix(prefix))
		l, err := NewSmoothBursty("x", 5, WithStore(store), WithFailurePolicy(LocalShare(1)), Logged(t))
		require.NoError(t, err)
		again, err := NewSmoothBursty("y", 5, WithStore(store), WithFailurePolicy(LocalShare(1)), Logged(t))
		require.NoError(t, err)
		require.Same(t, l.member, again.member, "a process is counted once")
		require.Eventually(t, func() bool { return l.member.Live() == n }, 20*time.Second, time.Millisecond)
		defer func() { require.NotNil(t, l.member) }() // they live until the test ends
	}
}

// An instance sends a heartbeat every two seconds, and reads the number of live instances. If an error that needs a repair prevents the
// count, the configured number is used; if the server is away, the last number stays.
func TestUncountable(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var log recorder
		client := new(fakeRedis)
		client.instances.Store(3)
		l, err := NewSmoothBursty("x", 42, WithStore(NewRedisScriptStore(client)), WithFailurePolicy(LocalShare(7)), log.option())
		require.NoError(t, err)
		rate := func() float64 {
			share, err := l.localShare()
			require.NoError(t, err)
			return share.own.Rate
		}
		require.InDelta(t, 6, rate(), 1e-9, "as given, before the first answer")
		time.Sleep(time.Millisecond)
		require.InDelta(t, 14, rate(), 1e-9)
		client.instances.Store(6)
		time.Sleep(3 * time.Second)
		require.InDelta(t, 7, rate(), 1e-9)
		before := client.beats.Load()
		time.Sleep(time.Minute)
		require.InDelta(t, 30, client.beats.Load()-before, 5)

		client.hangs.Store(true)
		time.Sleep(time.Minute)
		require.InDelta(t, 7, rate(), 1e-9)
		client.hangs.Store(false)
		require.Empty(t, log.logged())

		repair := fmt.Errorf("%w: a list", ErrCorruptState)
		client.refuses.Store(&repair)
		time.Sleep(time.Minute)
		require.InDelta(t, 6, rate(), 1e-9)
		lines := log.logged()
		require.Len(t, lines, 1, "once")
		require.Contains(t, lines[0], `level=WARN msg="tokenbucket: instances cannot be counted, so LocalShare uses the number that it was given (--fail share:N); the user needs +zadd`)
		client.refuses.Store(nil)
		time.Sleep(time.Minute)
		require.InDelta(t, 7, rate(), 1e-9)
		require.NotNil(t, l.member)
	})
}

// A shadow refuses no call, reports its decisions, and changes nothing for the limiters in force.
func TestShadow(t *testing.T) {
	client := patientClient(t)
	prefix := fmt.Sprint(t.Name(), time.Now().UnixNano(), ":")
	stores := redisStores(client, WithKeyPrefix(prefix))
	stores["memory"] = NewMemoryStore()
	for which, store := range stores {
		t.Run(which, func(t *testing.T) {
			name := "shadowed by " + which
			inForce, err := NewSmoothBursty(name, 5, WithStore(store), patient)
			require.NoError(t, err)
			ok, err := inForce.Try(background)
			require.NoError(t, err)
			require.True(t, ok)
			before, err := inForce.State(background)
			require.NoError(t, err)

			var mu sync.Mutex
			granted, refused, failed := 0, 0, 0
			var waits []time.Duration
			shadow, err := NewSmoothBursty(name, 5, WithStore(store), patient, WithMaxPermits(5), WithInitialPermits(5), WithShadow(),
				WithObserver(Observer{Decision: func(_ context.Context, d Decision) {
					mu.Lock()
					defer mu.Unlock()
					require.True(t, d.Shadow)
					require.Equal(t, name, d.Bucket)
					switch {
					case d.Err != nil:
						failed++
					case d.Granted:
						granted++
						waits = append(waits, d.Wait)
					default:
						refused++
					}
				}}))
			require.NoError(t, err)
			require.Equal(t, name, shadow.Name())
			began := time.Now()
			for range 10 {
				ok, err := shadow.TryAcquire(background, 1, 500*time.Millisecond)
				require.NoError(t, err)
				require.True(t, ok)
			}
			// By the source's example five pass at once, two would wait, three would be refused; a slow machine refills.
			require.InDelta(t, 7, granted, 1+5*time.Since(began).Seconds())
			require.Equal(t, 10, granted+refused)
			for range 10 {
				waited, err := shadow.Acquire(background, 1)
				require.NoError(t, err)
				require.Zero(t, waited)
				r, err := shadow.Reserve(background, 1)
				require.NoError(t, err)
				require.True(t, r.OK())
				<-r.Ready()
			}
			require.Equal(t, 30, granted+refused, "beyond the horizon they are refused")
			require.LessOrEqual(t, float64(granted), 6+5*(1+time.Since(began).Seconds()), "the bucket, and what comes within the horizon")
			ok, err = shadow.TryAcquire(background, -1, 0)
			require.NoError(t, err)
			require.True(t, ok, "nobody")
			require.Equal(t, 1, failed)

			after, err := inForce.State(background)
			require.NoError(t, err)
			require.Equal(t, before.Seq, after.Seq)
			require.Equal(t, before.Tail, after.Tail)
			if which != "memory" {
				keys, err := client.Keys(background, prefix+"{*"+strings.ReplaceAll(name, " ", "%20")+"}").Result()
				require.NoError(t, err)
				require.Len(t, keys, 2)
			}
		})
	}
	bubble(t, func(t *testing.T) {
		s := new(ailing)
		s.hangs.Store(true)
		l, err := NewSmoothBursty("hung", 5, WithStore(s), WithShadow(), Logged(t))
		require.NoError(t, err)
		began := time.Now()
		ok, err := l.Try(background)
		require.NoError(t, err)
		require.True(t, ok, "nor does a store that hangs")
		require.Equal(t, defaultStoreTimeout, time.Since(began))
		s.hangs.Store(false)
	})
}

// Each of the observer's functions is called for its events.
func TestObserver(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint(t.Name(), time.Now().UnixNano(), ":")
	for which, store := range redisStores(client, WithKeyPrefix(prefix)) {
		t.Run(which, func(t *testing.T) {
			var mu sync.Mutex
			var decisions []Decision
			var trips []Trip
			var leases []int // permits, and how many were used
			off := false
			l, err := NewSmoothBursty(which, 100, WithStore(store), patient, WithInitialPermits(100),
				WithSwitch(func() bool { return !off }), WithPrefetch(100*time.Millisecond), WithObserver(Observer{
					Decision: func(_ context.Context, d Decision) { mu.Lock(); decisions = append(decisions, d); mu.Unlock() },
					Trip:     func(trip Trip) { mu.Lock(); trips = append(trips, trip); mu.Unlock() },
					Prefetch: func(_ string, permits, used int) { mu.Lock(); leases = append(leases, permits, used); mu.Unlock() },
				}))
			require.NoError(t, err)
			last := func() Decision { mu.Lock(); defer mu.Unlock(); return decisions[len(decisions)-1] }
			_, err = l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.Equal(t, Decision{Bucket: which, Permits: 1, Granted: true, By: ByStore, Elapsed: last().Elapsed}, last())
			require.Positive(t, last().Elapsed)
			require.Equal(t, 1, trips[0].Requests)
			require.Positive(t, trips[0].Elapsed)
			_, err = l.TryAcquire(background, 0, 0)
			require.Error(t, err)
			require.Equal(t, ByCheck, last().By)
			require.ErrorIs(t, last().Err, ErrInvalidPermits)
			off = true
			_, err = l.Acquire(background, 1)
			require.NoError(t, err)
			require.Equal(t, BySwitch, last().By)
			off = false
			for i := 0; i < 1000 && last().By != ByPrefetch; i++ {
				_, err = l.TryAcquire(background, 1, 0)
				require.NoError(t, err)
			}
			require.Equal(t, ByPrefetch, last().By)
			require.NoError(t, l.Close(background))
			require.NotEmpty(t, leases)
			require.Positive(t, leases[0])
			r, err := l.TryReserve(background, 50, time.Minute)
			require.NoError(t, err)
			require.Equal(t, r.Delay(), last().Wait)
			_, err = l.Reserve(background, 6000) // a minute's worth
			require.NoError(t, err)
			for i := 0; i < 1000 && last().By != BySnapshot; i++ {
				_, err = l.TryAcquire(background, 1, time.Second)
				require.NoError(t, err)
			}
			require.Equal(t, BySnapshot, last().By)
			require.False(t, last().Granted)
			require.Greater(t, last().Wait, time.Second)

			lock := prefix + "{" + which + "}:lock"
			require.NoError(t, client.Set(background, lock, "another's", 100*time.Millisecond).Err())
			_, err = l.State(background)
			require.NoError(t, err)
			require.Positive(t, trips[len(trips)-1].LockWait, "%+v", trips)
		})
	}
}

// A caller beyond the limit of waiters gets an error, and costs no memory.
func TestMaxWaiters(t *testing.T) {
	for _, store := range []Store{NewMemoryStore(), NewRedisScriptStore(redistest.Shared(t).Client(t), WithKeyPrefix(fmt.Sprint(t.Name(), rand.Uint64())))} {
		l, err := NewSmoothBursty("x", 1, WithStore(store), WithMaxWaiters(3), patient)
		require.NoError(t, err)
		var held []*Reservation
		for range 4 { // the first is due at once
			r, err := l.Reserve(background, 1)
			require.NoError(t, err)
			held = append(held, r)
		}
		_, err = l.Reserve(background, 1)
		require.ErrorIs(t, err, ErrTooManyWaiters)
		_, err = l.Acquire(background, 1)
		require.ErrorIs(t, err, ErrTooManyWaiters)
		_, err = l.TryAcquire(background, 1, 10*time.Second)
		require.ErrorIs(t, err, ErrTooManyWaiters)
		_, err = l.State(background)
		require.NoError(t, err)
		require.NoError(t, l.SetRate(background, 1), "an order is no waiter")
		require.NoError(t, held[3].Cancel(background))
		r, err := l.Reserve(background, 1)
		require.NoError(t, err)
		for _, r := range append(held, r) {
			require.NoError(t, r.Cancel(background))
		}
		require.Zero(t, Waiting(l))
	}
	_, err := NewSmoothBursty("x", 1, WithMaxWaiters(0))
	require.ErrorIs(t, err, ErrInvalidConfig)
}
