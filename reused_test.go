package tokenbucket_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// Calls of a MemoryStore are reused only once the reply that ends them is settled: callers of several sizes, of whom half give up, beside
// penalties. A call that was reused before ended the process.
func TestCallsAreReusedAfterTheReply(t *testing.T) {
	for seed := range uint64(8) {
		synctest.Test(t, func(t *testing.T) {
			rate := []float64{2, 20, 300}[seed%3]
			l := limiter(t, "x", rate, tb.WithMaxPermits(10), tb.WithInitialPermits(10))
			began := time.Now()
			var granted atomic.Int64
			var wg sync.WaitGroup
			for i := range uint64(150) {
				r := rand.New(rand.NewPCG(seed, i))
				wg.Go(func() {
					for time.Since(began) < 30*time.Second {
						c, cancel := context.WithCancel(ctx)
						if r.IntN(2) == 0 {
							c, cancel = context.WithTimeout(ctx, time.Duration(r.Int64N(int64(3*time.Second))))
						}
						n := 1 + r.IntN(8)*(r.IntN(5)/4)
						wait := time.Duration(r.Int64N(int64(4 * time.Second)))
						if r.IntN(5) == 0 {
							wait = 0
						}
						switch r.IntN(7) {
						case 0:
							if v, err := l.TryReserve(c, n, wait); err == nil && v.OK() {
								if r.IntN(2) == 0 {
									time.Sleep(time.Duration(r.Int64N(int64(300 * time.Millisecond))))
									_ = v.Return(ctx)
								} else {
									<-v.Ready()
								}
							}
						case 1:
							if v, err := l.TryAwait(c, n, wait); err == nil && v.OK() {
								used := r.IntN(n + 1)
								granted.Add(int64(used))
								require.NoError(t, v.Settle(ctx, used))
							}
						case 2:
							if r.IntN(40) == 0 {
								require.NoError(t, l.Penalize(ctx, time.Duration(1+r.Int64N(int64(time.Second)))))
							}
						default:
							if ok, err := l.TryAcquire(c, n, wait); ok && err == nil {
								granted.Add(int64(n))
							}
						}
						cancel()
						time.Sleep(time.Duration(r.Int64N(int64(200 * time.Millisecond))))
					}
				})
			}
			wg.Wait()
			require.LessOrEqual(t, float64(granted.Load()), rate*time.Since(began).Seconds()+11)
		})
	}
}
