package tokenbucket_test

import (
	"context"
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
