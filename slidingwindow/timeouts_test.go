package slidingwindow

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A Wait returns by its context's deadline, alone and beside other processes, from the first one on.
func TestWaitsEndByTheDeadline(t *testing.T) {
	for name, processes := range map[string]int{"process": 1, "redis": 1, "fleet": 3} {
		bubble(t, name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(37, 37))
			var mu sync.Mutex
			redis := &bubbleRedis{way: func(c context.Context, run func() error) error {
				mu.Lock()
				takes := time.Duration(r.Int64N(int64(10 * time.Millisecond)))
				mu.Unlock()
				return slow(takes)(c, run)
			}}
			var granted, late, wrong int
			var waiting sync.WaitGroup
			for p := range processes {
				var opts []Option
				if name != "process" {
					opts = []Option{WithRedis(redis)}
				}
				l, err := New("x", 20, time.Second, 100*time.Millisecond, opts...)
				require.NoError(t, err)
				r := rand.New(rand.NewPCG(uint64(p), 37))
				waiting.Go(func() {
					for i := range 700 {
						if i >= 20 { // those come before the first reply
							time.Sleep(time.Duration(r.ExpFloat64() * float64(processes) * float64(30*time.Millisecond)))
						}
						until := time.Now().Add(time.Duration(r.ExpFloat64() * float64(2*time.Second)))
						n := 1 + r.IntN(3)
						waiting.Go(func() {
							c, cancel := context.WithDeadline(ctx, until)
							defer cancel()
							err := l.WaitN(c, n)
							mu.Lock()
							defer mu.Unlock()
							switch {
							case err == nil:
								granted++
							case !errors.Is(err, context.DeadlineExceeded):
								t.Error(err)
							case time.Now().Before(until):
								wrong++
							}
							if time.Now().After(until) {
								late++
							}
						})
					}
				})
			}
			waiting.Wait()
			time.Sleep(time.Second) // what goes back for the last ones is on its way
			t.Logf("%d granted, %d late, %d ended before their deadlines", granted, late, wrong)
			require.Positive(t, granted)
			require.Zero(t, late)
			require.Zero(t, wrong)
		})
	}
}

// What a caller is granted after it has gone is refunded at once: as many permits count as callers were told of.
func TestGrantsOfThoseWhoHaveGone(t *testing.T) {
	const most = 10_000
	for _, verb := range []string{"Allow", "Wait"} {
		bubble(t, verb, func(t *testing.T) {
			redis := &bubbleRedis{}
			r := rand.New(rand.NewPCG(37, 8))
			var mu sync.Mutex
			granted, gone := 0, 0
			var calling sync.WaitGroup
			for range 3 {
				l, err := New("x", most, time.Hour, time.Minute, WithRedis(redis))
				require.NoError(t, err)
				redis.by(slow(20 * time.Millisecond))
				for range 500 {
					starts, lasts, n := time.Duration(r.Int64N(int64(2*time.Second))), time.Duration(r.Int64N(int64(60*time.Millisecond))), 1+r.IntN(3)
					calling.Go(func() {
						time.Sleep(starts)
						c, cancel := context.WithTimeout(ctx, lasts)
						defer cancel()
						ok, err := false, error(nil)
						if verb == "Wait" {
							err = l.WaitN(c, n)
							ok = err == nil
						} else {
							ok, err = l.AllowN(c, n)
						}
						mu.Lock()
						defer mu.Unlock()
						if ok {
							granted += n
						} else if gone++; !errors.Is(err, context.DeadlineExceeded) {
							t.Error(err)
						}
					})
				}
			}
			calling.Wait()
			time.Sleep(100 * time.Millisecond)
			l, err := New("x", most, time.Hour, time.Minute, WithRedis(redis))
			require.NoError(t, err)
			left, err := l.Remaining(ctx)
			require.NoError(t, err)
			t.Logf("%d permits granted, %d callers had gone", granted, gone)
			require.Positive(t, gone)
			require.Equal(t, granted, most-left)
		})
	}
}
