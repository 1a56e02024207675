package tokenbucket_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// What tenants of one process may expect of one another (WithFairness). Between real processes that is tested in integration/fairness.

type tenantKey struct{}

// of returns a context of a tenant.
func of(ctx context.Context, tenant string) context.Context {
	return context.WithValue(ctx, tenantKey{}, tenant)
}

// byTenant is the option by which calls belong to the tenant of their context.
func byTenant() tb.Option {
	return tb.WithFairness(func(ctx context.Context) string {
		tenant, _ := ctx.Value(tenantKey{}).(string)
		return tenant
	})
}

// grants records who was served, in order.
type grants struct {
	mu    sync.Mutex
	order []string
}

func (g *grants) add(tenant string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.order = append(g.order, tenant)
}

func (g *grants) len() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.order)
}

// Nine tenants with one caller each come when a thousand callers of another wait. Each of them waits at most one turn: until every other
// tenant was served once.
func TestQuietTenantsWaitOneTurn(t *testing.T) {
	for _, rate := range []float64{5, 20, 1000} {
		t.Run(fmt.Sprint(rate), func(t *testing.T) {
			inBubbles(t, func(t *testing.T, store tb.Store) {
				l := bursty(t, rate, tb.WithStore(store), tb.WithMaxPermits(0), byTenant())
				all, end := context.WithCancel(ctx)
				defer end()
				var g grants
				var callers sync.WaitGroup
				call := func(tenant string) {
					callers.Go(func() {
						if _, err := l.Acquire(of(all, tenant), 1); err == nil {
							g.add(tenant)
						} else {
							expect(t, err)
						}
					})
				}
				for range 1000 {
					call("busy")
				}
				time.Sleep(300 * time.Millisecond)
				synctest.Wait()
				for round := range 3 {
					before := g.len()
					for i := range 9 {
						call(fmt.Sprint(i))
					}
					synctest.Wait()
					for g.len() < before+11 {
						time.Sleep(time.Millisecond)
						synctest.Wait()
					}
					served := map[string]int{}
					for _, tenant := range g.order[before : before+11] {
						served[tenant]++
					}
					for i := range 9 {
						require.Equal(t, 1, served[fmt.Sprint(i)], "round %d: %v", round, g.order[before:before+11])
					}
				}
				end()
				callers.Wait()
			})
		})
	}
}

// Tenants whose callers always wait are served by their weights, and the whole rate is used.
func TestTenantsByWeight(t *testing.T) {
	weights := map[string]int{"three": 3, "one": 1, "half": 0}
	for _, sizes := range []map[string]int{{"three": 1, "one": 1, "half": 1}, {"three": 1, "one": 7, "half": 2}, {"three": 20, "one": 1, "half": 3}} {
		t.Run(fmt.Sprint(sizes), func(t *testing.T) {
			inBubbles(t, func(t *testing.T, store tb.Store) {
				l := bursty(t, 100, tb.WithStore(store), byTenant(), tb.WithTenantWeights(func(tenant string) int { return weights[tenant] }))
				minutes, end := context.WithCancel(ctx)
				var used [3]atomic.Int64
				var callers sync.WaitGroup
				for i, tenant := range []string{"three", "one", "half"} {
					for range 20 * (i + 1) {
						callers.Go(func() {
							for {
								if _, err := l.Acquire(of(minutes, tenant), sizes[tenant]); err != nil {
									expect(t, err)
									return
								}
								used[i].Add(int64(sizes[tenant]))
							}
						})
					}
				}
				time.Sleep(2 * time.Minute)
				end()
				callers.Wait()
				total := used[0].Load() + used[1].Load() + used[2].Load()
				require.InEpsilon(t, 12_000, total, 0.01)
				require.InEpsilon(t, 3*used[1].Load(), used[0].Load(), 0.02)
				require.InEpsilon(t, used[1].Load(), used[2].Load(), 0.02, "a weight below 1 counts as 1")
			})
		})
	}
}

// A caller of a quiet tenant is granted within a timeout that the callers ahead by arrival would exceed. One of the busy tenant is refused at
// once, and a caller that tenants overtake is refused at its timeout.
func TestTimeoutsOfTenants(t *testing.T) {
	inBubbles(t, func(t *testing.T, store tb.Store) {
		l := bursty(t, 10, tb.WithStore(store), tb.WithMaxPermits(0), byTenant())
		all, end := context.WithCancel(ctx)
		var callers sync.WaitGroup
		for range 100 {
			callers.Go(func() {
				_, err := l.Acquire(of(all, "busy"), 1)
				expect(t, err)
			})
		}
		time.Sleep(2 * time.Second)
		begun := time.Now()
		ok, err := l.TryAcquire(of(all, "quiet"), 1, 300*time.Millisecond)
		require.NoError(t, err)
		require.True(t, ok, "the 80 callers ahead have permits for 8 s")
		require.LessOrEqual(t, time.Since(begun), 300*time.Millisecond)

		begun = time.Now()
		ok, err = l.TryAcquire(of(all, "busy"), 1, time.Second)
		require.NoError(t, err)
		require.False(t, ok)
		require.Less(t, time.Since(begun), 100*time.Millisecond, "77 calls of its own tenant are ahead")

		begun = time.Now()
		_, err = l.TryAcquire(of(all, "quiet"), 1, 150*time.Millisecond)
		require.NoError(t, err)
		require.LessOrEqual(t, time.Since(begun), 160*time.Millisecond)
		end()
		callers.Wait()
		calls, longest := l.Waiting()
		require.Zero(t, calls)
		require.Zero(t, longest)
	})
}

// Waiting returns the longest wait of any caller, although others were served before it.
func TestWaitingOfTenants(t *testing.T) {
	inBubbles(t, func(t *testing.T, store tb.Store) {
		l := bursty(t, 1, tb.WithStore(store), tb.WithMaxPermits(0), byTenant())
		all, end := context.WithCancel(ctx)
		var callers sync.WaitGroup
		come := func(tenant string) {
			callers.Go(func() {
				_, err := l.Acquire(of(all, tenant), 1)
				expect(t, err)
			})
			synctest.Wait()
		}
		for range 50 {
			come("busy")
		}
		for i := range 20 {
			time.Sleep(500 * time.Millisecond)
			come(fmt.Sprint(i))
		}
		calls, longest := l.Waiting()
		require.InDelta(t, 60, calls, 1)
		require.InDelta(t, 10, longest.Seconds(), 0.1, "callers of the busy tenant wait from the beginning")
		end()
		callers.Wait()
	})
}

// One tenant takes at most half of the room for waiters, and leaves some for others. A caller that leaves makes room again.
func TestMaxWaitersOfTenants(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		l := bursty(t, 0.001, tb.WithMaxPermits(0), tb.WithMaxWaiters(12), byTenant())
		all, end := context.WithCancel(ctx)
		var callers sync.WaitGroup
		var full, other atomic.Int64
		come := func(ctx context.Context, tenant string) {
			callers.Go(func() {
				switch _, err := l.Acquire(of(ctx, tenant), 1); {
				case errors.Is(err, tb.ErrTooManyWaiters):
					full.Add(1)
				case !errors.Is(err, context.Canceled):
					other.Add(1)
				}
			})
			synctest.Wait()
		}
		require.True(t, must(l.TryAcquire(ctx, 1, time.Hour)))
		one, leaves := context.WithCancel(all)
		come(one, "busy")
		for range 20 {
			come(all, "busy")
		}
		require.EqualValues(t, 15, full.Load(), "6 of 12 wait")
		for i := range 5 {
			come(all, fmt.Sprint("quiet ", i))
		}
		require.EqualValues(t, 15, full.Load())
		leaves()
		synctest.Wait()
		come(all, "late")
		require.EqualValues(t, 15, full.Load())
		for range 5 {
			come(all, "full")
		}
		require.Greater(t, full.Load(), int64(15))
		require.Zero(t, other.Load())
		end()
		callers.Wait()
	})
}

// Reserve does not wait behind tenants, and a reservation keeps its due time whoever takes turns.
func TestReservationsBesideTenants(t *testing.T) {
	inBubbles(t, func(t *testing.T, store tb.Store) {
		l := bursty(t, 10, tb.WithStore(store), tb.WithMaxPermits(0), byTenant())
		all, end := context.WithCancel(ctx)
		var callers sync.WaitGroup
		for i := range 50 {
			callers.Go(func() {
				_, err := l.Acquire(of(all, fmt.Sprint(i%5)), 1+i%3)
				expect(t, err)
			})
		}
		time.Sleep(3 * time.Second)
		for range 5 {
			r, err := l.Reserve(all, 2)
			require.NoError(t, err)
			due := time.Now().Add(r.Delay())
			for i := range 4 {
				callers.Go(func() {
					_, err := l.Acquire(of(all, fmt.Sprint("new", i)), 3)
					expect(t, err)
				})
			}
			<-r.Ready()
			require.LessOrEqual(t, time.Now(), due.Add(5*time.Millisecond))
		}
		end()
		callers.Wait()
	})
}

// Callers that give up at random leave no trace: the whole rate is used by those who stay, and every tenant has its part.
func TestTenantsGiveUp(t *testing.T) {
	inBubbles(t, func(t *testing.T, store tb.Store) {
		l := bursty(t, 50, tb.WithStore(store), tb.WithMaxPermits(0), byTenant())
		minute, end := context.WithTimeout(ctx, time.Minute)
		defer end()
		var used [2]atomic.Int64
		var callers sync.WaitGroup
		for i := range 60 {
			callers.Go(func() {
				for n := 0; minute.Err() == nil; n++ {
					patience, giveUp := context.WithTimeout(minute, time.Duration(100+(i*37+n*101)%900)*time.Millisecond)
					if _, err := l.Acquire(of(patience, fmt.Sprint(i/40)), 1); err == nil { // 40 of one, 20 of the other
						used[i/40].Add(1)
					} else {
						time.Sleep(10 * time.Millisecond)
					}
					giveUp()
				}
			})
		}
		callers.Wait()
		require.InEpsilon(t, 3000, used[0].Load()+used[1].Load(), 0.03)
		require.InEpsilon(t, used[0].Load(), used[1].Load(), 0.05)
	})
}

// Limiters of one bucket with and without the option have queues of their own, and share the rate as two processes do.
func TestFairAndPlainLimiters(t *testing.T) {
	inBubbles(t, func(t *testing.T, store tb.Store) {
		fair, plain := bursty(t, 50, tb.WithStore(store), tb.WithMaxPermits(0), byTenant()), bursty(t, 50, tb.WithStore(store), tb.WithMaxPermits(0))
		minute, end := context.WithTimeout(ctx, time.Minute)
		defer end()
		var used [2]atomic.Int64
		var callers sync.WaitGroup
		for i, l := range []*tb.RateLimiter{fair, plain} {
			for range 100 {
				callers.Go(func() {
					for {
						if _, err := l.Acquire(minute, 1); err != nil {
							return
						}
						used[i].Add(1)
					}
				})
			}
		}
		callers.Wait()
		require.InEpsilon(t, 3000, used[0].Load()+used[1].Load(), 0.03)
		require.InEpsilon(t, used[0].Load(), used[1].Load(), 0.1)
	})
}

// Bad options are refused.
func TestFairnessOptions(t *testing.T) {
	for name, o := range map[string]tb.Option{"fairness": tb.WithFairness(nil), "tenant weights": tb.WithTenantWeights(nil)} {
		_, err := tb.NewSmoothBursty("x", 1, o)
		require.ErrorIs(t, err, tb.ErrInvalidConfig)
		require.ErrorContains(t, err, name)
	}
	_, err := tb.NewSmoothBursty("x", 1, tb.WithTenantWeights(func(string) int { return 1 }))
	require.ErrorContains(t, err, "WithFairness, too")
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
