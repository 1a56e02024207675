package limiter

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Several processes lease from one bucket on a real server, at full demand: in no window more than the bound plus what the
// leases may hold is let go. Each call let one through at some time between its beginning and its end; only what lies in a
// window from beginning to end is held against it, so that a busy machine does not matter.
func TestLeaseBound(t *testing.T) {
	t.Parallel()
	const (
		rate      = 20_000.0
		d         = 50 * time.Millisecond
		processes = 4
		lasts     = 3 * time.Second
	)
	ctx := context.Background()
	server := redistest.Start(t)
	for which, open := range map[string]func(tb.RedisClient) tb.Store{
		"script": func(c tb.RedisClient) tb.Store { return tb.NewRedisScriptStore(c) },
		"lock":   func(c tb.RedisClient) tb.Store { return tb.NewRedisStore(c) },
	} {
		t.Run(which, func(t *testing.T) {
			late := faultlab.MeasureLateness(t)
			round := func() (n int) {
				var (
					mu       sync.Mutex
					used     []faultlab.Span
					callers  sync.WaitGroup
					limiters []*tb.RateLimiter
					began    = time.Now()
				)
				for range processes {
					l, err := tb.NewSmoothBursty(which, rate, tb.WithStore(open(server.Client(t))), tb.WithInitialPermits(rate), tb.WithPrefetch(d),
						tb.WithStoreTimeout(patient)) // a busy machine is no outage
					require.NoError(t, err)
					limiters = append(limiters, l)
					for range 4 {
						callers.Go(func() {
							var mine []faultlab.Span
							for time.Since(began) < lasts {
								if pause := time.Since(began) % (700 * time.Millisecond); pause < 200*time.Millisecond {
									time.Sleep(200*time.Millisecond - pause) // the bucket fills up
								}
								from := time.Since(began)
								ok, err := l.TryAcquire(ctx, 1, 0)
								if err != nil {
									t.Error(err)
									return
								}
								if ok {
									mine = append(mine, faultlab.Span{From: from.Microseconds(), To: time.Since(began).Microseconds()})
								}
							}
							mu.Lock()
							defer mu.Unlock()
							used = append(used, mine...)
						})
					}
				}
				callers.Wait()
				took := time.Since(began)
				for _, l := range limiters {
					require.NoError(t, l.Close(ctx))
				}
				level, most := faultlab.Surely(used, rate), rate+processes*d.Seconds()*rate
				t.Logf("%d used in %v, worst window %.0f of %.0f", len(used), took.Round(time.Millisecond), level, most)
				require.LessOrEqual(t, float64(len(used)), rate+took.Seconds()*rate+1)
				require.LessOrEqual(t, level, most+faultlab.Noise(rate))
				return len(used)
			}
			// What the pauses let overflow is lost, and what a machine is too busy to ask for: half of it is plenty. A block takes some
			// ten wakings one after the other, so a machine may be too busy that is never as late as a lease lasts, but not five times.
			n := round()
			for attempt := 1; float64(n) < 0.5*rate*lasts.Seconds() && attempt < 5; attempt++ {
				n = round()
			}
			if late.Most() < d {
				require.GreaterOrEqual(t, float64(n), 0.5*rate*lasts.Seconds())
			}
		})
	}
}
