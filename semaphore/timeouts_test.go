package semaphore_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// distant is a way to a store, and back, that each take what way returns. Grants come that way, too.
type distant struct {
	store.Store
	way func() time.Duration
}

func (d *distant) Apply(ctx context.Context, b *store.Batch) (*store.Report, error) {
	time.Sleep(d.way())
	report, err := d.Store.Apply(ctx, b)
	time.Sleep(d.way())
	return report, err
}

func (d *distant) Listen(ctx context.Context, process string, ready func(), wake func(store.Grant)) error {
	return d.Store.Listen(ctx, process, ready, func(g store.Grant) {
		time.Sleep(d.way())
		wake(g)
	})
}

// Calls return within their timeouts, without a store, beside one, and at most two round trips later with one that takes its time, at the start above
// all. None is refused although a later call of its process was granted as many permits in its time, and what is granted to callers that have gone is
// given back at once.
func TestResultsWithinTheTimeout(t *testing.T) {
	for name, c := range map[string]struct {
		processes   int
		first, then time.Duration // the longest way, in the first second and after it
	}{
		"memory": {processes: 1}, "one process": {processes: 1}, "three processes": {processes: 3},
		"a distant process":       {1, 100 * time.Millisecond, 10 * time.Millisecond},
		"three distant processes": {3, 100 * time.Millisecond, 10 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			processes := c.processes
			inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
				type call struct {
					until, ended time.Time
					permits      int
					granted      bool
				}
				began, calls := time.Now(), make([][]*call, processes)
				way := func() time.Duration {
					if time.Since(began) < time.Second {
						return time.Duration(rand.Int64N(int64(c.first) + 1))
					}
					return time.Duration(rand.Int64N(int64(c.then) + 1))
				}
				trips := func(at time.Time) time.Duration { // the longest duration of two
					if at.Sub(began) < 2*time.Second {
						return 4 * c.first
					}
					return 4 * c.then
				}
				var waiting sync.WaitGroup
				var live, wanted atomic.Int64 // calls, and their permits, until the store has had the time to hear of their ends
				over := make(chan struct{})
				go func() {
					for {
						select {
						case <-over:
							return
						case <-time.After(10 * time.Millisecond):
						}
						if all, err := place.Stats(ctx); err != nil || all.Used > int(wanted.Load()) || all.Waiting > int(live.Load()) {
							t.Errorf("%+v, %v: %d calls for %d permits", all, err, live.Load(), wanted.Load())
							return
						}
					}
				}()
				for p := range processes {
					s, err := semaphore.NewMemory(5)
					require.NoError(t, err)
					if name != "memory" {
						s = new(faulty).process(t, &distant{place, way}, 5, semaphore.WithLease(time.Hour))
					}
					r := rand.New(rand.NewPCG(uint64(p), 37))
					waiting.Go(func() {
						for i := range 2000 {
							pause := float64(processes) * float64(15*time.Millisecond)
							if c.first > 0 && i < 30 { // these come before the first reply
								pause = float64(time.Millisecond)
							}
							time.Sleep(time.Duration(r.ExpFloat64() * pause))
							timeout, holds := time.Duration(r.ExpFloat64()*float64(200*time.Millisecond)), time.Duration(r.Int64N(int64(50*time.Millisecond)))
							c := &call{until: time.Now().Add(timeout), permits: 1 + r.IntN(5)}
							calls[p] = append(calls[p], c)
							waiting.Go(func() {
								live.Add(1)
								wanted.Add(int64(c.permits))
								held, err := s.TryAcquire(ctx, c.permits, timeout)
								if c.ended, c.granted = time.Now(), err == nil; c.granted {
									time.Sleep(holds)
									_ = held.Release(ctx)
								} else if !errors.Is(err, semaphore.ErrRefused) {
									t.Error(err)
								}
								time.Sleep(trips(time.Now()))
								live.Add(-1)
								wanted.Add(-int64(c.permits))
							})
						}
					})
				}
				waiting.Wait()
				close(over)
				granted, late, wrong := 0, 0, 0
				for _, line := range calls {
					soonest := [6]time.Time{}
					for i := len(line) - 1; i >= 0; i-- {
						c := line[i]
						if c.ended.After(c.until.Add(trips(c.until))) {
							late++
						}
						switch at := soonest[c.permits]; {
						case c.granted:
							granted++
							for n := range c.permits {
								if at := soonest[n+1]; at.IsZero() || c.ended.Before(at) {
									soonest[n+1] = c.ended
								}
							}
						case !at.IsZero() && at.Add(trips(at)).Before(c.until):
							wrong++
						}
					}
				}
				left, err := place.Stats(ctx)
				require.NoError(t, err)
				require.Zero(t, left.Used)
				t.Logf("%d granted, %d late, %d refused although a later one was granted in time", granted, late, wrong)
				require.Positive(t, granted)
				require.Zero(t, late)
				require.Zero(t, wrong)
			})
		})
	}
}
