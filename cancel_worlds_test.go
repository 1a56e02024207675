package tokenbucket

import (
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// randomReturns is a bucket of random processes, whose callers give most of their reservations back at random times.
type randomReturns struct {
	*testing.T
	random    *rand.Rand
	rate      float64
	size      float64
	permits   int           // the most that a call takes
	trip      time.Duration // to the store
	processes int

	mu      sync.Mutex
	used    []event
	largest float64 // of the requests that were granted
}

// call reserves permits once, and gives them back before they are due, or uses them.
func (w *randomReturns) call(random *rand.Rand, l *RateLimiter) {
	n := 1 + random.IntN(w.permits)
	r, err := l.TryReserve(background, n, time.Duration(20/w.rate*1e9))
	require.NoError(w, err)
	if !r.OK() {
		time.Sleep(time.Duration(random.Int64N(int64(2e9/w.rate))) + time.Millisecond)
		return
	}
	w.mu.Lock()
	w.largest = max(w.largest, float64(n))
	w.mu.Unlock()
	if random.IntN(4) > 0 {
		at := time.After(time.Duration(random.Int64N(int64(r.Delay()) + 1)))
		if r.Delay() > 0 {
			select {
			case <-at:
			case <-r.Ready(): // it has moved up
			}
		}
		if r.Delay() == 0 || !isReady(r) {
			end := r.Return
			if r.Delay() > 0 && random.IntN(2) == 0 {
				end = r.Cancel
			}
			require.NoError(w, end(background))
			time.Sleep(time.Duration(random.Int64N(int64(1e9 / w.rate))))
			return
		}
	}
	<-r.Ready()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.used = append(w.used, event{time.Now().UnixMicro(), float64(n)})
}

// run lets callers call for a while. It returns the permits that the rate has made and no call has used.
func (w *randomReturns) run() (lost float64) {
	shared := NewMemoryStore()
	var limiters []*RateLimiter
	for range w.processes {
		store := &distant{Store: shared}
		store.trip.Store(int64(w.trip))
		l, err := NewSmoothBursty("x", w.rate, WithStore(store), WithMaxPermits(w.size), WithInitialPermits(0))
		require.NoError(w, err)
		limiters = append(limiters, l)
	}
	began := time.Now()
	var wg sync.WaitGroup
	for i := range 12 {
		random := rand.New(rand.NewPCG(w.random.Uint64(), uint64(i)))
		wg.Go(func() {
			for time.Since(began).Seconds() < min(10, 1000/w.rate) {
				w.call(random, limiters[i%len(limiters)])
			}
		})
	}
	wg.Wait()
	time.Sleep(time.Minute) // what is on its way arrives
	for _, l := range limiters {
		require.NoError(w, l.Close(background))
	}
	b, err := limiters[0].State(background)
	require.NoError(w, err)
	used := 0.0
	for _, e := range w.used {
		used += e.n
	}
	return time.Since(began).Seconds()*w.rate - used - b.StoredPermits
}

// In random worlds permits that come back out of turn exceed the bound in no window.
func TestReturnsInRandomWorlds(t *testing.T) {
	for seed := range uint64(sized(400, 60)) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 5))
			w := &randomReturns{T: t, random: random, rate: []float64{5, 50, 1000}[random.IntN(3)], size: []float64{0, 1, 10, 100}[random.IntN(4)],
				permits: []int{1, 5, 20}[random.IntN(3)], processes: 1 + random.IntN(4)}
			w.run()
			most, sum, last := 0.0, 0.0, int64(0)
			for _, e := range w.used {
				sum = max(0, sum-w.rate*float64(e.at-last)/1e6) + e.n
				most, last = max(most, sum), e.at
			}
			require.LessOrEqual(t, most, max(w.size, w.largest)+w.rate*2e-6+1e-6, "seed %d: %d processes, %v/s, %v stored", seed, w.processes, w.rate, w.size)
		})
	}
}

// What comes back behind the permits of other processes is lost only if the bucket could not have kept it.
func TestReturnsAreNotLost(t *testing.T) {
	for seed := range uint64(sized(40, 10)) {
		synctest.Test(t, func(t *testing.T) {
			w := &randomReturns{T: t, random: rand.New(rand.NewPCG(seed, 6)), rate: 50, size: 5000, permits: 1, processes: 1 + int(seed%4)}
			require.InDelta(t, 0, w.run(), 1.5, "seed %d: %d processes", seed, w.processes)
		})
	}
}
