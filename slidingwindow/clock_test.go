package slidingwindow

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// With Redis the limiter's clock only tells how much time has passed. So it may be set back, and nobody is refused for that.
func TestClockSetBack(t *testing.T) {
	for _, mode := range []Mode{Exact, Approximate} {
		bubble(t, mode.String(), func(t *testing.T) {
			var back atomic.Int64
			clock := clockOf{now: func() int64 { return time.Now().UnixMicro() - back.Load() }}
			client := &fakeRedis{way: slow(time.Millisecond)}
			l, err := New("x", 3, time.Second, 100*time.Millisecond, WithRedis(client), WithMode(mode), WithClock(clock))
			require.NoError(t, err)
			for _, step := range []time.Duration{time.Millisecond, 1500 * time.Millisecond, 5 * time.Second, time.Hour} {
				for range 3 {
					ok, err := l.Allow(ctx)
					require.NoError(t, err)
					require.True(t, ok)
				}
				ok, err := l.Allow(ctx)
				require.NoError(t, err)
				require.False(t, ok)
				back.Add(step.Microseconds())
				ok, err = l.Allow(ctx)
				require.NoError(t, err)
				require.False(t, ok, "the window is as full as before")
				time.Sleep(1100 * time.Millisecond)
				ok, err = l.Allow(ctx)
				require.NoError(t, err)
				require.True(t, ok, "set back by %v", step)
				time.Sleep(1100 * time.Millisecond)
			}
			goOn := client.hang() // set back while a round trip is under way
			got := make(chan bool)
			go func() {
				ok, _ := l.Allow(ctx)
				got <- ok
			}()
			synctest.Wait()
			back.Add(5_000_000)
			goOn()
			require.True(t, <-got)
			for range 2 {
				ok, err := l.Allow(ctx)
				require.NoError(t, err)
				require.True(t, ok)
			}
			time.Sleep(1100 * time.Millisecond)
			ok, err := l.Allow(ctx)
			require.NoError(t, err)
			require.True(t, ok)
		})
	}
}

// However much the round trips differ, there is one script for each call that is allowed at most, and one look in each sub-interval. In
// Approximate a call may also come within what is not known of Redis's clock, when Redis must decide.
func TestScripts(t *testing.T) {
	const limit, window, resolution, length = 50, time.Second, 50 * time.Millisecond, 10 * time.Second
	for _, mode := range []Mode{Exact, Approximate} {
		for _, callers := range []int{1, 8} {
			bubble(t, mode.String(), func(t *testing.T) {
				client := &fakeRedis{way: func(_ context.Context, run func() error) error {
					time.Sleep(50*time.Microsecond + rand.N(250*time.Microsecond))
					err := run()
					time.Sleep(50*time.Microsecond + rand.N(250*time.Microsecond))
					return err
				}}
				l, err := New("x", limit, window, resolution, WithRedis(client), WithMode(mode))
				require.NoError(t, err)
				var allowed atomic.Int64
				end := time.Now().Add(length)
				var wg sync.WaitGroup
				for range callers {
					wg.Go(func() {
						for time.Now().Before(end) {
							ok, err := l.Allow(ctx)
							if err != nil {
								panic(err)
							}
							if ok {
								allowed.Add(1)
							}
							time.Sleep(200 * time.Microsecond)
						}
					})
				}
				wg.Wait()
				synctest.Wait()
				t.Logf("%d callers: %d allowed, %d scripts", callers, allowed.Load(), client.executed())
				const looks = int64(length/resolution) + 1
				within := int64(0)
				if mode == Approximate {
					within = allowed.Load() / 20
				}
				require.LessOrEqual(t, client.executed(), allowed.Load()+looks+within)
			})
		}
	}
}
