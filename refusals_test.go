package tokenbucket_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// crowd is the demand of a fleet on one bucket, in virtual time. Each process requests single permits at random, at demand times its equal
// part of the rate.
type crowd struct {
	rate      float64
	processes int
	demand    float64
	timeouts  []time.Duration
	leave     float64                                     // share of the calls whose context ends within their timeout
	active    func(process int, since time.Duration) bool // nil: always
	takes     func(since time.Duration) time.Duration     // the duration of a way to the store and back; nil for a millisecond
	lasts     time.Duration
}

// asked is one call and what became of it.
type asked struct {
	at, until, ended time.Duration
	granted, refused bool
}

// told is the result of a crowd.
type told struct {
	calls, refused int
	late           float64 // share of the refusals that took longer than a second
	wrong          float64 // share of the refused who would have been granted in a tenth less than their timeout: one who came later was
	used           float64 // share of the rate, from the third second on
}

func (t told) String() string {
	return fmt.Sprintf("%d calls, %d refused: %.1f %% late, %.2f %% wrongly; %.2f %% of the rate used", t.calls, t.refused, 100*t.late, 100*t.wrong, 100*t.used)
}

// faraway is the store of one process of several, whose answers take as long as is said.
type faraway struct {
	tb.Store
	began time.Time
	takes func(since time.Duration) time.Duration
}

// Apply implements Store.
func (s *faraway) Apply(ctx context.Context, b *tb.Batch) error {
	time.Sleep(s.takes(time.Since(s.began)))
	return s.Store.Apply(ctx, b)
}

// play lets a crowd ask, and returns how it fared.
func (c *crowd) play(t *testing.T) (all told) {
	t.Helper()
	inBubble(t, func(t *testing.T) {
		shared, began := tb.NewMemoryStore(), time.Now()
		takes := c.takes
		if takes == nil {
			takes = func(time.Duration) time.Duration { return time.Millisecond }
		}
		lines := make([][]*asked, c.processes)
		var waiting sync.WaitGroup
		var used atomic.Int64
		for p := range c.processes {
			l := bursty(t, c.rate, tb.WithStore(&faraway{shared, began, takes}), tb.WithMaxPermits(1))
			waiting.Go(func() {
				r := rand.New(rand.NewPCG(uint64(p), 7))
				for time.Since(began) < c.lasts {
					gap := r.ExpFloat64() * float64(c.processes) / (c.rate * c.demand)
					time.Sleep(time.Duration(gap * float64(time.Second)))
					since := time.Since(began)
					if c.active != nil && !c.active(p, since) {
						continue
					}
					timeout := c.timeouts[r.IntN(len(c.timeouts))]
					q := &asked{at: since, until: since + timeout}
					lines[p] = append(lines[p], q)
					ctx, cancel := context.WithCancel(ctx)
					if r.Float64() < c.leave {
						time.AfterFunc(time.Duration(r.Float64()*float64(timeout)), cancel)
					}
					waiting.Go(func() {
						defer cancel()
						ok, err := l.TryAcquire(ctx, 1, timeout)
						expect(t, err)
						q.ended, q.granted, q.refused = time.Since(began), ok, err == nil && !ok
						if ok && q.ended > 3*time.Second && q.ended <= c.lasts {
							used.Add(1)
						}
					})
				}
			})
		}
		waiting.Wait()
		all.used = float64(used.Load()) / (c.rate * (c.lasts - 3*time.Second).Seconds())
		all.count(lines)
	})
	return all
}

func (t *told) count(lines [][]*asked) {
	late, wrong := 0, 0
	for _, line := range lines {
		soonest := time.Duration(1 << 62) // that one of those behind was granted
		for i := len(line) - 1; i >= 0; i-- {
			q := line[i]
			t.calls++
			if q.granted {
				soonest = min(soonest, q.ended)
			}
			if !q.refused {
				continue
			}
			t.refused++
			if q.ended-q.at > time.Second {
				late++
			}
			if q.until-soonest > (q.until-q.at)/10 {
				wrong++
			}
		}
	}
	t.late, t.wrong = float64(late)/float64(max(1, t.refused)), float64(wrong)/float64(max(1, t.refused))
}

func seconds(s ...float64) (d []time.Duration) {
	for _, s := range s {
		d = append(d, time.Duration(s*float64(time.Second)))
	}
	return d
}

// Callers that cannot be in time are refused early, although a process does not know the waiters of others: it uses the pace of its own
// queue. No caller loses a permit by that.
func TestMostAreRefusedEarly(t *testing.T) {
	for name, test := range map[string]struct {
		crowd
		late, wrong float64 // at most
	}{
		"4 s":     {crowd{rate: 20, processes: 2, demand: 3, timeouts: seconds(4), lasts: time.Minute}, 0.15, 0.08},
		"15 s":    {crowd{rate: 20, processes: 2, demand: 3, timeouts: seconds(15), lasts: time.Minute}, 0.15, 0.08},
		"slow":    {crowd{rate: 2, processes: 3, demand: 3, timeouts: seconds(15), lasts: 3 * time.Minute}, 0.3, 0.3},
		"many":    {crowd{rate: 200, processes: 5, demand: 3, timeouts: seconds(4), lasts: 20 * time.Second}, 0.15, 0.15},
		"alone":   {crowd{rate: 20, processes: 1, demand: 3, timeouts: seconds(4), lasts: time.Minute}, 0, 0},
		"mixed":   {crowd{rate: 20, processes: 3, demand: 3, timeouts: seconds(0.3, 2, 4, 15), leave: 0.2, lasts: time.Minute}, 0.15, 0.08},
		"fickle":  {crowd{rate: 20, processes: 3, demand: 4, timeouts: seconds(4), leave: 0.5, lasts: time.Minute}, 0.4, 0.3},
		"changes": {crowd{rate: 20, processes: 2, demand: 4, timeouts: seconds(4), lasts: 80 * time.Second, active: everyOther(10 * time.Second)}, 0.25, 0.4},
		"stalls":  {crowd{rate: 20, processes: 2, demand: 3, timeouts: seconds(4), lasts: 80 * time.Second, takes: stalling}, 0.3, 0.5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fared := test.play(t)
			t.Log(fared)
			require.Greater(t, fared.refused, fared.calls/4)
			require.LessOrEqual(t, fared.late, test.late)
			require.LessOrEqual(t, fared.wrong, test.wrong)
			require.GreaterOrEqual(t, fared.used, 0.99)
		})
	}
}

// everyOther lets one process have callers all the time, and others every other while.
func everyOther(while time.Duration) func(int, time.Duration) bool {
	return func(process int, since time.Duration) bool { return process == 0 || int(since/while)%2 == 1 }
}

// stalling is a store whose answers take 0.7 s for a moment every five seconds.
func stalling(since time.Duration) time.Duration {
	if since%(5*time.Second) < 300*time.Millisecond {
		return 700 * time.Millisecond
	}
	return 5 * time.Millisecond
}

// A raised rate shows, though the line has moved slowly until then.
func TestEarlyRefusalsLearnTheRate(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		shared, began := tb.NewMemoryStore(), time.Now()
		until, end := context.WithCancel(ctx)
		var waiting sync.WaitGroup
		var limiters []*tb.RateLimiter
		for range 2 {
			l := bursty(t, 20, tb.WithStore(&faraway{shared, began, func(time.Duration) time.Duration { return time.Millisecond }}))
			limiters = append(limiters, l)
			for range 1000 {
				waiting.Go(func() {
					_, err := l.Acquire(until, 1)
					expect(t, err)
				})
			}
		}
		time.Sleep(10 * time.Second)
		require.NoError(t, limiters[0].SetRate(ctx, 200))
		time.Sleep(time.Second) // until the other process has read it
		for _, l := range limiters {
			waiting.Go(func() {
				ok, err := l.TryAcquire(ctx, 1, 15*time.Second)
				expect(t, err)
				require.True(t, ok)
			})
		}
		time.Sleep(15 * time.Second)
		end()
		waiting.Wait()
	})
}

// Under PayLater only the first permit of a request must be due in time, not all of them.
func TestEarlyRefusalsPayLater(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		shared, began := tb.NewMemoryStore(), time.Now()
		until, end := context.WithCancel(ctx)
		var waiting sync.WaitGroup
		var limiters []*tb.RateLimiter
		for range 2 {
			l := bursty(t, 20, tb.WithPayment(tb.PayLater), tb.WithMaxPermits(1),
				tb.WithStore(&faraway{shared, began, func(time.Duration) time.Duration { return time.Millisecond }}))
			limiters = append(limiters, l)
			for range 20 {
				waiting.Go(func() {
					for until.Err() == nil {
						_, _ = l.Acquire(until, 1)
					}
				})
			}
		}
		time.Sleep(10 * time.Second)
		asked := time.Now()
		ok, err := limiters[0].TryAcquire(ctx, 100, 5*time.Second)
		took := time.Since(asked)
		end()
		waiting.Wait()
		require.NoError(t, err)
		require.True(t, ok, "refused after %v", took)
	})
}
