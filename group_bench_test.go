package tokenbucket_test

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// BenchmarkGroup grants one permit a call from a group of three members, and from one of its buckets, by 1, 64 and 512 goroutines. Compare the two within
// one run only.
func BenchmarkGroup(b *testing.B) {
	for _, s := range stores {
		for _, goroutines := range []int{1, 64, 512} {
			for _, members := range []int{1, 3} {
				b.Run(fmt.Sprintf("%s/goroutines=%d/members=%d", s.name, goroutines, members), func(b *testing.B) {
					store := s.open(b)(false)
					var all []tb.Member
					for i := range members {
						l, err := tb.NewSmoothBursty(fmt.Sprint("member", i), 1e9, tb.WithStore(store), tb.WithInitialPermits(1e9))
						require.NoError(b, err)
						all = append(all, l)
					}
					try := all[0].(*tb.RateLimiter).TryAcquire
					if members > 1 {
						g, err := tb.All(all...)
						require.NoError(b, err)
						try = g.TryAcquire
					}
					run(b, goroutines, func(int64) bool {
						ok, err := try(ctx, 1, time.Second)
						return ok && err == nil
					})
				})
			}
		}
	}
}

// BenchmarkGroupRefused is TryAcquire of a group, one of whose members owes an hour.
func BenchmarkGroupRefused(b *testing.B) {
	for _, s := range stores {
		b.Run(s.name, func(b *testing.B) {
			store := tb.WithStore(s.open(b)(false))
			var all []tb.Member
			for i := range 3 {
				l, err := tb.NewSmoothBursty(fmt.Sprint(i), 1, store)
				require.NoError(b, err)
				all = append(all, l)
			}
			_, err := all[2].(*tb.RateLimiter).Reserve(ctx, 3600)
			require.NoError(b, err)
			g, err := tb.All(all...)
			require.NoError(b, err)
			run(b, 64, func(int64) bool {
				ok, err := g.TryAcquire(ctx, 1, time.Millisecond)
				return !ok && err == nil
			})
		})
	}
}

// counting counts how often its Done was called.
type counting struct {
	context.Context
	asked atomic.Int64
}

func (c *counting) Done() <-chan struct{} {
	c.asked.Add(1)
	return c.Context.Done()
}

// BenchmarkCrowd has 16,000 callers queue, and leave, of one limiter and of groups. Compare within one run only.
func BenchmarkCrowd(b *testing.B) {
	const crowd = 16_000
	for _, timeout := range []time.Duration{math.MaxInt64, time.Hour} {
		for _, kind := range []string{"one", "All", "Any"} {
			b.Run(fmt.Sprintf("timeout=%t/%s", timeout == time.Hour, kind), func(b *testing.B) {
				var joining, leaving time.Duration
				for b.Loop() {
					store := tb.WithStore(tb.NewMemoryStore())
					var all []tb.Member
					for i := range 3 {
						l, err := tb.NewSmoothBursty(fmt.Sprint(i), 10, store, tb.WithMaxWaiters(2*crowd))
						require.NoError(b, err)
						all = append(all, l)
					}
					try := all[0].(*tb.RateLimiter).TryAcquire
					switch kind {
					case "All":
						g, err := tb.All(all...)
						require.NoError(b, err)
						try = g.TryAcquire
					case "Any":
						c, err := tb.Any(all...)
						require.NoError(b, err)
						try = func(ctx context.Context, permits int, timeout time.Duration) (bool, error) {
							by, err := c.TryAcquire(ctx, permits, timeout)
							return by != nil, err
						}
					}
					for _, l := range all {
						_, err := l.(*tb.RateLimiter).Reserve(ctx, 1)
						require.NoError(b, err)
					}
					within, cancel := context.WithCancel(ctx)
					c := &counting{Context: within}
					var left sync.WaitGroup
					var served atomic.Int64
					began := time.Now()
					for range crowd {
						left.Go(func() { _, _ = try(c, 1, timeout); served.Add(2) })
					}
					for c.asked.Load()+served.Load() < 2*crowd { // once when a call joins the queue, and once when it begins to wait
						time.Sleep(time.Millisecond)
					}
					joining += time.Since(began)
					began = time.Now()
					cancel()
					left.Wait()
					leaving += time.Since(began)
				}
				b.ReportMetric(float64(joining.Milliseconds())/float64(b.N), "ms-to-queue")
				b.ReportMetric(float64(leaving.Milliseconds())/float64(b.N), "ms-to-leave")
			})
		}
	}
}
