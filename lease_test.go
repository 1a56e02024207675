package tokenbucket

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestLeaseOptions(t *testing.T) {
	store := NewRedisScriptStore(redistest.Shared(t).Client(t))
	for want, make := range map[string]func() (*RateLimiter, error){
		"prefetch 0s": func() (*RateLimiter, error) { return NewSmoothBursty("x", 1000, WithStore(store), WithPrefetch(0)) },
		"prefetch -1s": func() (*RateLimiter, error) {
			return NewSmoothBursty("x", 1000, WithStore(store), WithPrefetch(-time.Second))
		},
		"want 1ms to 10s": func() (*RateLimiter, error) {
			return NewSmoothBursty("x", 1000, WithStore(store), WithPrefetch(time.Minute))
		},
		"warms up": func() (*RateLimiter, error) {
			return NewSmoothWarmingUp("x", 1000, time.Second, WithStore(store), WithPrefetch(time.Second))
		},
		"PayNow": func() (*RateLimiter, error) {
			return NewSmoothBursty("x", 1000, WithStore(store), WithPayment(PayLater), WithPrefetch(time.Second))
		},
		"no network": func() (*RateLimiter, error) { return NewSmoothBursty("x", 1000, WithPrefetch(time.Second)) },
		"2 permits' worth at 5": func() (*RateLimiter, error) {
			return NewSmoothBursty("x", 5, WithStore(store), WithPrefetch(100*time.Millisecond))
		},
		"a burst that the bucket forbids": func() (*RateLimiter, error) {
			return NewQuota("x", 1000, time.Second, time.Millisecond, WithStore(store), WithPrefetch(100*time.Millisecond))
		},
	} {
		_, err := make()
		require.ErrorIs(t, err, ErrInvalidConfig, want)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "prefetch")
	}
	l, err := NewSmoothBursty("x", 1000, WithStore(store), WithPrefetch(time.Second))
	require.NoError(t, err, "a block of a full bucket")
	require.NoError(t, l.Close(background))
	require.NoError(t, l.Close(background))
}

// Distant is the store of one process of several, whose answers take a while.
type Distant struct {
	Store
	Takes time.Duration
}

// Apply implements Store.
func (s *Distant) Apply(ctx context.Context, b *Batch) error {
	time.Sleep(s.Takes / 2)
	err := s.Store.Apply(ctx, b)
	time.Sleep(s.Takes / 2)
	return err
}

// leased is what a process holds of its lease and of the next one.
func leased(l *RateLimiter) int64 {
	return look(l).Leased
}

// Several processes lease from one bucket at full demand. No window has more grants than the bound plus the permits that leases may hold,
// and no process holds more than d × rate. Every permit that was taken from the store is used, leased or refunded.
//
// Time passes only while all wait, so permits are recorded at the time of their use. integration/limiter does this on real servers.
func TestLeaseBound(t *testing.T) {
	const (
		rate      = 10_000.0
		d         = 50 * time.Millisecond
		processes = 4
		answer    = time.Millisecond
		lasts     = 3 * time.Second
	)
	synctest.Test(t, func(t *testing.T) {
		shared := NewMemoryStore()
		began := time.Now()
		var mu sync.Mutex
		var used []event
		fromLease, peak := 0, int64(0)
		var callers sync.WaitGroup
		var limiters []*RateLimiter
		for range processes {
			l, err := NewSmoothBursty("x", rate, WithStore(&Distant{shared, answer}), WithInitialPermits(rate), WithPrefetch(d))
			require.NoError(t, err)
			limiters = append(limiters, l)
			for range 4 {
				callers.Go(func() {
					for time.Since(began) < lasts {
						if pause := time.Since(began) % (700 * time.Millisecond); pause < 200*time.Millisecond {
							time.Sleep(200*time.Millisecond - pause) // the bucket fills up
						}
						held := look(l).Lease
						ok, err := l.TryAcquire(background, 1, 0)
						if err != nil {
							t.Error(err)
							return
						}
						mu.Lock()
						if ok {
							used = append(used, event{time.Now().UnixMicro(), 1})
							if held && look(l).Lease {
								fromLease++
							}
						}
						peak = max(peak, leased(l))
						mu.Unlock()
						if !ok {
							time.Sleep(500 * time.Microsecond)
						}
					}
				})
			}
		}
		callers.Wait()
		took := time.Since(began)
		for _, l := range limiters {
			require.NoError(t, l.Close(background))
		}
		level, most := worst(used, rate), rate+processes*d.Seconds()*rate
		t.Logf("%d used in %v, %d of them with a lease at hand, worst window %.0f of %.0f, most held %d of %.0f",
			len(used), took, fromLease, level, most, peak, d.Seconds()*rate)
		require.LessOrEqual(t, float64(len(used)), rate+took.Seconds()*rate+1)
		require.LessOrEqual(t, level, most+answer.Seconds()*rate, "what the store decided is let go when its answer arrives")
		require.LessOrEqual(t, peak, int64(d.Seconds()*rate))
		require.Greater(t, fromLease, len(used)/2)
		require.GreaterOrEqual(t, float64(len(used)), 0.9*rate*lasts.Seconds())
	})
}

// While the limiter's clock stands still, the permits add up: granted, leased, and left in the bucket.
func TestLeaseAccount(t *testing.T) {
	server := redistest.Shared(t)
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			clock := clockwork.NewFakeClock()
			const size, rate = 1000.0, 100.0
			store := redisStores(server.Client(t), WithLocalTime(), WithKeyPrefix(fmt.Sprint(rand.Uint64(), ":")))[which]
			l, err := NewSmoothBursty("x", rate, WithStore(store), WithClock(clock), WithMaxPermits(size), WithInitialPermits(size), WithPrefetch(time.Second), WithStoreTimeout(10*time.Second))
			require.NoError(t, err)
			stored := func() float64 {
				b, err := l.State(background)
				require.NoError(t, err)
				return b.StoredPermits
			}
			held := func() float64 { return float64(leased(l)) }
			granted, accrued := 0.0, 0.0
			take := func(n int) {
				for range n {
					ok, err := l.TryAcquire(background, 1, 0)
					require.NoError(t, err)
					require.True(t, ok)
					granted++
				}
			}
			check := func(want float64) {
				require.NoError(t, redistest.Poll(10*time.Second, func() error { // a block may just be under way
					left, holds := stored(), held()
					if math.Abs(size+accrued-granted-holds-left) < 1e-6 {
						return nil
					}
					return fmt.Errorf("of %v permits %v were granted, %v are held and %v left", size+accrued, granted, holds, left)
				}))
				if want >= 0 {
					require.Equal(t, want, held())
				}
			}
			pass := func(d time.Duration) { // when nothing is under way
				require.Eventually(t, func() bool {
					return !look(l).Busy
				}, 10*time.Second, time.Millisecond)
				clock.Advance(d)
				accrued += d.Seconds() * rate
			}
			// Demand within the same microsecond is endless, but a lease has at most four times the permits that were used before.
			take(1)
			check(-1)
			require.LessOrEqual(t, held(), 8.0)
			take(300)
			check(-1)
			require.LessOrEqual(t, held(), rate)

			// Hardly used at half time: it goes back.
			for s := look(l); !s.Lease || s.LeaseUsed >= 0.25; s = look(l) {
				take(1)
				check(-1)
			}
			pass(500 * time.Millisecond)
			require.Eventually(t, func() bool { return !look(l).Lease }, 10*time.Second, time.Millisecond)
			check(0)

			// The lease has ended: its permits cannot be taken even before a timer has noticed that, and they are refunded.
			for held() == 0 {
				take(1)
				check(-1)
			}
			pass(time.Second)
			require.Eventually(t, func() bool { return !look(l).Lease }, 10*time.Second, time.Millisecond)
			check(0)

			// Close gives back at once, and the limiter leases no more.
			require.NoError(t, l.Close(background))
			require.Zero(t, held())
			require.Eventually(t, func() bool {
				return look(l).AlarmAt == 0
			}, 10*time.Second, time.Millisecond, "nothing is left to look after")
			left := stored()
			take(50)
			require.Zero(t, held())
			require.InDelta(t, left-50, stored(), 1e-6)
		})
	}
}

// A demand of now and then leases nothing.
func TestLeaseFollowsDemand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := NewSmoothBursty("x", 1000, WithStore(&Distant{NewMemoryStore(), time.Millisecond}), WithInitialPermits(1000), WithPrefetch(100*time.Millisecond))
		require.NoError(t, err)
		take := func() {
			ok, err := l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
		}
		for range 20 {
			take()
			require.False(t, look(l).Lease)
			time.Sleep(60 * time.Millisecond) // under two in the time of a lease
		}
		for range 20 {
			take()
			time.Sleep(time.Millisecond)
		}
		require.True(t, look(l).Lease, "a demand of more")
		require.NoError(t, l.Close(background))
	})
}

// tardy is a store that delays the reply to a request for a lease alone, once, by the time that was set.
type tardy struct {
	Store
	late     atomic.Int64
	answered atomic.Bool
}

func (s *tardy) Apply(ctx context.Context, b *Batch) error {
	err := s.Store.Apply(ctx, b)
	if len(b.asked.Requests) == 1 && b.asked.Requests[0].Op == permit.TakeStored {
		if pause := s.late.Swap(0); pause > 0 {
			time.Sleep(time.Duration(pause))
			s.answered.Store(true)
		}
	}
	return err
}

// drained takes until a block is on its way, late, and the one in use is used up.
func (s *tardy) drained(t *testing.T, l *RateLimiter, late time.Duration) (granted float64) {
	s.late.Store(int64(late))
	for s.late.Load() != 0 || look(l).InUse > 0 {
		ok, err := l.TryAcquire(background, 1, 0)
		require.NoError(t, err)
		require.True(t, ok)
		granted++
		time.Sleep(time.Millisecond) // so that the request for a block leaves before a caller joins it
	}
	require.False(t, s.answered.Load(), "it is still on its way")
	return granted
}

// A lease whose reply comes after its deadline is refunded, because another was requested meanwhile. A process never holds more than the
// permits of one lease.
func TestLateLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const timeout, block = 300 * time.Millisecond, 20
		s := &tardy{Store: NewMemoryStore()}
		clock := clockwork.NewFakeClock()
		l, err := NewSmoothBursty("x", 10, WithStore(s), WithClock(clock), WithMaxPermits(1000), WithInitialPermits(1000), WithPrefetch(2*time.Second), WithStoreTimeout(timeout))
		require.NoError(t, err)
		s.drained(t, l, 3*timeout)
		held := func() int64 { return leased(l) }
		for held() < block/2 { // the first of them waits until the block on its way is given up
			_, err := l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
		}
		require.False(t, s.answered.Load(), "it is still on its way")
		most := int64(0)
		require.Eventually(t, func() bool {
			most = max(most, held())
			now := look(l)
			return s.answered.Load() && !now.Busy && now.Refunds == 0
		}, 10*time.Second, time.Millisecond)
		require.LessOrEqual(t, max(most, held()), int64(block))
		require.NoError(t, l.Close(background))
	})
}

// Close waits for a block that is on its way.
func TestCloseWaitsForALease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size = 1000.0
		s := &tardy{Store: NewMemoryStore()}
		clock := clockwork.NewFakeClock()
		l, err := NewSmoothBursty("x", 100, WithStore(s), WithClock(clock), WithMaxPermits(size), WithInitialPermits(size), WithPrefetch(10*time.Second))
		require.NoError(t, err)
		granted := s.drained(t, l, 300*time.Millisecond)
		require.NoError(t, l.Close(background))
		out, err := apply(background, s.Store, &permit.Batch{Name: "x", Terms: &l.own.terms, Epoch: 1, LocalMicros: l.limiter.Coordinator.Micros})
		require.NoError(t, err)
		require.Equal(t, size-granted, out.Bucket.StoredPermits)
	})
}

// returns is a store that records the refunds it gets: under which max permits, and whether they were accepted.
type returns struct {
	Store
	mu    sync.Mutex
	asked int
	back  []string
}

func (s *returns) Apply(ctx context.Context, b *Batch) error {
	err := s.Store.Apply(ctx, b)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	for i := range b.asked.Requests {
		if r := &b.asked.Requests[i]; r.Op == permit.GiveBack {
			s.back = append(s.back, fmt.Sprintf("%v %v", settingOf(b.asked.Terms).Size, r.Grant.OK))
		}
	}
	return err
}

// noted returns the number of batches and the refunds since the last call of noted.
func (s *returns) noted() (asked int, back []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	asked, back = s.asked, s.back
	s.asked, s.back = 0, nil
	return asked, back
}

// holds is how many permits are held in blocks that were leased for a limiter.
func holds(l *RateLimiter) (left int64) {
	l.limiter.Coordinator.Inspect(func(s engine.State) { left = s.LeasedFor(&l.limiter) })
	return left
}

// Two limiters of one bucket disagree in their configuration, in one process or in two. Each holds a block, and they are closed one after
// the other. Each gives back its own block, under its own configuration. The store accepts it if no other configuration was in force
// since the grant, and a refund that it refuses changes nothing.
func TestCloseOfTwoThatDisagree(t *testing.T) {
	for _, processes := range []int{1, 2} {
		for _, first := range []string{"older", "newer"} {
			t.Run(fmt.Sprintf("processes=%d, closed first: %s", processes, first), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					memory := NewMemoryStore()
					store := &returns{Store: memory}
					open := func(size float64) *RateLimiter {
						l, err := NewSmoothBursty("x", 100, WithMaxPermits(size), WithInitialPermits(size), WithPrefetch(time.Second), WithStore(store))
						require.NoError(t, err)
						for taken := 0; holds(l) == 0; taken++ {
							require.Less(t, taken, 100)
							ok, err := l.TryAcquire(background, 1, 0)
							require.NoError(t, err)
							require.True(t, ok)
							synctest.Wait()
						}
						return l
					}
					older := open(1000)
					of := map[*RateLimiter]*returns{older: store}
					if processes > 1 {
						store = &returns{Store: memory}
					}
					newer := open(500)
					of[newer] = store
					stored := func() float64 { // under the newer one's configuration, by a limiter that is in no queue
						out, err := apply(background, memory, &permit.Batch{Name: "x", Terms: &newer.own.terms, LocalMicros: newer.limiter.Coordinator.Micros})
						require.NoError(t, err)
						return out.Bucket.StoredPermits
					}
					for _, s := range of {
						_, back := s.noted()
						require.Empty(t, back)
					}
					shut := func(l, other *RateLimiter, back string) {
						kept := holds(other)
						require.NoError(t, l.Close(background))
						require.Zero(t, holds(l))
						require.Equal(t, kept, holds(other), "what the other holds stays with it")
						_, got := of[l].noted()
						require.Equal(t, []string{back}, got)
					}
					left, own := stored(), float64(holds(newer))
					if first == "older" {
						shut(older, newer, "1000 false")
						require.Equal(t, left, stored())
						shut(newer, older, "500 true")
					} else {
						shut(newer, older, "500 true")
						require.Equal(t, left+own, stored())
						shut(older, newer, "1000 false")
					}
					require.Equal(t, left+own, stored())
				})
			})
		}
	}
}

// A limiter that has leased nothing has nothing to close, whatever others of its bucket hold, or wait for.
func TestCloseLeavesOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &tardy{Store: NewMemoryStore()}
		store := &returns{Store: slow}
		open := func(opts ...Option) *RateLimiter {
			l, err := NewSmoothBursty("x", 100, append(opts, WithMaxPermits(1000), WithInitialPermits(1000), WithStore(store))...)
			require.NoError(t, err)
			return l
		}
		l, other := open(WithPrefetch(10*time.Second)), open()
		for holds(l) == 0 {
			_, err := l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			synctest.Wait()
		}
		held := holds(l)
		store.noted()
		require.NoError(t, other.Close(background))
		asked, _ := store.noted()
		require.Zero(t, asked)
		require.Equal(t, held, holds(l))

		slow.drained(t, l, 300*time.Millisecond)
		began := time.Now()
		require.NoError(t, other.Close(background))
		require.Zero(t, time.Since(began), "it waits for no block")
		time.Sleep(time.Second)
		require.NotZero(t, holds(l))
		require.NoError(t, l.Close(background))
	})
}

// Close waits for refunds that are in flight, and for those that wait for the next batch.
func TestCloseWaitsForEarlierRefunds(t *testing.T) {
	for what, pause := range map[string]time.Duration{"waits its turn": 150 * time.Millisecond, "on its way": 250 * time.Millisecond} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &returns{Store: NewMemoryStore()}
				takes := time.Duration(0)
				l, err := NewSmoothBursty("x", 1000, WithMaxPermits(9000), WithInitialPermits(500), WithPrefetch(100*time.Millisecond),
					WithStore(&delayed{store, func() (there, back time.Duration) { return takes, 0 }}))
				require.NoError(t, err)
				for holds(l) == 0 {
					_, err := l.TryAcquire(background, 1, 0)
					require.NoError(t, err)
					synctest.Wait()
				}
				takes = 200 * time.Millisecond
				go func() { _, _ = l.State(background) }()
				time.Sleep(pause)
				require.Zero(t, holds(l), "the block has had its time")
				_, back := store.noted()
				require.Empty(t, back)
				require.NoError(t, l.Close(background))
				_, back = store.noted()
				require.NotEmpty(t, back)
				require.NotContains(t, back, "9000 false")
				time.Sleep(time.Second)
				_, back = store.noted()
				require.Empty(t, back)
			})
		})
	}
}
