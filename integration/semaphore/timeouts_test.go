package semaphore

import (
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// Three processes that start together, with callers that come before the first reply, on a way that takes 60 ms at first and 3 ms then. A call returns
// within its timeout and two round trips; at the start, three more connect and load the script. It is refused at its timeout, not before, and what its process is granted for it after that is given back at
// once: the leases outlast the test.
func TestResultsWithinTheTimeout(t *testing.T) {
	t.Parallel()
	const first, then, permits = 60 * time.Millisecond, 3 * time.Millisecond, 5
	server := redistest.Start(t)
	trips := faultlab.MeasureTrips(t, server.Addr)
	var calling sync.WaitGroup
	var mu sync.Mutex
	granted, refused := 0, 0
	var latest [2]time.Duration // of those at the start, and of the others
	var earliest time.Duration
	for p := range uint64(3) {
		proxy := redistest.StartProxy(t, server.Addr)
		proxy.Delay(first, first/2, rand.New(rand.NewPCG(p, 1)))
		s := openRedis(t, server.Client(t, func(o *redis.Options) { o.Addr = proxy.Addr }), permits, semaphore.WithLease(10*time.Minute))()
		r := rand.New(rand.NewPCG(p, 37))
		calling.Go(func() {
			for i := range 1000 {
				if i == 100 {
					proxy.Delay(then, then, rand.New(rand.NewPCG(p, 2)))
				}
				time.Sleep(time.Duration(r.ExpFloat64() * float64(3*time.Millisecond)))
				n, timeout, holds := 1+r.IntN(2), time.Duration(r.ExpFloat64()*float64(100*time.Millisecond)), time.Duration(r.Int64N(int64(10*time.Millisecond)))
				calling.Go(func() {
					began := time.Now()
					held, err := s.TryAcquire(ctx, n, timeout)
					over := time.Since(began) - timeout
					if err == nil {
						time.Sleep(holds)
						err = held.Release(ctx)
					}
					mu.Lock()
					defer mu.Unlock()
					if i < 200 {
						latest[0] = max(latest[0], over)
					} else {
						latest[1] = max(latest[1], over)
					}
					switch {
					case err == nil:
						granted++
					case errors.Is(err, semaphore.ErrRefused):
						refused++
						earliest = max(earliest, -over)
					default:
						t.Error(err)
					}
				})
			}
		})
	}
	calling.Wait()
	slack := 5 * trips.Most()
	t.Logf("%d granted, %d refused; the latest result %v after the timeout, the earliest refusal %v before it; the machine is late by up to %v",
		granted, refused, latest, earliest, trips.Most())
	require.Positive(t, granted)
	require.Positive(t, refused)
	require.Less(t, latest[0], 5*2*first*3/2+slack)
	require.Less(t, latest[1], 2*2*then*2+slack)
	require.Less(t, earliest, time.Millisecond)
	look := openRedis(t, server.Client(t), permits)()
	began := time.Now()
	require.Eventually(t, func() bool {
		all, err := look.Stats(ctx)
		return err == nil && all.Used == 0
	}, 10*time.Second, 10*time.Millisecond)
	require.Less(t, time.Since(began), time.Second+slack)
}
