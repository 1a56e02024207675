package tokenbucket_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// tally counts the batches that a store is asked for.
type tally struct {
	tb.Store
	batches *atomic.Int64
}

func (s *tally) Apply(ctx context.Context, b *tb.Batch) error {
	s.batches.Add(1)
	return s.Store.Apply(ctx, b)
}

// What the last reply showed of the bucket refuses a call whose context ends too soon as well as one whose timeout does: 500 callers with
// 50 ms each, at 10/s and in three processes, hardly ask the store.
func TestDeadlinesAreRefusedUnasked(t *testing.T) {
	const processes, callers, seconds, patience = 3, 500, 2, 50 * time.Millisecond
	for name, call := range map[string]func(ctx context.Context, l *tb.RateLimiter) error{
		"Acquire": func(ctx context.Context, l *tb.RateLimiter) error { _, err := l.Acquire(ctx, 1); return err },
		"TryAcquire": func(ctx context.Context, l *tb.RateLimiter) error {
			_, err := l.TryAcquire(ctx, 1, time.Second)
			return err
		},
		"TryReserve": func(ctx context.Context, l *tb.RateLimiter) error {
			_, err := l.TryReserve(ctx, 1, time.Second)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				shared := tb.NewMemoryStore()
				var batches, granted, refused atomic.Int64
				end := time.Now().Add(seconds * time.Second)
				var all sync.WaitGroup
				for range processes {
					l := bursty(t, 10, tb.WithStore(&tally{&tb.Distant{Store: shared, Takes: time.Millisecond}, &batches}))
					for i := range callers / processes {
						all.Go(func() {
							for time.Sleep(time.Duration(i) * time.Millisecond / 10); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
								soon, cancel := context.WithTimeout(ctx, patience)
								err := call(soon, l)
								cancel()
								var wait *tb.WaitError
								if errors.As(err, &wait) {
									refused.Add(1)
									assert.ErrorIs(t, err, context.DeadlineExceeded)
									assert.Greater(t, wait.Wait, patience)
								} else if err == nil {
									granted.Add(1)
								}
							}
						})
					}
				}
				all.Wait()
				t.Logf("%d batches a second; %d granted, %d refused", batches.Load()/seconds, granted.Load(), refused.Load())
				require.LessOrEqual(t, batches.Load(), int64(100*seconds))
				require.GreaterOrEqual(t, granted.Load(), int64(10*seconds-10))
				require.Positive(t, refused.Load())
			})
		})
	}
}
