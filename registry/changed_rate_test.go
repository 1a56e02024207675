package registry_test

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Two processes want all of a row of 100/s, and each owns permits between those of the other. When the rate changes, what they own serves their waiters
// under the new rate: nearly all of it is used, and no window from then on has more. What is missing of a lower rate are stretches too short for a permit.
// A group's permits keep their due times, and go back or lapse if the rate is lowered.
func TestChangedRateIsUsed(t *testing.T) {
	const before, lasts = 100.0, 2 * time.Second
	for _, c := range []struct {
		rate         float64
		alone, group float64 // the least share of the new rate that is used
	}{{100, 0.99, 0.99}, {125, 0.98, 0.88}, {1000, 0.98, 0}, {80, 0.97, 0}, {20, 0.94, 0}} {
		for _, f := range faces {
			t.Run(fmt.Sprintf("%v/%s", c.rate, f.name), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					source, bucket := &fake{}, tokenbucket.NewMemoryStore()
					source.set(aRow(before))
					within, end := context.WithCancel(ctx)
					var mu sync.Mutex
					var passed []time.Duration
					began := time.Now()
					var running sync.WaitGroup
					var processes []*registry.Registry
					for range 2 {
						limits := open(t, source, &distant{bucket}, registry.WithInterval(time.Hour))
						processes = append(processes, limits)
						acquire, _ := f.of(t, limits)
						for range 40 {
							running.Go(func() {
								for {
									ok, err := acquire(within)
									if within.Err() != nil {
										return
									}
									require.NoError(t, err)
									require.True(t, ok)
									mu.Lock()
									passed = append(passed, time.Since(began))
									mu.Unlock()
								}
							})
						}
					}
					time.Sleep(3*time.Second + 3*time.Millisecond)
					source.set(aRow(c.rate, func(l *registry.Limit) { l.Version = 9 }))
					for _, limits := range processes {
						require.NoError(t, limits.Reload(ctx))
					}
					changed := time.Since(began)
					time.Sleep(lasts)
					end()
					running.Wait()
					for _, limits := range processes {
						limits.Close()
					}
					time.Sleep(time.Second) // the last replies
					slices.Sort(passed)
					n, over, most, last := 0, 0.0, 0.0, changed
					for _, at := range passed {
						if at > changed {
							n++
							over = math.Max(0, over-c.rate*(at-last).Seconds()) + 1
							last, most = at, math.Max(most, over)
						}
					}
					least := c.group
					if f.name == "alone" {
						least = c.alone
					}
					require.GreaterOrEqual(t, float64(n)/(c.rate*lasts.Seconds()), least)
					require.LessOrEqual(t, most, 1.001, "more than the rate in a window")
				})
			})
		}
	}
}
