package tokenbucket_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// What callers of a busy bucket may expect of one another: order, equal shares, nothing lost and nothing kept. Between real
// processes that is tested in integration/fairness.

// inBubble runs a test in virtual time, and leaves what it has begun the time to end.
func inBubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		defer time.Sleep(time.Minute)
		test(t)
	})
}

// inBubbles runs a test in virtual time, with stores of two kinds: one in memory, and one whose answers take 2 ms.
func inBubbles(t *testing.T, test func(t *testing.T, store tb.Store)) {
	t.Helper()
	for name, open := range map[string]func() tb.Store{
		"memory":  func() tb.Store { return tb.NewMemoryStore() },
		"distant": func() tb.Store { return &tb.Distant{Store: tb.NewMemoryStore(), Takes: 2 * time.Millisecond} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, func(t *testing.T) { test(t, open()) })
		})
	}
}

// expect fails the test for any error except that of a caller that gave up. Of thousands it logs the first few.
func expect(t *testing.T, err error) {
	t.Helper()
	if err != nil && !errors.Is(err, context.Canceled) && !t.Failed() {
		t.Error(err)
	}
}

func bursty(t *testing.T, rate float64, opts ...tb.Option) *tb.RateLimiter {
	t.Helper()
	l, err := tb.NewSmoothBursty("x", rate, opts...)
	require.NoError(t, err)
	return l
}

// A bucket that stores nothing and whose permits are 10 s apart is used completely, whichever callers wait.
func TestSlowRateIsUsed(t *testing.T) {
	inBubbles(t, func(t *testing.T, store tb.Store) {
		l := bursty(t, 0.1, tb.WithStore(store), tb.WithMaxPermits(0))
		hour, end := context.WithCancel(ctx)
		var used atomic.Int64
		var callers sync.WaitGroup
		for range 10 {
			callers.Go(func() {
				for {
					if _, err := l.Acquire(hour, 1); err != nil {
						expect(t, err)
						return
					}
					used.Add(1)
				}
			})
		}
		time.Sleep(time.Hour)
		end()
		callers.Wait()
		require.InDelta(t, 360, used.Load(), 1)
	})
}

// Callers of one process are served in the order in which they came, though some of them say how long they would wait at most.
func TestOrderOfVerbs(t *testing.T) {
	inBubbles(t, func(t *testing.T, store tb.Store) {
		l := bursty(t, 10, tb.WithStore(store), tb.WithMaxPermits(1))
		until, end := context.WithCancel(ctx)
		var served atomic.Int64
		var callers sync.WaitGroup
		for range 150 {
			callers.Go(func() {
				_, err := l.Acquire(until, 1)
				expect(t, err)
				if err == nil {
					served.Add(1)
				}
			})
		}
		time.Sleep(time.Second)
		for range 50 {
			callers.Go(func() {
				for {
					if ok, err := l.TryAcquire(until, 1, time.Hour); !ok || err != nil {
						expect(t, err)
						return
					}
				}
			})
		}
		time.Sleep(15 * time.Second)
		synctest.Wait()
		before := served.Load()
		end()
		callers.Wait()
		require.Equal(t, int64(150), before)
	})
}

// late is a store whose next reply is delayed once, by the time that was set.
type late struct {
	tb.Store
	by atomic.Int64
}

// Apply implements Store.
func (s *late) Apply(ctx context.Context, b *tb.Batch) error {
	err := s.Store.Apply(ctx, b)
	time.Sleep(2*time.Millisecond + time.Duration(s.by.Swap(0)))
	return err
}

// Callers of one process are served in the order in which they came, though an answer of the store is 300 ms late.
func TestOrderOfLateAnswers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		store := &late{Store: tb.NewMemoryStore()}
		l := bursty(t, 10, tb.WithStore(store), tb.WithMaxPermits(1))
		var mu sync.Mutex
		var order, want []int
		var callers sync.WaitGroup
		ask := func(i int) {
			want = append(want, i)
			callers.Go(func() {
				_, err := l.Acquire(ctx, 1)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					t.Error(err)
				}
				order = append(order, i)
			})
			time.Sleep(time.Millisecond)
		}
		for round := range 20 { // with the bucket at all moments between two permits
			for i := range 3 {
				ask(10*round + i)
			}
			callers.Wait()
			time.Sleep(time.Duration(round) * 13 * time.Millisecond)
			store.by.Store(int64(300 * time.Millisecond))
			for i := range 4 {
				ask(10*round + 3 + i)
			}
			callers.Wait()
		}
		require.Equal(t, want, order)
	})
}

// joining is a context that signals that its caller has begun to wait, because then it calls Done.
type joining struct {
	context.Context
	joined func()
	once   sync.Once
}

// Done implements context.Context.
func (c *joining) Done() <-chan struct{} {
	c.once.Do(c.joined)
	return c.Context.Done()
}

// Tens of thousands who wait give up at the same moment: each of them leaves as fast as one of a few.
func TestManyGiveUpAtOnce(t *testing.T) {
	for verb, ask := range map[string]func(ctx context.Context, l *tb.RateLimiter) error{
		"acquire": func(ctx context.Context, l *tb.RateLimiter) error {
			_, err := l.Acquire(ctx, 1)
			return err
		},
		"try": func(ctx context.Context, l *tb.RateLimiter) error {
			_, err := l.TryAcquire(ctx, 1, 24*time.Hour)
			return err
		},
	} {
		t.Run(verb, func(t *testing.T) {
			leave := func(count int) time.Duration {
				l := bursty(t, 1, tb.WithInitialPermits(0))
				shared, cancel := context.WithCancel(ctx)
				defer cancel()
				var joined, waiting sync.WaitGroup
				joined.Add(count)
				for range count {
					waiting.Go(func() {
						c := &joining{Context: shared, joined: joined.Done}
						expect(t, ask(c, l))
						_ = c.Done() // for a caller that did not wait
					})
				}
				joined.Wait()
				began := time.Now()
				cancel()
				waiting.Wait()
				return time.Since(began)
			}
			few, many := 5000, 40_000
			if redistest.Raced {
				few, many = 1000, 8000
			}
			var took string
			for range 3 { // others may keep this machine busy
				short, long := leave(few), leave(many)
				took = fmt.Sprintf("%d leave within %v, %d within %v", few, short, many, long)
				if long < 2*time.Second && (redistest.Raced || long/time.Duration(many) <= 4*max(short/time.Duration(few), 2*time.Microsecond)) {
					t.Log(took)
					return
				}
			}
			t.Error(took)
		})
	}
}

// Of callers who come and leave while a bucket is held back nothing is kept, though another waits who came before them.
func TestNothingIsKeptOfThoseWhoLeave(t *testing.T) {
	heap := func() float64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	for name, at := range map[string]int{"one by one": 1, "by the thousand": 1000} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				l := bursty(t, 100)
				require.NoError(t, l.Penalize(ctx, time.Hour))
				stays, end := context.WithCancel(ctx)
				var first sync.WaitGroup
				first.Go(func() { _, _ = l.Acquire(stays, 1) })
				leave := func(count int) {
					for range count / at {
						shared, cancel := context.WithCancel(ctx)
						var waiting sync.WaitGroup
						for range at {
							waiting.Go(func() { _, _ = l.Acquire(shared, 1) })
						}
						synctest.Wait()
						cancel()
						waiting.Wait()
					}
				}
				leave(2000)
				before := heap()
				if redistest.Raced {
					leave(10_000)
				} else {
					leave(100_000)
				}
				kept := heap() - before
				end()
				first.Wait()
				require.LessOrEqual(t, kept, float64(1<<20))
			})
		})
	}
}

// Limiters of one name on one MemoryStore share one bucket and one queue, whatever their timeouts. A penalty by one of them holds back the
// waiters of the others.
func TestPenaltyHoldsAllLimiters(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const rate, penalty = 1.0, 10 * time.Second
		store := tb.NewMemoryStore()
		limiters := []*tb.RateLimiter{
			bursty(t, rate, tb.WithStore(store), tb.WithMaxPermits(1), tb.WithStoreTimeout(time.Second)),
			bursty(t, rate, tb.WithStore(store), tb.WithMaxPermits(1), tb.WithStoreTimeout(2*time.Second)),
		}
		began := time.Now()
		var mu sync.Mutex
		var used []time.Duration
		var callers sync.WaitGroup
		for i := range 6 {
			callers.Go(func() {
				if _, err := limiters[i%2].Acquire(ctx, 1); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				used = append(used, time.Since(began))
			})
			synctest.Wait()
		}
		time.Sleep(500 * time.Millisecond)
		require.NoError(t, limiters[0].Penalize(ctx, penalty))
		held := time.Since(began) + penalty
		callers.Wait()
		for _, at := range used[1:] { // the first went at once
			require.GreaterOrEqual(t, at, held, "%v", used)
		}
		worst := tb.Worst(len(used), func(i int) (int64, float64) { return used[i].Microseconds(), 1 }, rate)
		require.LessOrEqual(t, worst, 1+1e-3, "%v", used)
	})
}

// However many reservations lie ahead, one more costs as much as the first: of limiters that do not agree on the configuration, or
// of two processes in batches. A bucket with many is measured in turns with a new one, so both are on an equally busy machine.
func TestReservationsInTurns(t *testing.T) {
	client, prefix := redisClient(t), prefixOf(t)
	memory := tb.NewMemoryStore()
	for name, open := range map[string]func(bucket string, i int) *tb.RateLimiter{
		"two configurations": func(bucket string, i int) *tb.RateLimiter {
			l, err := tb.NewSmoothBursty(bucket, []float64{10, 20}[i], tb.WithStore(memory))
			require.NoError(t, err)
			return l
		},
		"two processes": func(bucket string, _ int) *tb.RateLimiter {
			store := tb.NewRedisScriptStore(client, tb.WithKeyPrefix(prefix))
			l, err := tb.NewSmoothBursty(bucket, 10, tb.WithStore(store), tb.WithStoreTimeout(time.Minute))
			require.NoError(t, err)
			return l
		},
	} {
		t.Run(name, func(t *testing.T) {
			const ahead, measured = 15_000, 1000
			type pair [2]*tb.RateLimiter
			reserve := func(l *tb.RateLimiter) time.Duration {
				began := time.Now()
				r, err := l.Reserve(ctx, 1)
				took := time.Since(began)
				require.NoError(t, err)
				require.True(t, r.OK())
				return took
			}
			long, fresh := pair{open("long", 0), open("long", 1)}, pair{open("fresh", 0), open("fresh", 1)}
			for i := range ahead {
				reserve(long[i%2])
			}
			var first, last []time.Duration
			for i := range measured {
				first = append(first, reserve(fresh[i%2]))
				last = append(last, reserve(long[i%2]))
			}
			slices.Sort(first)
			slices.Sort(last)
			t.Logf("median behind few %v, behind %d and more %v", first[measured/2], ahead, last[measured/2])
			require.LessOrEqual(t, last[measured/2], 3*max(first[measured/2], time.Microsecond))
		})
	}
}

// A permit that was due is used: a Cancel after the work, which callers of x/time/rate make, refunds nothing.
func TestCancelAfterUse(t *testing.T) {
	for _, callers := range []int{1, 10} {
		t.Run(fmt.Sprint(callers), func(t *testing.T) {
			inBubbles(t, func(t *testing.T, store tb.Store) {
				const rate, calls = 10.0, 1000
				l := bursty(t, rate, tb.WithStore(store), tb.WithMaxPermits(1))
				began := time.Now()
				var all sync.WaitGroup
				for range callers {
					all.Go(func() {
						for range calls / callers {
							func() {
								r, err := l.Reserve(ctx, 1)
								if err != nil {
									t.Error(err)
									return
								}
								defer func() {
									if err := r.Cancel(ctx); err != nil {
										t.Error(err)
									}
								}()
								<-r.Ready()
								time.Sleep(5 * time.Millisecond)
							}()
						}
					})
				}
				all.Wait()
				require.InDelta(t, calls/rate, time.Since(began).Seconds(), 0.5)
			})
		})
	}
}

// Requests for 100 permits and for 1, in equal numbers of permits, on a bucket that warms up and whose callers pay themselves:
// whether they share a process or not, neither starve.
func TestSizesShare(t *testing.T) {
	for name, distant := range map[string]bool{"one process": false, "two processes": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, func(t *testing.T) {
				const rate, warm = 1000.0, 4 * time.Second
				seconds := 24 // in which all callers come once
				if redistest.Raced {
					seconds = 8
				}
				lasts := time.Duration(seconds) * time.Second
				store := tb.NewMemoryStore()
				began := time.Now()
				var used [2]atomic.Int64
				until, end := context.WithCancel(ctx)
				var callers sync.WaitGroup
				for i, size := range []int{1, 100} {
					var own tb.Store = store
					if distant {
						own = &tb.Distant{Store: store, Takes: time.Millisecond}
					}
					l, err := tb.NewSmoothWarmingUp("x", rate, 2*time.Second, tb.WithStore(own), tb.WithPayment(tb.PayNow))
					require.NoError(t, err)
					for range seconds * int(rate) / 2 / size {
						callers.Go(func() {
							for {
								if _, err := l.Acquire(until, size); err != nil {
									expect(t, err)
									return
								}
								if since := time.Since(began); since > warm && since <= warm+lasts {
									used[i].Add(int64(size))
								}
							}
						})
					}
				}
				time.Sleep(warm + lasts)
				end()
				callers.Wait()
				small, large := float64(used[0].Load()), float64(used[1].Load())
				t.Logf("%v by requests of 1, %v by requests of 100", small, large)
				require.InEpsilon(t, rate*lasts.Seconds(), small+large, 0.02)
				require.GreaterOrEqual(t, min(small, large), 0.4*(small+large)/2)
			})
		})
	}
}
