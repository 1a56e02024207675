package tokenbucket

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// healthy waits until a limiter's store is known to be there, or away.
func healthy(t *testing.T, l *RateLimiter, want bool) time.Duration {
	began := time.Now()
	require.Eventually(t, func() bool { return (l.line.down() == nil) == want }, 20*time.Second, time.Millisecond)
	return time.Since(began)
}

// What each policy gives while Redis is hung or killed, for every kind of store: an outage is noticed, from then on a call
// costs far less than a round trip, and when Redis is back, that is noticed by itself.
func TestFailurePolicies(t *testing.T) {
	faults := map[string]struct{ begin, end func(*redistest.Server) error }{
		"hung":    {(*redistest.Server).Stop, (*redistest.Server).Continue},
		"refused": {(*redistest.Server).Kill, (*redistest.Server).Restart},
	}
	for name, fault := range faults {
		for _, which := range []string{"script", "lock"} {
			t.Run(name+"/"+which, func(t *testing.T) {
				server := redistest.Start(t)
				store := redisStores(server.Client(t))[which]
				open := func(bucket string, opts ...Option) *RateLimiter {
					l, err := NewSmoothBursty(bucket, 10, append(opts, WithStore(store), WithMaxPermits(20), WithInitialPermits(20))...)
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
				shared := open("share", WithFailurePolicy(LocalShare(5)))
				require.Eventually(t, func() bool { return shared.member.live.Load() == 1 }, 10*time.Second, time.Millisecond)
				shared.member.live.Store(4) // as if there were three more

				require.NoError(t, fault.begin(server))
				began := time.Now()
				_, err := closed.Try(background)
				require.Error(t, err)
				require.True(t, away(err), "%v", err)
				healthy(t, closed, false)
				t.Logf("noticed after %v: %v", time.Since(began), err)

				costs := make([]time.Duration, 1001)
				for i := range costs {
					began := time.Now()
					ok, err := closed.Try(background)
					costs[i] = time.Since(began)
					require.False(t, ok)
					require.ErrorIs(t, err, ErrStoreUnavailable)
					require.ErrorContains(t, err, `"closed"`)
				}
				slices.Sort(costs)
				t.Logf("a call costs %v (median of %d; wanted less than 100 µs)", costs[500], len(costs))
				require.Less(t, costs[500], time.Millisecond)
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
				back := healthy(t, closed, true)
				t.Logf("back %v after the server (wanted less than 1 s)", back)
				for _, l := range []*RateLimiter{closed, opened, shared} {
					_, err := l.State(background)
					require.NoError(t, err)
					_, err = l.Try(background)
					require.NoError(t, err)
				}
				shared.line.mu.Lock()
				require.True(t, shared.line.served, "the next outage begins with an empty bucket")
				shared.line.mu.Unlock()
				require.Eventually(t, func() bool { return told.Load() == 101 }, 10*time.Second, time.Millisecond)
			})
		}
	}
}

// One reply that is lost shuts out nobody: the probe is answered.
func TestLostReplyIsNoOutage(t *testing.T) {
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr)
	proxy.Match("evalsha", redistest.Only(3, redistest.LoseReply))
	client := redis.NewClient(&redis.Options{Addr: proxy.Addr})
	t.Cleanup(func() { _ = client.Close() })
	var downs atomic.Int64
	l, err := NewSmoothBursty("x", 1000, WithStore(NewRedisScriptStore(client)), WithStoreTimeout(200*time.Millisecond),
		WithObserver(Observer{Health: func(Health) { downs.Add(1) }}))
	require.NoError(t, err)
	failed := 0
	for range 50 {
		if _, err := l.Try(background); err != nil {
			require.ErrorIs(t, err, ErrStoreTimeout)
			failed++
		}
	}
	require.Equal(t, 1, failed)
	require.Zero(t, downs.Load())
}

// distant is a store that takes its time, and heeds contexts.
type distant struct {
	Store
	trip atomic.Int64
}

func (s *distant) Apply(ctx context.Context, b *Batch) (Outcome, error) {
	select {
	case <-time.After(time.Duration(s.trip.Load())):
		return s.Store.Apply(ctx, b)
	case <-ctx.Done():
		return Outcome{}, ctx.Err()
	}
}

// A store that has suddenly become slower than a probe waits for is not away for longer than it takes to answer, and once that
// is known a caller's deadline is no reason to doubt.
func TestSlowIsNotAway(t *testing.T) {
	store := &distant{Store: NewMemoryStore()}
	l, err := NewSmoothBursty("x", 1000, WithStore(store), WithStoreTimeout(20*time.Second))
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
	back := healthy(t, l, true)
	t.Logf("back after %v", back)
	_, err = l.Try(background)
	require.NoError(t, err)
	hasty()
	probed := time.Now()
	for time.Since(probed) < 2*trip {
		require.Nil(t, l.line.down(), "its answers are known to take that long")
		time.Sleep(time.Millisecond)
	}
}

// What somebody must repair opens no gate.
func TestAway(t *testing.T) {
	for _, err := range []error{
		&WaitError{Reason: context.DeadlineExceeded}, ErrLockNotObtained, wrongType("key"), redis.ErrClosed,
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

// The instances of a fleet count themselves; who has gone counts no longer than seven seconds.
func TestInstancesAreCounted(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t)
	open := func() *RateLimiter {
		l, err := NewSmoothBursty("x", 5, WithStore(NewRedisScriptStore(client)), WithFailurePolicy(LocalShare(1)))
		require.NoError(t, err)
		return l
	}
	a, b, c := open(), open(), open() // a store each, as in processes of their own
	again, err := NewSmoothBursty("y", 5, WithStore(a.line.store), WithFailurePolicy(LocalShare(1)))
	require.NoError(t, err)
	require.Same(t, a.member, again.member, "a process is counted once")
	for _, l := range []*RateLimiter{a, b, c} {
		require.Eventually(t, func() bool { return l.member.live.Load() == 3 }, 20*time.Second, 10*time.Millisecond)
	}
	ttl := client.PTTL(background, "tokenbucket:instances").Val()
	require.Positive(t, ttl)
	require.LessOrEqual(t, ttl, liveFor)
	require.NoError(t, client.ZAdd(background, "tokenbucket:instances", redis.Z{Score: 1, Member: "long gone"}).Err())
	require.NoError(t, client.ZAdd(background, "tokenbucket:instances", redis.Z{Score: 1e15, Member: "by a clock that was set back"}).Err())
	_, err = beatScript.Run(background, client, 1, "tokenbucket:instances", "d", "7000")
	require.NoError(t, err)
	require.EqualValues(t, 4, client.ZCard(background, "tokenbucket:instances").Val())
}

// A shadow refuses nobody, says what it would have done, and changes nothing for those in force.
func TestShadow(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t)
	stores := redisStores(client)
	stores["memory"] = NewMemoryStore()
	for which, store := range stores {
		t.Run(which, func(t *testing.T) {
			name := "shadowed by " + which
			inForce, err := NewSmoothBursty(name, 5, WithStore(store))
			require.NoError(t, err)
			ok, err := inForce.Try(background)
			require.NoError(t, err)
			require.True(t, ok)
			before, err := inForce.State(background)
			require.NoError(t, err)

			var mu sync.Mutex
			granted, refused, failed := 0, 0, 0
			var waits []time.Duration
			shadow, err := NewSmoothBursty(name, 5, WithStore(store), WithMaxPermits(5), WithInitialPermits(5), WithShadow(),
				WithHorizon(time.Second), WithObserver(Observer{Decision: func(_ context.Context, d Decision) {
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
			require.Less(t, time.Since(began), 10*time.Second)
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
			require.GreaterOrEqual(t, refused, 15)
			ok, err = shadow.TryAcquire(background, -1, 0)
			require.NoError(t, err)
			require.True(t, ok, "nobody")
			require.Equal(t, 1, failed)

			after, err := inForce.State(background)
			require.NoError(t, err)
			require.Equal(t, before.Seq, after.Seq)
			require.Equal(t, before.Tail, after.Tail)
			if which != "memory" {
				keys := client.Keys(background, "tokenbucket:{*"+strings.ReplaceAll(name, " ", "%20")+"}").Val()
				require.Len(t, keys, 2)
			}
		})
	}
	l, err := NewSmoothBursty("hung", 5, WithStore(stores["script"]), WithShadow())
	require.NoError(t, err)
	require.NoError(t, server.Stop())
	ok, err := l.Try(background)
	require.NoError(t, err)
	require.True(t, ok, "nor does a store that hangs")
}

// Each of the observer's functions hears what there is to hear.
func TestObserver(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t)
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			var mu sync.Mutex
			var decisions []Decision
			var trips []Trip
			var leases []LeaseUse
			off := false
			l, err := NewSmoothBursty(which, 100, WithStore(redisStores(client)[which]), WithInitialPermits(100),
				WithSwitch(func() bool { return !off }), WithLease(100*time.Millisecond), WithObserver(Observer{
					Decision: func(_ context.Context, d Decision) { mu.Lock(); decisions = append(decisions, d); mu.Unlock() },
					Trip:     func(trip Trip) { mu.Lock(); trips = append(trips, trip); mu.Unlock() },
					Lease:    func(u LeaseUse) { mu.Lock(); leases = append(leases, u); mu.Unlock() },
				}))
			require.NoError(t, err)
			last := func() Decision { mu.Lock(); defer mu.Unlock(); return decisions[len(decisions)-1] }
			_, err = l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.Equal(t, Decision{Bucket: which, Permits: 1, Granted: true, Elapsed: last().Elapsed}, last())
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
			for i := 0; i < 1000 && last().By != ByLease; i++ {
				_, err = l.TryAcquire(background, 1, 0)
				require.NoError(t, err)
			}
			require.Equal(t, ByLease, last().By)
			require.NoError(t, l.Close(background))
			require.NotEmpty(t, leases)
			require.Positive(t, leases[0].Permits)
			r, err := l.TryReserve(background, 50, time.Minute)
			require.NoError(t, err)
			require.Equal(t, r.Delay(), last().Wait)
			_, err = l.Reserve(background, 6000) // a minute's worth
			require.NoError(t, err)
			for i := 0; i < 1000 && last().By != BySight; i++ {
				_, err = l.TryAcquire(background, 1, time.Second)
				require.NoError(t, err)
			}
			require.Equal(t, BySight, last().By)
			require.False(t, last().Granted)
			require.Greater(t, last().Wait, time.Second)

			lock := "tokenbucket:{" + which + "}:lock"
			require.NoError(t, client.Set(background, lock, "another's", 100*time.Millisecond).Err())
			_, err = l.State(background)
			require.NoError(t, err)
			require.Positive(t, trips[len(trips)-1].LockWait, "%+v", trips)
		})
	}
}

// A caller too many is told so, and costs no memory.
func TestMaxWaiters(t *testing.T) {
	for _, store := range []Store{NewMemoryStore(), NewRedisScriptStore(redistest.Shared(t).Client(t), WithKeyPrefix(t.Name()))} {
		l, err := NewSmoothBursty("x", 1, WithStore(store), WithMaxWaiters(3))
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
		require.Zero(t, l.line.waiting)
	}
	_, err := NewSmoothBursty("x", 1, WithMaxWaiters(0))
	require.ErrorIs(t, err, ErrInvalidConfig)
}
