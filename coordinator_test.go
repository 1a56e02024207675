package tokenbucket

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// A process that only ever reserves, and never cancels, remembers nothing.
func TestHistoryIsBounded(t *testing.T) {
	l, err := NewSmoothBursty("x", 1e6, WithMaxPermits(1e6), WithInitialPermits(1e6))
	require.NoError(t, err)
	for range 10_000 {
		_, err := l.Reserve(background, 1)
		require.NoError(t, err)
	}
	require.True(t, look(l).Idle)
	require.Zero(t, Waiting(l))
}

// Limiters of one name on one store share one line, for as long as one of them is used.
func TestLinesAreShared(t *testing.T) {
	store := NewMemoryStore()
	open := func(name string, s Store) *RateLimiter {
		l, err := NewSmoothBursty(name, 5, WithStore(s))
		require.NoError(t, err)
		return l
	}
	a := open("x", store)
	require.Same(t, a.limiter.Coordinator, open("x", store).limiter.Coordinator)
	require.NotSame(t, a.limiter.Coordinator, open("y", store).limiter.Coordinator)
	require.NotSame(t, a.limiter.Coordinator, open("x", NewMemoryStore()).limiter.Coordinator)
	require.NotSame(t, open("x", uncomparable{}).limiter.Coordinator, open("x", uncomparable{}).limiter.Coordinator)
}

type uncomparable struct {
	Store
	_ []int
}

// Three processes use a store that is often late and sometimes silent. Their callers wait, give up and cancel at random. The window bound
// holds on all permits that were used, except those of callers that were woken late; every caller returns in time.
func TestSlowStore(t *testing.T) {
	seeds := 60
	if os.Getenv("TOKENBUCKET_LONG") != "" {
		seeds = 3000
	}
	var used, late int
	for range seeds {
		synctest.Test(t, func(t *testing.T) {
			const rate, timeout = 20.0, 100 * time.Millisecond
			size := []float64{0, 1, 5}[rand.IntN(3)]
			shared := NewMemoryStore()
			delay := func() time.Duration {
				if rand.IntN(30) == 0 {
					return rand.N(4 * timeout)
				}
				return rand.N(timeout / 20)
			}
			var mu sync.Mutex
			var events []event
			largest := 0.0
			var callers sync.WaitGroup
			for range 3 {
				l, err := NewSmoothBursty("x", rate, WithMaxPermits(size), WithStore(&slow{shared, delay}),
					WithStoreTimeout(timeout), Logged(t))
				require.NoError(t, err)
				for range 8 {
					callers.Go(func() {
						for range 10 {
							n := 1 + rand.IntN(3)
							c, cancel := context.WithTimeout(context.Background(), rand.N(2*time.Second))
							began := time.Now()
							r, err := l.TryReserve(c, n, time.Second)
							require.LessOrEqual(t, time.Since(began), timeout+5*time.Millisecond, "%v", err)
							switch {
							case errors.Is(err, ErrStoreTimeout):
								mu.Lock()
								late++
								mu.Unlock()
							case err == nil && r.OK():
								select {
								case <-r.Ready():
									mu.Lock()
									events = append(events, event{time.Now().UnixMicro(), float64(n)})
									largest = max(largest, float64(n))
									mu.Unlock()
								case <-c.Done():
									_ = r.Cancel(context.Background())
								case <-time.After(rand.N(500 * time.Millisecond)):
									_ = r.Cancel(context.Background())
								}
							}
							cancel()
							time.Sleep(rand.N(200 * time.Millisecond))
						}
					})
				}
			}
			callers.Wait()
			time.Sleep(time.Minute)                            // for the last late replies
			late := timeout.Seconds() + schedule.Tolerated/1e6 // an answer, and a permit that waits for it
			require.LessOrEqual(t, worst(events, rate), max(size, largest)+rate*late)
			used += len(events)
		})
	}
	t.Logf("%d reservations used, %d timed out at the store", used, late)
	require.Greater(t, used, seeds*10)
	require.Greater(t, late, seeds)
}

// A caller gives up while its question is under way, and another process takes behind what it is granted, so that it cannot go back. It goes
// to the reservation that waits for the next batch, and not to one that comes later.
func TestSpareGoesToTheFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const ms = time.Millisecond
		memory := NewMemoryStore()
		open := func() *RateLimiter {
			store := &distant{Store: memory}
			store.trip.Store(int64(50 * ms))
			l, err := NewSmoothBursty("x", 10, WithMaxPermits(0), WithStore(store), Logged(t))
			require.NoError(t, err)
			return l
		}
		l, other := open(), open()
		began := time.Now()
		var mu sync.Mutex
		due := make(map[string]time.Duration)
		reserve := func(after time.Duration, l *RateLimiter, who string) {
			time.AfterFunc(after, func() {
				r, err := l.Reserve(background, 1)
				require.NoError(t, err)
				<-r.Ready()
				mu.Lock()
				defer mu.Unlock()
				due[who] = time.Since(began).Round(ms)
			})
		}
		reserve(0, l, "first") // under way until 50 ms
		time.AfterFunc(10*ms, func() {
			ctx, cancel := context.WithCancel(background)
			time.AfterFunc(70*ms, cancel)
			_, err := l.Acquire(ctx, 1)
			require.ErrorIs(t, err, context.Canceled)
		})
		reserve(20*ms, l, "beside it")     // both are under way until 100 ms
		reserve(70*ms, other, "elsewhere") // until 120 ms; the refund until 150 ms
		reserve(110*ms, l, "waits")
		reserve(151*ms, l, "comes later")
		time.Sleep(time.Second)
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, map[string]time.Duration{
			"first": 150 * ms, "beside it": 250 * ms, "waits": 350 * ms, "elsewhere": 450 * ms, "comes later": 550 * ms,
		}, due)
	})
}

// A reservation that waits for the next batch gets the permits of a caller that has given up. There is no other waiter, and nothing to
// send; the reservation is ready at its due time all the same.
func TestSpareIsReadyInTime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const ms = time.Millisecond
		store := &distant{Store: NewMemoryStore()}
		store.trip.Store(int64(50 * ms))
		l, err := NewSmoothBursty("x", 10, WithMaxPermits(0), WithStore(store), Logged(t))
		require.NoError(t, err)
		began := time.Now()
		ctx, cancel := context.WithCancel(background)
		time.AfterFunc(30*ms, cancel)
		time.AfterFunc(40*ms, func() {
			r, err := l.Reserve(background, 1)
			require.NoError(t, err)
			<-r.Ready()
			require.Equal(t, 150*ms, time.Since(began).Round(ms))
			require.EqualValues(t, 1, store.calls.Load())
		})
		r, err := l.Reserve(ctx, 1) // decided at 50 ms
		require.ErrorIs(t, err, context.Canceled)
		require.Nil(t, r)
		time.Sleep(time.Second)
		require.Zero(t, Waiting(l))
	})
}
