package tokenbucket_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// Sixty callers of a group use the whole rate though a fifth of them gives up while it waits: the permits serve the callers behind, also in two processes, and
// beside callers of a member alone.
func TestGroupWhoseCallersLeave(t *testing.T) {
	const callers, rate, lasts = 60, 1000.0, 2 * time.Second
	for _, choice := range []bool{false, true} {
		for _, processes := range []int{1, 2} {
			for _, beside := range []int{0, 5} {
				t.Run(fmt.Sprintf("choice=%t/processes=%d/beside=%d", choice, processes, beside), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						random := rand.New(rand.NewPCG(1, 2))
						memory := tb.NewMemoryStore()
						within, end := context.WithCancel(ctx)
						var used, lost atomic.Int64
						began := time.Now()
						count := func(err error) {
							if err == nil && time.Since(began) > time.Second {
								used.Add(1)
							}
						}
						var groups []interface{ Lost() int64 }
						for range processes {
							store := &gatedStore{MemoryStore: memory}
							store.late.Store(int64(2 * time.Millisecond))
							of := func(name string, rate float64) *tb.RateLimiter {
								return limiter(t, name, rate, quiet, tb.WithStore(store), tb.WithInitialPermits(0))
							}
							var first *tb.RateLimiter
							var acquire func(context.Context, int) error
							if choice {
								first = of("first", rate/2)
								c := anyOf(t, first, of("second", rate/2))
								groups = append(groups, c)
								acquire = func(ctx context.Context, n int) error { _, _, err := c.Acquire(ctx, n); return err }
							} else {
								first = of("first", rate)
								g := all(t, first, of("second", 2*rate))
								groups = append(groups, g)
								acquire = func(ctx context.Context, n int) error { _, err := g.Acquire(ctx, n); return err }
							}
							for i := range callers / processes {
								gives := rand.New(rand.NewPCG(random.Uint64(), 0))
								go func() {
									for within.Err() == nil {
										mine, cancel := context.WithCancel(within)
										if i%5 == 0 {
											time.AfterFunc(time.Duration(gives.IntN(60_000))*time.Microsecond, cancel)
										}
										count(acquire(mine, 1))
										cancel()
									}
								}()
							}
							for range beside {
								go func() {
									for within.Err() == nil {
										_, err := first.Acquire(within, 1)
										count(err)
									}
								}()
							}
						}
						time.Sleep(time.Second + lasts)
						end()
						time.Sleep(time.Hour)
						for _, g := range groups {
							lost.Add(g.Lost())
						}
						share := float64(used.Load()) / rate / lasts.Seconds()
						t.Logf("share of the rate: %.3f; %d permits lost", share, lost.Load())
						require.Greater(t, share, 0.97)
					})
				})
			}
		}
	}
}
