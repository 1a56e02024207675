package tokenbucket_test

import (
	"context"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

const (
	timedStore     = 200 * time.Millisecond // the store timeout
	nearStoreTakes = 10 * time.Millisecond
)

// timeoutWorld is a fleet that calls TryAcquire at random, in virtual time. Its processes start together, with callers that arrive before the first
// reply.
type timeoutWorld struct {
	seed      uint64
	rate      float64
	processes int
	permits   int           // of a call, at most
	demand    float64       // times the rate
	timeout   time.Duration // on average
	lasts     time.Duration
	open      func(t *testing.T, rate float64, stores []tb.Store) tryAcquire // of one process
}

// tryAcquire is TryAcquire of a limiter, a group or a choice.
type tryAcquire func(ctx context.Context, permits int, timeout time.Duration) (bool, error)

// timedCall is a call and its result.
type timedCall struct {
	at, ended, timeout time.Duration
	permits            int
	granted            bool
}

// timeoutCount is the result of a world.
type timeoutCount struct {
	calls, granted int
	late           int // results later than the timeout and the store timeout
	wrong          int // refusals although a later call of the process was granted as many permits within the timeout
	latest         time.Duration
}

func (n *timeoutCount) add(other timeoutCount) {
	n.calls, n.granted, n.late, n.wrong = n.calls+other.calls, n.granted+other.granted, n.late+other.late, n.wrong+other.wrong
	n.latest = max(n.latest, other.latest)
}

// nearStore is the way of one process to a store, which takes up to nearStoreTakes there and back.
type nearStore struct {
	tb.Store
	mu     sync.Mutex
	random *rand.Rand
}

func (s *nearStore) way() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Duration(s.random.Int64N(int64(nearStoreTakes / 2)))
}

// Apply implements Store.
func (s *nearStore) Apply(ctx context.Context, b *tb.Batch) error {
	time.Sleep(s.way())
	err := s.Store.Apply(ctx, b)
	time.Sleep(s.way())
	return err
}

// play runs the world and counts what its calls got.
func (w timeoutWorld) play(t *testing.T) (n timeoutCount) {
	t.Helper()
	inBubble(t, func(t *testing.T) {
		random := rand.New(rand.NewPCG(w.seed, 37))
		shared, began := []tb.Store{tb.NewMemoryStore(), tb.NewMemoryStore()}, time.Now()
		calls := make([][]*timedCall, w.processes)
		var waiting sync.WaitGroup
		for p := range w.processes {
			var stores []tb.Store
			for _, s := range shared {
				stores = append(stores, &nearStore{Store: s, random: rand.New(rand.NewPCG(w.seed, random.Uint64()))})
			}
			try, r := w.open(t, w.rate, stores), rand.New(rand.NewPCG(w.seed, random.Uint64()))
			call := func() {
				c := &timedCall{at: time.Since(began), permits: 1 + r.IntN(w.permits)}
				c.timeout = time.Duration(r.ExpFloat64() * float64(w.timeout))
				calls[p] = append(calls[p], c)
				waiting.Go(func() {
					granted, err := try(ctx, c.permits, c.timeout)
					expectTimed(t, err)
					c.ended, c.granted = time.Since(began), granted
				})
			}
			waiting.Go(func() {
				for range r.IntN(30) { // before the first reply, mostly
					time.Sleep(time.Duration(r.Int64N(int64(time.Millisecond))))
					call()
				}
				for time.Since(began) < w.lasts {
					gap := r.ExpFloat64() * float64(w.processes) * float64(1+w.permits) / 2 / (w.rate * w.demand)
					time.Sleep(time.Duration(gap * float64(time.Second)))
					call()
				}
			})
		}
		waiting.Wait()
		for p := range calls {
			soonest := make([]time.Duration, w.permits+1) // when a later call was granted so many permits
			for i := range soonest {
				soonest[i] = 1 << 62
			}
			for i := len(calls[p]) - 1; i >= 0; i-- {
				c := calls[p][i]
				n.calls++
				if over := c.ended - c.at - c.timeout - timedStore; over > 0 {
					n.late++
					n.latest = max(n.latest, over)
				}
				if c.granted {
					n.granted++
					for m := range c.permits {
						soonest[m+1] = min(soonest[m+1], c.ended)
					}
				} else if c.at+c.timeout > soonest[c.permits]+2*nearStoreTakes {
					n.wrong++
				}
			}
		}
	})
	return n
}

// expectTimed fails the test for any error except a request that no bucket can grant in time.
func expectTimed(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		require.ErrorIs(t, err, tb.ErrNeverGranted)
	}
}

// A call returns within its timeout and the store's, whether it is granted or refused, from the first call of a process on.
func TestResultsWithinTheTimeout(t *testing.T) {
	member := func(t *testing.T, name string, rate float64, s tb.Store) *tb.RateLimiter {
		return limiter(t, name, rate, tb.WithStore(s), tb.WithStoreTimeout(timedStore))
	}
	most := 20_000
	if os.Getenv("TOKENBUCKET_LONG") != "" {
		most = 5_200_000
	}
	for name, open := range map[string]func(t *testing.T, rate float64, s []tb.Store) tryAcquire{
		"limiter": func(t *testing.T, rate float64, s []tb.Store) tryAcquire {
			return member(t, "a", rate, s[0]).TryAcquire
		},
		"All": func(t *testing.T, rate float64, s []tb.Store) tryAcquire {
			return all(t, member(t, "a", rate, s[0]), member(t, "b", 1.5*rate, s[0])).TryAcquire
		},
		"All of two stores": func(t *testing.T, rate float64, s []tb.Store) tryAcquire {
			return all(t, member(t, "a", rate, s[0]), member(t, "b", 1.5*rate, s[1])).TryAcquire
		},
		"Any": func(t *testing.T, rate float64, s []tb.Store) tryAcquire {
			c := anyOf(t, member(t, "a", rate/2, s[0]), member(t, "b", rate/2, s[0]))
			return func(ctx context.Context, permits int, timeout time.Duration) (bool, error) {
				by, err := c.TryAcquire(ctx, permits, timeout)
				return by != nil, err
			}
		},
		"Any of two stores": func(t *testing.T, rate float64, s []tb.Store) tryAcquire {
			c := anyOf(t, member(t, "a", rate/2, s[0]), member(t, "b", rate/2, s[1]))
			return func(ctx context.Context, permits int, timeout time.Duration) (bool, error) {
				by, err := c.TryAcquire(ctx, permits, timeout)
				return by != nil, err
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var total, alone timeoutCount
			for seed := uint64(1); total.calls < most; seed++ {
				r := rand.New(rand.NewPCG(seed, 8))
				rate := []float64{3, 20, 200}[r.IntN(3)]
				w := timeoutWorld{seed: seed, rate: rate, processes: 1 + r.IntN(3), permits: 1 + 4*r.IntN(2),
					demand: 0.5 + 3*r.Float64(), timeout: []time.Duration{300 * time.Millisecond, time.Second, 4 * time.Second}[r.IntN(3)], lasts: time.Duration(60 / rate * float64(time.Second)), open: open}
				n := w.play(t)
				if total.add(n); w.processes == 1 {
					alone.add(n)
				}
			}
			t.Logf("%d calls, %d granted, %d late, by up to %v; refused although a later one was granted in time: %d, of %d in worlds of one process %d",
				total.calls, total.granted, total.late, total.latest, total.wrong, alone.calls, alone.wrong)
			require.Zero(t, total.late)
			if name != "Any of two stores" { // its stores are asked one after the other
				require.LessOrEqual(t, alone.wrong, alone.calls/20_000)
			}
		})
	}
}

// The timeout of a waiter counts from the first reply that refuses it or a waiter ahead of it, although the batch has not asked for it. So it is not
// granted permits that have become later since: another process has taken two.
func TestTimeoutCountsFromTheFirstReply(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		shared := tb.NewMemoryStore()
		l := limiter(t, "a", 3, tb.WithStore(&tb.Distant{Store: shared, Takes: 10 * time.Millisecond}), tb.WithStoreTimeout(100*time.Millisecond))
		var waiting sync.WaitGroup
		call := func(timeout time.Duration, granted bool) {
			waiting.Go(func() {
				began := time.Now()
				ok, err := l.TryAcquire(ctx, 1, timeout)
				assert.NoError(t, err)
				assert.Equal(t, granted, ok, timeout)
				assert.LessOrEqual(t, time.Since(began), timeout+100*time.Millisecond)
			})
			time.Sleep(100 * time.Microsecond)
		}
		call(0, true)
		for range 7 { // the next batch asks for them, so the look-ahead is short behind them
			call(100*time.Millisecond, false)
		}
		call(400*time.Millisecond, false)
		time.Sleep(12 * time.Millisecond)
		call(885*time.Millisecond, false) // while that batch is in flight
		time.Sleep(15 * time.Millisecond)
		_, err := limiter(t, "a", 3, tb.WithStore(shared)).Reserve(ctx, 2)
		require.NoError(t, err)
		waiting.Wait()
	})
}
