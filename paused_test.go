package tokenbucket

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// ahead is a store for one bucket whose clock can leap.
type ahead struct {
	mu    sync.Mutex
	leapt time.Duration
	state []byte
}

// Apply implements Store.
func (s *ahead) Apply(_ context.Context, b *Batch) error {
	time.Sleep(time.Millisecond)
	s.mu.Lock()
	defer s.mu.Unlock()
	next, _, err := b.Decide(time.Now().Add(s.leapt).UnixMicro(), [][]byte{s.state})
	if err == nil && next[0] != nil {
		s.state = next[0]
	}
	return err
}

// A virtual machine is paused for a minute, and its clock with it: for the process, the store's clock leaps. What the process owned fell
// due meanwhile, and it cannot know: it uses that on top of what the bucket grants, which has filled up. From then on it keeps to the rate.
func TestMachinePaused(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const rate, size, callers = 100.0, 10.0, 300
		s := &ahead{}
		l, err := NewSmoothBursty("x", rate, WithMaxPermits(size), WithStore(s), Logged(t))
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(background)
		var mu sync.Mutex
		var used []event
		var all sync.WaitGroup
		for range callers {
			all.Go(func() {
				for ctx.Err() == nil {
					if _, err := l.Acquire(ctx, 1); err == nil {
						mu.Lock()
						used = append(used, event{time.Now().UnixMicro(), 1})
						mu.Unlock()
					}
				}
			})
		}
		time.Sleep(5 * time.Second)
		s.mu.Lock()
		s.leapt = time.Minute
		s.mu.Unlock()
		paused := time.Now().UnixMicro()
		time.Sleep(10 * time.Second)
		cancel()
		all.Wait()
		extra := worst(used, rate) - size
		t.Logf("%d permits used; %.1f in a window on top of the bound", len(used), extra)
		require.LessOrEqual(t, extra, rate*1.0, "what the process owned: a second at most")
		var later []event
		for _, e := range used {
			if e.at > paused+2_000_000 {
				later = append(later, e)
			}
		}
		require.LessOrEqual(t, worst(later, rate), size+1)
		require.InDelta(t, 8*rate, float64(len(later)), rate/10)
	})
}
