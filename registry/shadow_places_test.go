package registry_test

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A row in shadow whose calls would wait for a place counts what the same row in force refuses under the same load.
func TestShadowCountsPlacesAlike(t *testing.T) {
	for _, wait := range []time.Duration{0, 300 * time.Millisecond, 2 * time.Second, time.Minute} {
		for _, demand := range []float64{0.7, 1.5} {
			t.Run(fmt.Sprint(wait, demand), func(t *testing.T) {
				counts := map[bool]int64{}
				for _, shadow := range []bool{false, true} {
					synctest.Test(t, func(t *testing.T) {
						var refused atomic.Int64
						limit := registry.Limit{Name: "/a", NoRate: true, Concurrent: 2, ConcurrentWait: wait, Shadow: shadow}
						r, err := registry.New(registry.Static{limit}, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores(), registry.WithLogger(slog.New(slog.DiscardHandler)),
							registry.WithBypassHook(func(_ string, by gate.Decider, pass bool) {
								if !pass || by == gate.ByShadow {
									refused.Add(1)
								}
							}))
						require.NoError(t, err)
						random := rand.New(rand.NewPCG(3, 4))
						var calls sync.WaitGroup
						for began := time.Now(); time.Since(began) < time.Minute; {
							lasts := time.Duration(random.ExpFloat64() * float64(200*time.Millisecond))
							calls.Go(func() {
								a, err := r.Enter(t.Context(), "/a")
								require.NoError(t, err)
								if !a.OK {
									return
								}
								time.Sleep(lasts)
								if a.Release != nil {
									a.Release()
								}
							})
							time.Sleep(time.Duration(random.ExpFloat64() * float64(100*time.Millisecond) / demand))
						}
						calls.Wait()
						time.Sleep(2 * time.Minute)
						r.Close()
						counts[shadow] = refused.Load()
					})
				}
				require.InDelta(t, counts[false], counts[true], 2, "enforced, shadow")
				t.Log(counts)
			})
		}
	}
}
