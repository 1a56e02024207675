package tokenbucket

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A shadow counts as many refusals as the same load has where the limit is in force, whatever a call may wait.
func TestShadowCountsWhatWouldBeRefused(t *testing.T) {
	for _, rate := range []float64{5, 20} {
		for _, wait := range []time.Duration{0, 500 * time.Millisecond, 2 * time.Second, 10 * time.Second} {
			for _, demand := range []float64{0.9, 1.5, 4} {
				t.Run(fmt.Sprintf("%v/s, %v, %v", rate, wait, demand), func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						counts := map[bool]int64{}
						total := 0
						for _, shadow := range []bool{false, true} {
							var refused atomic.Int64
							opts := []Option{WithMaxWait(wait), WithStore(NewMemoryStore()), WithObserver(Observer{Decision: func(_ context.Context, d Decision) {
								if !d.Granted {
									refused.Add(1)
								}
							}})}
							if shadow {
								opts = append(opts, WithShadow())
							}
							l, err := NewSmoothBursty("x", rate, opts...)
							require.NoError(t, err)
							random := rand.New(rand.NewPCG(1, 2))
							var calls sync.WaitGroup
							for began := time.Now(); time.Since(began) < 30*time.Second; {
								calls.Go(func() { _, _ = l.Try(background) })
								total++
								time.Sleep(time.Duration(random.ExpFloat64() / rate / demand * float64(time.Second)))
							}
							calls.Wait()
							counts[shadow] = refused.Load()
						}
						require.InDelta(t, counts[false], counts[true], max(2, float64(total)/100), "enforced, shadow")
					})
				})
			}
		}
	}
}
