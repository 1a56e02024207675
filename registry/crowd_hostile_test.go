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

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// hostileFar is a store whose replies take ten milliseconds.
type hostileFar struct {
	tokenbucket.Store
	trip time.Duration
}

func (s *hostileFar) Apply(ctx context.Context, b *tokenbucket.Batch) error {
	time.Sleep(s.trip)
	return s.Store.Apply(ctx, b)
}

// A caller of a row with places leaves while a load waits for others to give back what they hold. For the race detector.
func TestHostileCallerLeavesWhileRowsChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		places := func(l *registry.Limit) { l.Concurrent = 100 }
		source := &fake{}
		source.set(hostileRow("/a", 10, places))
		limits := open(t, source, &hostileFar{tokenbucket.NewMemoryStore(), 10 * time.Millisecond}, registry.WithInterval(time.Hour),
			registry.WithLocalSemaphores())
		var calls sync.WaitGroup
		var leaves []context.CancelFunc
		for range 5 {
			within, leave := context.WithCancel(ctx)
			leaves = append(leaves, leave)
			calls.Go(func() { _, _ = allow(within, limits, "/a") })
			time.Sleep(time.Millisecond)
		}
		time.Sleep(50 * time.Millisecond)
		source.set(hostileRow("/a", 11, places))
		calls.Go(func() { require.NoError(t, limits.Reload(ctx)) })
		for _, leave := range slices.Backward(leaves) {
			time.Sleep(3 * time.Millisecond)
			leave()
		}
		calls.Wait()
		limits.Close()
		time.Sleep(time.Second)
	})
}

// Rows change ten times in a millisecond while callers of Enter come and go: all get an answer, places are free at the end, and the bound holds.
func TestHostileEnterManyChanges(t *testing.T) {
	for seed := range uint64(10) {
		for _, trip := range []time.Duration{0, 300 * time.Microsecond, 20 * time.Millisecond} {
			t.Run(fmt.Sprintf("%d %v", seed, trip), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					random := rand.New(rand.NewPCG(seed, 2))
					var store tokenbucket.Store = tokenbucket.NewMemoryStore()
					if trip != 0 {
						store = &hostileFar{store, trip}
					}
					draw := func(i int) registry.Limit {
						return hostileRow("/a", 20, func(l *registry.Limit) {
							l.Version = int64(i)
							l.MaxWait = time.Second + time.Duration(i)
							if seed%2 == 0 {
								l.Concurrent, l.ConcurrentWait = 5+i%3, time.Second
							}
							if i%5 == 4 {
								l.Concurrent, l.ConcurrentWait = 0, 0
							}
						})
					}
					source := &fake{}
					source.set(draw(0))
					limits := open(t, source, store, registry.WithInterval(time.Hour), registry.WithLocalSemaphores())
					var mu sync.Mutex
					var at []time.Time
					var calls sync.WaitGroup
					for range 500 {
						come, stay, leave := time.Duration(random.IntN(4000)), time.Duration(random.IntN(400)), time.Duration(random.IntN(3000))
						calls.Go(func() {
							time.Sleep(come * time.Millisecond)
							within, cancel := context.WithTimeout(ctx, leave*time.Millisecond)
							defer cancel()
							a, err := limits.Enter(within, "/a")
							if err != nil || !a.OK {
								return
							}
							mu.Lock()
							at = append(at, time.Now())
							mu.Unlock()
							time.Sleep(stay * time.Millisecond)
							a.Leave()
						})
					}
					i := 0
					calls.Go(func() {
						for range 20 {
							time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond)
							for range 10 {
								i++
								source.set(draw(i))
								require.NoError(t, limits.Reload(ctx))
								time.Sleep(100 * time.Microsecond)
							}
						}
					})
					calls.Wait()
					slices.SortFunc(at, time.Time.Compare)
					for i := range at {
						for j := i; j < len(at); j++ {
							d := at[j].Sub(at[i]).Seconds() + 2*trip.Seconds()
							require.LessOrEqual(t, float64(j-i+1), 1+1+20*d+0.01, "%v to %v", at[i], at[j])
						}
					}
					t.Logf("%d passed in %v", len(at), at[len(at)-1].Sub(at[0]))
					source.set(hostileRow("/a", 20, func(l *registry.Limit) { l.Concurrent = 5 }))
					require.NoError(t, limits.Reload(ctx))
					time.Sleep(5 * time.Second)
					inside := 0
					for range 5 {
						a, err := limits.Enter(ctx, "/a")
						require.NoError(t, err)
						require.True(t, a.OK, "%v", a.By)
						inside++
						defer a.Leave()
					}
					limits.Close()
					time.Sleep(time.Second)
				})
			})
		}
	}
}

// A call waits no longer than the rows say, however often they change.
func TestHostileEnterWaitsNoLonger(t *testing.T) {
	for name, change := range map[string]func(*registry.Limit){
		"rate only": func(*registry.Limit) {},
		"places":    func(l *registry.Limit) { l.Concurrent, l.ConcurrentWait = 1, time.Second },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				source := &fake{}
				draw := func(i int) registry.Limit {
					return hostileRow("/a", 1, change, func(l *registry.Limit) { l.MaxWait = 2*time.Second + time.Duration(i) })
				}
				source.set(draw(0))
				limits := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour), registry.WithLocalSemaphores())
				hold, err := limits.Enter(ctx, "/a")
				require.NoError(t, err)
				require.True(t, hold.OK)
				var calls sync.WaitGroup
				var longest time.Duration
				var mu sync.Mutex
				for range 20 {
					calls.Go(func() {
						began := time.Now()
						a, err := limits.Enter(ctx, "/a")
						require.NoError(t, err)
						if a.OK {
							defer a.Leave()
						}
						mu.Lock()
						defer mu.Unlock()
						longest = max(longest, time.Since(began))
					})
				}
				for i := range 100 {
					time.Sleep(70 * time.Millisecond)
					source.set(draw(i + 1))
					require.NoError(t, limits.Reload(ctx))
				}
				calls.Wait()
				hold.Leave()
				limits.Close()
				require.LessOrEqual(t, longest, 5*time.Second+100*time.Millisecond, "twice max_wait and concurrent_wait")
			})
		})
	}
}
