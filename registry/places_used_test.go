package registry_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// crowd is callers each of whom calls again as soon as its last call has ended, or soon after it was refused.
type crowd struct {
	callers int
	lasts   func(*rand.Rand) time.Duration // how long a call takes
	stays   func(*rand.Rand) time.Duration // after how long its caller gives up a call that has not begun
	seed    uint64
}

const never = time.Hour

// run returns the calls that began within a time, by their beginning.
func (c *crowd) run(t *testing.T, r *registry.Registry, last time.Duration) (passed []began) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	end := time.Now().Add(last)
	for i := range c.callers {
		random := rand.New(rand.NewPCG(c.seed, uint64(i)))
		wg.Go(func() {
			for time.Now().Before(end) {
				ctx, cancel := context.WithCancel(ctx)
				gives := time.AfterFunc(c.stays(random), cancel)
				a, err := r.Enter(ctx, "/a")
				gives.Stop()
				cancel()
				at := time.Now()
				if err != nil {
					require.ErrorIs(t, err, context.Canceled)
					continue
				}
				if !a.OK {
					time.Sleep(time.Duration(1+random.IntN(10)) * time.Millisecond)
					continue
				}
				time.Sleep(c.lasts(random))
				if at.Before(end) {
					mu.Lock()
					passed = append(passed, began{at, time.Now()})
					mu.Unlock()
				}
				a.Leave()
			}
		})
	}
	wg.Wait()
	slices.SortFunc(passed, func(a, b began) int { return a.at.Compare(b.at) })
	return passed
}

// shortest returns the time in which these calls could have begun, in this order: each as soon as there are a place and a permit. A new
// bucket has one permit.
func shortest(row *registry.Limit, calls []began) (now time.Duration) {
	free := make([]time.Duration, row.Concurrent) // when each place is free
	most, stored := max(1, *row.Burst), 1.0
	for _, c := range calls {
		slices.Sort(free)
		wait := max(0, free[0]-now)
		stored = min(most, stored+row.Rate*wait.Seconds())
		if now += wait; stored < 1 {
			now += time.Duration((1 - stored) / row.Rate * float64(time.Second))
			stored = 1
		}
		stored--
		free[0] = now + c.until.Sub(c.at)
	}
	return now
}

// used returns the share of what the row allows that these calls have used, from the first second on.
func used(row *registry.Limit, calls []began, since time.Time) float64 {
	return shortest(row, calls).Seconds() / calls[len(calls)-1].at.Sub(since).Seconds()
}

// A row whose places are the bottleneck uses them from the beginning, whether or not its bucket saves up permits.
func TestPlacesAreUsed(t *testing.T) {
	for _, size := range []float64{0, 0.5, 1, 200} {
		synctest.Test(t, func(t *testing.T) {
			row := registry.Limit{Name: "/a", Rate: 200, Burst: &size, MaxWait: time.Second, Version: 1, Concurrent: 3, ConcurrentWait: time.Second}
			r := openLocal(t, registry.Static{row})
			defer r.Close()
			began := time.Now()
			c := crowd{callers: 60, lasts: func(*rand.Rand) time.Duration { return 30 * time.Millisecond }, stays: func(*rand.Rand) time.Duration { return never }}
			calls := c.run(t, r, time.Second)
			checkBounds(t, &row, calls, row.String())
			require.GreaterOrEqual(t, len(calls), 98, "of a hundred: %s", row.String())
			require.GreaterOrEqual(t, used(&row, calls, began), 0.98, row.String())
			l, err := r.Limiter("/a")
			require.NoError(t, err)
			time.Sleep(time.Minute)
			b, err := l.State(ctx)
			require.NoError(t, err)
			require.Equal(t, max(1, size), b.StoredPermits)
		})
	}
}

// Whatever the rate, the places and the calls, and whoever gives up: a crowd uses what the row allows, and no more.
func TestCrowdsUseTheirRow(t *testing.T) {
	for seed := range uint64(24) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 7))
			size := []float64{0, 0.5, 1, 5, 50}[random.IntN(5)]
			row := registry.Limit{
				Name: "/a", Rate: float64(20 + random.IntN(400)), Burst: &size, MaxWait: []time.Duration{100 * time.Millisecond, 300 * time.Millisecond, time.Second}[random.IntN(3)], Version: 1,
				Concurrent: 1 + random.IntN(8), ConcurrentWait: time.Duration(200+random.IntN(1800)) * time.Millisecond,
			}
			mean, spread := time.Duration(5+random.IntN(95))*time.Millisecond, 2*random.Float64()
			c := crowd{callers: 4*row.Concurrent + random.IntN(60), seed: seed, lasts: func(r *rand.Rand) time.Duration {
				return time.Duration((1 + spread*(r.Float64()-0.5)) * float64(mean))
			}, stays: func(r *rand.Rand) time.Duration {
				if seed%2 == 0 || r.IntN(3) > 0 {
					return never
				}
				return time.Duration(1+r.IntN(200)) * time.Millisecond
			}}
			r := openLocal(t, registry.Static{row})
			defer r.Close()
			began := time.Now()
			calls := c.run(t, r, 3*time.Second)
			note := fmt.Sprintf("seed %d: %s; %d callers, %v a call", seed, row.String(), c.callers, mean)
			checkBounds(t, &row, calls, note)
			require.GreaterOrEqual(t, used(&row, calls, began), 0.95, note)
			time.Sleep(time.Minute)
			u, _, err := r.Usage(ctx, "/a")
			require.NoError(t, err)
			require.Zero(t, u.Places, note)
		})
	}
}
