package limiter

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Groups of two clients use the whole rate though a fifth of their callers gives up while it waits. The root's TestGroupWhoseCallersLeave has more cases.
func TestCallersLeaveGroups(t *testing.T) {
	const clients, callers, rate = 2, 60, 1000.0
	server := redistest.Start(t)
	for _, kind := range faultlab.Kinds {
		for _, choice := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/choice=%t", kind, choice), func(t *testing.T) {
				prefix := tb.WithKeyPrefix(fmt.Sprint(t.Name(), ":"))
				var counts atomic.Bool
				var used, lost atomic.Int64
				var running sync.WaitGroup
				within, end := context.WithCancel(background)
				var groups []interface{ Lost() int64 }
				for range clients {
					store := redisStores(server.Client(t), prefix)[kind]
					of := func(name string, rate float64) *tb.RateLimiter {
						return open(t, name, rate, store, tb.WithInitialPermits(0), tb.WithStoreTimeout(patient))
					}
					var acquire func(context.Context, int) error
					if choice {
						c, err := tb.Any(of("first", rate/2), of("second", rate/2))
						require.NoError(t, err)
						groups = append(groups, c)
						acquire = func(ctx context.Context, n int) error { _, _, err := c.Acquire(ctx, n); return err }
					} else {
						g, err := tb.All(of("first", rate), of("second", 2*rate))
						require.NoError(t, err)
						groups = append(groups, g)
						acquire = func(ctx context.Context, n int) error { _, err := g.Acquire(ctx, n); return err }
					}
					for i := range callers / clients {
						running.Go(func() {
							for within.Err() == nil {
								mine, cancel := context.WithCancel(within)
								if i%5 == 0 {
									time.AfterFunc(time.Duration(rand.IntN(60_000))*time.Microsecond, cancel)
								}
								if acquire(mine, 1) == nil && counts.Load() {
									used.Add(1)
								}
								cancel()
							}
						})
					}
				}
				time.Sleep(time.Second)
				began := time.Now()
				counts.Store(true)
				time.Sleep(faultlab.Lasting(2*time.Second, 10*time.Second))
				counts.Store(false)
				share := float64(used.Load()) / rate / time.Since(began).Seconds()
				end()
				running.Wait()
				for _, g := range groups {
					lost.Add(g.Lost())
				}
				t.Logf("share of the rate: %.3f; %d permits lost", share, lost.Load())
				require.Greater(t, share, 0.95, "97 %, less what a busy machine wakes too late")
			})
		}
	}
}
