package tokenbucket_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

func ready(r *tb.Reservation) bool {
	select {
	case <-r.Ready():
		return true
	default:
		return false
	}
}

// A penalty delays everything that was not due yet by its duration, in this process and in others, and drops stored permits. Of several
// penalties, the one that ends last counts.
func TestPenalize(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		l, err := tb.NewSmoothBursty("held", 5, tb.WithStore(open()), patient, tb.WithClock(clock), tb.WithInitialPermits(2))
		require.NoError(t, err)
		reserve := func(n int) *tb.Reservation {
			r, err := l.Reserve(ctx, n)
			require.NoError(t, err)
			return r
		}
		reserve(1)
		saved, err := l.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 1.0, saved.StoredPermits)
		require.NoError(t, l.Penalize(ctx, 100*time.Millisecond))
		clock.Advance(100 * time.Millisecond)
		first := reserve(1)
		require.Equal(t, 200*time.Millisecond, first.Delay(), "the saved permit is gone, and none came while the bucket was held back")
		second := reserve(2)
		require.Equal(t, 600*time.Millisecond, second.Delay())
		clock.Advance(100 * time.Millisecond)

		require.NoError(t, l.Penalize(ctx, 2*time.Second)) // as of 200 ms
		require.Equal(t, 2200*time.Millisecond, first.Delay())
		require.Equal(t, 2600*time.Millisecond, second.Delay())
		require.NoError(t, l.Penalize(ctx, time.Second), "a shorter one")
		require.Equal(t, 2200*time.Millisecond, first.Delay())
		clock.Advance(time.Second)
		require.NoError(t, l.Penalize(ctx, 1500*time.Millisecond), "half a second longer")
		require.Equal(t, 2700*time.Millisecond, first.Delay())
		require.Equal(t, 3100*time.Millisecond, second.Delay())
		state, err := l.State(ctx)
		require.NoError(t, err)
		require.Equal(t, clock.Now().Add(1500*time.Millisecond).UnixMicro(), state.HeldUntilMicros)

		third, err := l.TryReserve(ctx, 1, time.Second)
		require.NoError(t, err)
		require.False(t, third.OK())
		require.Equal(t, 2200*time.Millisecond-time.Second, third.RetryAfter())

		clock.Advance(1599 * time.Millisecond)
		require.False(t, ready(first))
		clock.Advance(time.Millisecond)
		<-first.Ready()
		require.False(t, ready(second))
		clock.Advance(399 * time.Millisecond)
		require.False(t, ready(second))
		clock.Advance(time.Millisecond)
		<-second.Ready()
		require.Equal(t, 200*time.Millisecond, reserve(1).Delay(), "nothing was lost or gained")
	})
}

// A penalty makes a bucket that warms up as cold as the same time without a call does, and no colder than one that begins.
func TestPenaltyOfAWarmBucket(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		for _, pause := range []time.Duration{50 * time.Millisecond, 200 * time.Millisecond, time.Second} {
			var cold []float64
			for _, held := range []bool{false, true} {
				l, err := tb.NewSmoothWarmingUp(fmt.Sprint(pause, held), 100, 200*time.Millisecond, tb.WithStore(open()), patient, tb.WithClock(clock))
				require.NoError(t, err)
				r, err := l.Reserve(ctx, 100)
				require.NoError(t, err)
				clock.Advance(r.Delay())
				b, err := l.State(ctx)
				require.NoError(t, err)
				clock.Advance(time.Duration(b.NextFreeTicketMicros-b.SeenMicros) * time.Microsecond) // until it owes nothing, and is warm
				if held {
					require.NoError(t, l.Penalize(ctx, pause))
				}
				clock.Advance(pause)
				b, err = l.State(ctx)
				require.NoError(t, err)
				cold = append(cold, b.StoredPermits)
			}
			require.InDelta(t, cold[0], cold[1], 1e-3, "%v", pause)
			require.InDelta(t, min(20, pause.Seconds()*100), cold[1], 1e-3, "%v", pause)
		}
	})
}

// A Cancel during a penalty makes no waiter due before its end, and the permits lapse.
func TestPenalizeAndCancel(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		l, err := tb.NewSmoothBursty("held", 5, tb.WithStore(open()), patient, tb.WithClock(clock))
		require.NoError(t, err)
		var all []*tb.Reservation
		for _, n := range []int{1, 10, 1, 1} {
			r, err := l.Reserve(ctx, n)
			require.NoError(t, err)
			all = append(all, r)
		}
		clock.Advance(1900 * time.Millisecond) // the ten are nearly there
		require.NoError(t, l.Penalize(ctx, 5*time.Second))
		require.NoError(t, all[1].Cancel(ctx))
		require.NoError(t, all[3].Cancel(ctx))
		require.Equal(t, 7*time.Second, all[2].Delay(), "nine of the ten before it would have been due in the penalty")
		clock.Advance(4999 * time.Millisecond)
		require.False(t, ready(all[2]))
		r, err := l.Reserve(ctx, 1)
		require.NoError(t, err)
		clock.Advance(101 * time.Millisecond)
		<-all[2].Ready() // when the ten would have been due
		require.False(t, ready(r))
		clock.Advance(200 * time.Millisecond)
		<-r.Ready()
	})
}

// A process with a waiter, and without calls, receives a penalty of another process within half a second.
func TestPenaltyIsHeard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := tb.NewMemoryStore()
		open := func() *tb.RateLimiter {
			l, err := tb.NewSmoothBursty("heard", 1, tb.WithStore(&tb.Distant{Store: shared}))
			require.NoError(t, err)
			return l
		}
		here, there := open(), open()
		began := time.Now()
		for range 2 {
			_, err := here.Reserve(ctx, 1)
			require.NoError(t, err)
		}
		waits, err := here.Reserve(ctx, 1) // in two seconds
		require.NoError(t, err)
		require.NoError(t, there.Penalize(ctx, 2*time.Second))
		require.Equal(t, 2*time.Second, waits.Delay(), "not heard yet")
		time.Sleep(500 * time.Millisecond)
		synctest.Wait()
		<-waits.Ready()
		require.Equal(t, 4*time.Second, time.Since(began))
	})
}

// The reply that shows an earlier penalty grants permits, too: to a process that knew the bucket before the penalty, and to one that starts
// later. Both use them, and so does a group.
func TestGrantAfterPenalty(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		limiter := func(name string, s tb.Store) *tb.RateLimiter {
			l, err := tb.NewSmoothBursty(name, 5, tb.WithStore(s), patient, tb.WithClock(clock))
			require.NoError(t, err)
			return l
		}
		type tries interface {
			TryAcquire(ctx context.Context, permits int, timeout time.Duration) (bool, error)
		}
		for what, process := range map[string]func() tries{
			"limiter": func() tries { return limiter("x", open()) },
			"group": func() tries {
				s := open()
				g, err := tb.All(limiter("{y}1", s), limiter("{y}2", s))
				require.NoError(t, err)
				return g
			},
		} {
			knew := process()
			ok, err := knew.TryAcquire(ctx, 1, 0)
			require.NoError(t, err)
			require.True(t, ok, what)
			for _, name := range []string{"x", "{y}2"} {
				require.NoError(t, limiter(name, open()).Penalize(ctx, 20*time.Second))
			}
			for _, l := range []tries{knew, process()} {
				clock.Advance(time.Minute)
				ok, err := l.TryAcquire(ctx, 5, 0)
				require.NoError(t, err)
				require.True(t, ok, what)
				ok, err = l.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				require.False(t, ok, what)
			}
		}
	})
}

// Handing out a lease ends when the bucket is held back.
func TestPenaltyEndsLease(t *testing.T) {
	client, prefix := redisClient(t), prefixOf(t)
	open := func() *tb.RateLimiter {
		l, err := tb.NewSmoothBursty("leased", 1000, tb.WithStore(tb.NewRedisScriptStore(client, tb.WithKeyPrefix(prefix))),
			tb.WithPrefetch(500*time.Millisecond), tb.WithInitialPermits(1000), patient)
		require.NoError(t, err)
		return l
	}
	l := open()
	for range 100 {
		ok, err := l.TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.True(t, ok)
	}
	require.NoError(t, l.Penalize(ctx, 10*time.Second))
	ok, err := l.TryAcquire(ctx, 1, 0)
	require.NoError(t, err)
	require.False(t, ok)
}

func TestPenalizeBadInput(t *testing.T) {
	store := &counted{Store: tb.NewMemoryStore()}
	on := true
	l, err := tb.NewSmoothBursty("x", 5, tb.WithStore(store), tb.WithSwitch(func() bool { return on }))
	require.NoError(t, err)
	for _, d := range []time.Duration{0, -1, math.MinInt64, time.Hour + 1, math.MaxInt64} {
		err := l.Penalize(ctx, d)
		require.ErrorIs(t, err, tb.ErrInvalidConfig)
		require.ErrorContains(t, err, "penalty "+d.String())
	}
	on = false
	require.NoError(t, l.Penalize(ctx, time.Second))
	require.Zero(t, store.calls, "no store is touched")
	on = true
	require.NoError(t, l.Penalize(ctx, 1))
	require.Equal(t, 1, store.calls)
	b, err := l.State(ctx)
	require.NoError(t, err)
	require.Equal(t, int64(1), b.PausedMicros, "a nanosecond is rounded up")
}

// Level says how full the bucket was left.
func TestLevel(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		on := true
		l, err := tb.NewSmoothBursty("level", 5, tb.WithStore(open()), patient, tb.WithClock(clock), tb.WithInitialPermits(5), tb.WithMaxPermits(10),
			tb.WithSwitch(func() bool { return on }))
		require.NoError(t, err)
		level := func(n int) (tb.Level, bool) {
			r, err := l.TryReserve(ctx, n, time.Second)
			require.NoError(t, err)
			v, ok := r.Level()
			require.Equal(t, on, ok)
			return v, r.OK()
		}
		v, ok := level(2)
		require.True(t, ok)
		require.Equal(t, tb.Level{MaxPermits: 10, Rate: 5, Remaining: 3, Full: 1400 * time.Millisecond}, v)
		v, ok = level(5)
		require.True(t, ok)
		require.Equal(t, tb.Level{MaxPermits: 10, Rate: 5, Full: 2400 * time.Millisecond}, v)
		for range 2 { // the second may be refused without asking
			v, ok = level(4)
			require.False(t, ok)
			require.Equal(t, tb.Level{MaxPermits: 10, Rate: 5, Full: 2400 * time.Millisecond}, v)
		}
		on = false
		level(1)

		warm, err := tb.NewSmoothWarmingUp("warm level", 5, time.Second, tb.WithStore(open()), patient, tb.WithClock(clock))
		require.NoError(t, err)
		r, err := warm.Reserve(ctx, 1)
		require.NoError(t, err)
		v, _ = r.Level()
		require.Equal(t, 1.0, v.MaxPermits)
		require.Zero(t, v.Remaining)
		require.Greater(t, v.Full, 400*time.Millisecond)
		clock.Advance(v.Full + time.Second)
	})
}

// A level or a wait that is short of a permit, or of a microsecond, by float noise only is not rounded down.
func TestLevelWithoutNoise(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		store := open()
		for _, rate := range []float64{3, 5, 7, 30} {
			for a := 400 * time.Millisecond; a < time.Second; a += 54_321 * time.Microsecond {
				l, err := tb.NewSmoothBursty(fmt.Sprint(rate, a), rate, tb.WithStore(store), patient, tb.WithClock(clock), tb.WithMaxPermits(2*rate), tb.WithInitialPermits(0))
				require.NoError(t, err)
				r, err := l.TryReserve(ctx, 1, 0)
				require.NoError(t, err)
				require.False(t, r.OK(), "it is empty")
				clock.Advance(a)
				r, err = l.TryReserve(ctx, 1, 0)
				require.NoError(t, err)
				require.True(t, r.OK())
				clock.Advance(time.Second - a)
				r, err = l.TryReserve(ctx, int(2*rate)-1, 0)
				require.NoError(t, err)
				require.False(t, r.OK(), "rate - 1 permits are stored")
				require.Equal(t, time.Second, r.RetryAfter(), "%v/s, %v and the rest", rate, a)
				v, _ := r.Level()
				require.Equal(t, tb.Level{MaxPermits: 2 * rate, Rate: rate, Remaining: rate - 1, Full: v.Full}, v, "%v/s, %v and the rest", rate, a)
				whole := time.Duration(math.Ceil((rate+1)/rate*1e6-1e-3)) * time.Microsecond
				require.Equal(t, whole, v.Full, "%v/s, %v and the rest", rate, a)
			}
		}
	})
}

// A bucket of one kind is replaced by one of the other with Reset, and by nothing else.
func TestResetReplacesKind(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		store := open()
		bursty, err := tb.NewSmoothBursty("kind", 5, tb.WithStore(store), patient, tb.WithClock(clock), tb.WithVersion(7))
		require.NoError(t, err)
		warm, err := tb.NewSmoothWarmingUp("kind", 5, time.Second, tb.WithStore(store), patient, tb.WithClock(clock), tb.WithVersion(3))
		require.NoError(t, err)
		_, err = bursty.Try(ctx)
		require.NoError(t, err)
		for range 2 {
			_, err = warm.Try(ctx)
			require.ErrorIs(t, err, tb.ErrInvalidConfig)
			require.ErrorIs(t, warm.SetRate(ctx, 7), tb.ErrInvalidConfig)
			require.ErrorIs(t, warm.Penalize(ctx, 1), tb.ErrInvalidConfig)
			require.NoError(t, warm.Reset(ctx))
			b, err := warm.State(ctx)
			require.NoError(t, err)
			require.Equal(t, warm.Rate(), b.Rate)
			require.Positive(t, b.WarmupMicros)
			_, err = bursty.Try(ctx)
			require.ErrorIs(t, err, tb.ErrInvalidConfig)
			require.NoError(t, bursty.Reset(ctx))
			_, err = bursty.Try(ctx)
			require.NoError(t, err)
		}
	})
}

// counted counts the batches that a store decides.
type counted struct {
	tb.Store
	calls int
}

func (s *counted) Apply(c context.Context, b *tb.Batch) error {
	s.calls++
	return s.Store.Apply(c, b)
}

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
