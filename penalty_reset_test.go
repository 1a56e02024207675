package tokenbucket_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// losing is a store in memory that can lose its state.
type losing struct {
	memory atomic.Pointer[tb.MemoryStore]
}

func (s *losing) Apply(ctx context.Context, b *tb.Batch) error { return s.memory.Load().Apply(ctx, b) }

func (s *losing) lose() { s.memory.Store(tb.NewMemoryStore()) }

// penalised are the limiters of one bucket: those whose callers wait, and the one that penalises and resets.
type penalised struct {
	here, there *tb.RateLimiter
	lose        func()
	learns      time.Duration // the longest time until here learns of what there does
}

// penalisedBuckets runs a test in virtual time with a store in memory, with one process of a distant store, and with two.
func penalisedBuckets(t *testing.T, rate float64, test func(t *testing.T, p *penalised)) {
	t.Helper()
	for name, processes := range map[string]int{"memory": 0, "one process": 1, "two processes": 2} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				const trip = time.Millisecond
				shared := new(losing)
				shared.lose()
				open := func() tb.Store {
					if processes == 0 {
						return shared.memory.Load()
					}
					return &tb.Distant{Store: shared, Takes: trip}
				}
				p := &penalised{lose: shared.lose}
				store := open()
				p.here = bursty(t, rate, tb.WithStore(store), patient)
				p.there = bursty(t, rate, tb.WithStore(store), patient)
				p.learns = time.Duration(processes) * 4 * trip
				if processes == 2 {
					p.there = bursty(t, rate, tb.WithStore(open()), patient)
					p.learns += 500 * time.Millisecond
				}
				if processes == 0 {
					p.lose = nil
				}
				test(t, p)
			})
		})
	}
}

// A call with a timeout keeps it whatever is penalised: it is refused as soon as its process learns that it would be late. Calls without a
// limit are served after a Reset, at once and at the bucket's rate, and so are reservations. A context's deadline is a timeout, too.
func TestPenaltyKeepsTimeouts(t *testing.T) {
	penalisedBuckets(t, 1, func(t *testing.T, p *penalised) {
		ok, err := p.here.Try(ctx)
		require.NoError(t, err)
		require.True(t, ok)
		began := time.Now()
		var callers sync.WaitGroup
		var refused, served []time.Duration
		var mu sync.Mutex
		note := func(list *[]time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			*list = append(*list, time.Since(began))
		}
		penalty := 10 * time.Millisecond
		for range 3 {
			callers.Go(func() {
				ok, err := p.here.TryAcquire(ctx, 1, 3500*time.Millisecond)
				if err != nil || ok {
					t.Error("a call whose permits come in an hour: ", ok, err)
				}
				note(&refused)
			})
			synctest.Wait()
		}
		soon, cancel := context.WithTimeout(ctx, 4500*time.Millisecond)
		defer cancel()
		callers.Go(func() {
			_, err := p.here.Acquire(soon, 1)
			var wait *tb.WaitError
			if !errors.As(err, &wait) || !errors.Is(err, context.DeadlineExceeded) {
				t.Error("an Acquire with a deadline: ", err)
			}
			note(&refused)
		})
		for range 4 {
			callers.Go(func() {
				_, err := p.here.Acquire(ctx, 1)
				expect(t, err)
				note(&served)
			})
		}
		synctest.Wait()
		reserved, err := p.here.Reserve(ctx, 1)
		require.NoError(t, err)
		time.Sleep(penalty - time.Since(began))
		require.NoError(t, p.there.Penalize(ctx, time.Hour))
		time.Sleep(2 * time.Second)
		require.NoError(t, p.there.Reset(ctx))
		reset := time.Since(began)
		callers.Wait()
		<-reserved.Ready()
		ready := time.Since(began)

		require.Len(t, refused, 4)
		for _, at := range refused {
			require.LessOrEqual(t, at, penalty+p.learns)
		}
		require.Len(t, served, 4)
		for _, at := range append(served, ready) {
			require.GreaterOrEqual(t, at, 2*time.Second)
			require.LessOrEqual(t, at, reset+p.learns+10*time.Second)
		}
		require.LessOrEqual(t, tb.Worst(len(served), func(i int) (int64, float64) { return served[i].Microseconds(), 1 }, 1), 2.0)
	})
}

// Whatever happens to a bucket after a penalty, nothing falls due before the end of the next one.
func TestSecondPenalty(t *testing.T) {
	for what, between := range map[string]func(t *testing.T, p *penalised){
		"reset": func(t *testing.T, p *penalised) { require.NoError(t, p.there.Reset(ctx)) },
		"lost":  func(_ *testing.T, p *penalised) { p.lose() },
		"again": func(*testing.T, *penalised) {},
	} {
		for _, second := range []time.Duration{2 * time.Second, 3 * time.Second, 4 * time.Second} {
			t.Run(what+"/"+second.String(), func(t *testing.T) {
				penalisedBuckets(t, 10, func(t *testing.T, p *penalised) {
					if p.lose == nil && what == "lost" {
						t.Skip("a limiter keeps its bucket in memory")
					}
					require.NoError(t, p.there.Penalize(ctx, 3*time.Second))
					_, err := p.here.State(ctx)
					require.NoError(t, err)
					time.Sleep(4 * time.Second)
					_, err = p.here.Reserve(ctx, 11) // more than is stored
					require.NoError(t, err)
					var reserved []*tb.Reservation
					for range 5 {
						r, err := p.here.Reserve(ctx, 5)
						require.NoError(t, err)
						reserved = append(reserved, r)
					}
					between(t, p)
					began := time.Now()
					require.NoError(t, p.there.Penalize(ctx, second))
					for i, r := range reserved {
						<-r.Ready()
						require.GreaterOrEqual(t, time.Since(began), second, "reservation %d", i)
						require.LessOrEqual(t, time.Since(began), second+3500*time.Millisecond, "reservation %d", i)
					}
				})
			})
		}
	}
}
