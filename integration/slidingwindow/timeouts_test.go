package slidingwindow

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// Three processes that start together, with callers that come before the first reply, on a way that takes 60 ms at first and 3 ms then. A Wait returns by
// its context's deadline, and fails no sooner. What Redis grants to a caller that has gone is refunded at once, so as many permits count as callers got.
func TestWaitsEndByTheDeadline(t *testing.T) {
	t.Parallel()
	for name, limit := range map[string]int{"room": 100_000, "full": 300} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const first, then = 60 * time.Millisecond, 3 * time.Millisecond
			server := redistest.Start(t)
			late := faultlab.MeasureLateness(t)
			var calling sync.WaitGroup
			var mu sync.Mutex
			granted, gone := 0, 0
			var latest, earliest time.Duration
			for p := range uint64(3) {
				proxy := redistest.StartProxy(t, server.Addr)
				proxy.Delay(first, first/2, rand.New(rand.NewPCG(p, 1)))
				client := server.Client(t, func(o *redis.Options) { o.Addr = proxy.Addr })
				l, err := slidingwindow.New("x", limit, time.Hour, time.Minute, slidingwindow.WithRedis(client), patient)
				require.NoError(t, err)
				r := rand.New(rand.NewPCG(p, 37))
				calling.Go(func() {
					for i := range 1000 {
						if i == 100 {
							proxy.Delay(then, then, rand.New(rand.NewPCG(p, 2)))
						}
						time.Sleep(time.Duration(r.ExpFloat64() * float64(3*time.Millisecond)))
						n, until := 1+r.IntN(3), time.Now().Add(time.Duration(r.ExpFloat64()*float64(then*4)))
						calling.Go(func() {
							c, cancel := context.WithDeadline(ctx, until)
							defer cancel()
							err := l.WaitN(c, n)
							over := time.Since(until)
							mu.Lock()
							defer mu.Unlock()
							latest = max(latest, over)
							switch {
							case err == nil:
								granted += n
							case errors.Is(err, context.DeadlineExceeded):
								gone++
								earliest = max(earliest, -over)
							default:
								t.Error(err)
							}
						})
					}
				})
			}
			calling.Wait()
			t.Logf("%d permits granted, %d callers had gone; the latest result %v after the deadline; the machine is late by up to %v", granted, gone, latest, late.Most())
			require.Positive(t, granted)
			require.Positive(t, gone)
			require.Less(t, latest, 50*time.Millisecond+5*late.Most())
			require.Zero(t, earliest)
			began := time.Now()
			require.Eventually(t, func() bool { return limit-counted(t, server, limit, time.Hour, time.Minute) == granted }, 10*time.Second, 10*time.Millisecond)
			require.Less(t, time.Since(began), time.Second+5*late.Most())
		})
	}
}
