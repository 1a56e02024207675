package semaphore_test

import (
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// Calls return within their timeouts, with and without a store, and none is refused although a later call of its process was granted as many permits in
// its time.
func TestResultsWithinTheTimeout(t *testing.T) {
	for name, processes := range map[string]int{"memory": 1, "one process": 1, "three processes": 3} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
				type call struct {
					until, ended time.Time
					permits      int
					granted      bool
				}
				calls := make([][]*call, processes)
				var waiting sync.WaitGroup
				for p := range processes {
					s, err := semaphore.NewMemory(5)
					require.NoError(t, err)
					if name != "memory" {
						s = new(faulty).process(t, place, 5)
					}
					r := rand.New(rand.NewPCG(uint64(p), 37))
					waiting.Go(func() {
						for range 2000 {
							time.Sleep(time.Duration(r.ExpFloat64() * float64(processes) * float64(15*time.Millisecond)))
							timeout, holds := time.Duration(r.ExpFloat64()*float64(200*time.Millisecond)), time.Duration(r.Int64N(int64(50*time.Millisecond)))
							c := &call{until: time.Now().Add(timeout), permits: 1 + r.IntN(5)}
							calls[p] = append(calls[p], c)
							waiting.Go(func() {
								held, err := s.TryAcquire(ctx, c.permits, timeout)
								if c.ended, c.granted = time.Now(), err == nil; c.granted {
									time.Sleep(holds)
									_ = held.Release(ctx)
								} else if !errors.Is(err, semaphore.ErrRefused) {
									t.Error(err)
								}
							})
						}
					})
				}
				waiting.Wait()
				granted, late, wrong := 0, 0, 0
				for _, line := range calls {
					soonest := [6]time.Time{}
					for i := len(line) - 1; i >= 0; i-- {
						c := line[i]
						if c.ended.After(c.until) {
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
						case !at.IsZero() && at.Before(c.until):
							wrong++
						}
					}
				}
				t.Logf("%d granted, %d late, %d refused although a later one was granted in time", granted, late, wrong)
				require.Positive(t, granted)
				require.Zero(t, late)
				require.Zero(t, wrong)
			})
		})
	}
}
