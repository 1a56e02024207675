package tokenbucket_test

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// BenchmarkTryAcquire grants one permit a call, from every store, by 1, 64 and 512 goroutines, on one bucket and on a
// thousand. PING is the floor of a round trip. Compare within one run only:
//
//	go test -run '^$' -bench TryAcquire -benchmem .
func BenchmarkTryAcquire(b *testing.B) {
	client := redistest.Shared(b).Client(b)
	b.Run("ping", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			require.NoError(b, client.Ping(ctx).Err())
		}
	})
	for _, s := range stores {
		for _, buckets := range []int{1, 1000} {
			for _, goroutines := range []int{1, 64, 512} {
				b.Run(fmt.Sprintf("%s/buckets=%d/goroutines=%d", s.name, buckets, goroutines), func(b *testing.B) {
					open := s.open(b)
					store := open(false)
					limiters := make([]*tb.RateLimiter, buckets)
					for i := range limiters {
						var err error
						limiters[i], err = tb.NewSmoothBursty(fmt.Sprint(i), 1e9, tb.WithStore(store), tb.WithInitialPermits(1e9))
						require.NoError(b, err)
					}
					run(b, goroutines, func(i int64) bool {
						ok, err := limiters[i%int64(buckets)].TryAcquire(ctx, 1, time.Second)
						return ok && err == nil
					})
					used := 0
					for _, l := range limiters {
						state, err := l.State(ctx)
						require.NoError(b, err)
						if state.Seq > 1 {
							used++
						}
					}
					require.GreaterOrEqual(b, used, min(buckets, b.N)*9/10, "the buckets are as many as they are said to be")
				})
			}
		}
	}
}

// BenchmarkLone is a lone caller of the script store, whose context can be cancelled, or cannot.
func BenchmarkLone(b *testing.B) {
	client := redistest.Shared(b).Client(b)
	cancelled, cancel := context.WithCancel(context.Background())
	defer cancel()
	for _, bench := range []struct {
		name string
		ctx  context.Context
	}{{"background", context.Background()}, {"cancel", cancelled}} {
		b.Run(bench.name, func(b *testing.B) {
			l, err := tb.NewSmoothBursty("lone", 1e9, tb.WithStore(tb.NewRedisScriptStore(client)), tb.WithInitialPermits(1e9))
			require.NoError(b, err)
			b.ReportAllocs()
			for b.Loop() {
				ok, err := l.TryAcquire(bench.ctx, 1, time.Second)
				if !ok || err != nil {
					b.Fatal(ok, err)
				}
			}
		})
	}
}

// BenchmarkTryAcquireAfterSetRate grants from memory when the rate in force is not the limiter's own.
func BenchmarkTryAcquireAfterSetRate(b *testing.B) {
	l, err := tb.NewSmoothBursty("x", 1e9, tb.WithInitialPermits(1e9))
	require.NoError(b, err)
	require.NoError(b, l.SetRate(ctx, 2e9))
	run(b, 1, func(int64) bool {
		ok, err := l.TryAcquire(ctx, 1, 0)
		return ok && err == nil
	})
}

// BenchmarkRefused is TryAcquire of a bucket that owes an hour.
func BenchmarkRefused(b *testing.B) {
	for _, s := range stores {
		b.Run(s.name, func(b *testing.B) {
			l, err := tb.NewSmoothBursty("x", 1, tb.WithStore(s.open(b)(false)))
			require.NoError(b, err)
			_, err = l.Reserve(ctx, 3600)
			require.NoError(b, err)
			run(b, 64, func(int64) bool {
				ok, err := l.TryAcquire(ctx, 1, time.Millisecond)
				return !ok && err == nil
			})
		})
	}
}

// run shares b.N calls among goroutines. Each call must do what it is there for.
func run(b *testing.B, goroutines int, call func(i int64) bool) {
	b.ReportAllocs()
	b.SetParallelism(max(1, goroutines/max(1, runtime.GOMAXPROCS(0))))
	var next, wrong atomic.Int64
	if goroutines == 1 {
		for b.Loop() {
			if !call(next.Add(1)) {
				wrong.Add(1)
			}
		}
	} else {
		b.ResetTimer()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if !call(next.Add(1)) {
					wrong.Add(1)
				}
			}
		})
		b.StopTimer()
	}
	require.Zero(b, wrong.Load())
}
