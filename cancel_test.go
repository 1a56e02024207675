package tokenbucket_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// process is a store object of its own on shared buckets: what another process would have.
type process struct{ *tb.MemoryStore }

// limiters of both kinds and policies, for what must hold for all of them.
var limiters = []struct {
	name string
	open func(name string, rate float64, opts ...tb.Option) (*tb.RateLimiter, error)
}{
	{"bursty, pay now", func(name string, rate float64, opts ...tb.Option) (*tb.RateLimiter, error) {
		return tb.NewSmoothBursty(name, rate, append(opts, tb.WithMaxPermits(5))...)
	}},
	{"bursty, pay later", func(name string, rate float64, opts ...tb.Option) (*tb.RateLimiter, error) {
		return tb.NewSmoothBursty(name, rate, append(opts, tb.WithMaxPermits(5), tb.WithPayment(tb.PayLater))...)
	}},
	{"no burst", func(name string, rate float64, opts ...tb.Option) (*tb.RateLimiter, error) {
		return tb.NewSmoothBursty(name, rate, append(opts, tb.WithMaxPermits(0))...)
	}},
	{"warm-up, pay later", func(name string, rate float64, opts ...tb.Option) (*tb.RateLimiter, error) {
		return tb.NewSmoothWarmingUp(name, rate, 4*time.Second, opts...)
	}},
	{"warm-up, pay now", func(name string, rate float64, opts ...tb.Option) (*tb.RateLimiter, error) {
		return tb.NewSmoothWarmingUp(name, rate, 4*time.Second, append(opts, tb.WithPayment(tb.PayNow))...)
	}},
}

// Ten cancelled reservations, in any order, together or one by one, leave the bucket as if they had never come. Twenty trials
// of each kind of limiter in CI, six elsewhere.
func TestTenCancelled(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		for _, kind := range limiters {
			store := open()
			for trial := range tb.Sized(20, 6) {
				l, err := kind.open(fmt.Sprint(kind.name, trial), 5, tb.WithStore(store), patient, tb.WithClock(clock))
				require.NoError(t, err)
				_, err = l.Reserve(ctx, 2) // a caller that stays
				require.NoError(t, err)
				before, err := l.State(ctx)
				require.NoError(t, err)
				var held []*tb.Reservation
				for range 10 {
					r, err := l.Reserve(ctx, 1+trial%3)
					require.NoError(t, err)
					held = append(held, r)
				}
				switch trial {
				case 0: // in order
				case 1:
					slices.Reverse(held)
				default:
					rand.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
				}
				var together sync.WaitGroup
				for _, r := range held {
					if trial%2 == 0 {
						require.NoError(t, r.Cancel(ctx))
					} else {
						together.Go(func() { _ = r.Cancel(ctx) })
					}
				}
				together.Wait()
				after, err := l.State(ctx)
				require.NoError(t, err)
				require.Equal(t, before.NextFreeTicketMicros, after.NextFreeTicketMicros, "%s, trial %d", kind.name, trial)
				require.InDelta(t, before.StoredPermits, after.StoredPermits, 1e-9, "%s, trial %d", kind.name, trial)
				require.InDelta(t, before.CarryMicros, after.CarryMicros, 1e-6, "%s, trial %d", kind.name, trial)
				for _, r := range held {
					require.NoError(t, r.Cancel(ctx), "twice does nothing")
				}
			}
		}
	})
}

// Ten callers whose contexts are cancelled while they wait, likewise.
func TestTenCancelledWaiters(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		for trial := range 4 {
			l, err := tb.NewSmoothBursty(fmt.Sprint(trial), 5, tb.WithStore(open()), patient, tb.WithClock(clock))
			require.NoError(t, err)
			require.NoError(t, l.Reset(ctx))
			ok, err := l.TryAcquire(ctx, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
			var callers sync.WaitGroup
			var cancels []context.CancelFunc
			for i := range 10 {
				waiting, cancel := context.WithCancel(ctx)
				cancels = append(cancels, cancel)
				callers.Go(func() {
					if i%2 == 0 {
						_, err := l.Acquire(waiting, 1)
						require.ErrorIs(t, err, context.Canceled)
					} else {
						ok, err := l.TryAcquire(waiting, 1, time.Minute)
						require.False(t, ok)
						require.ErrorIs(t, err, context.Canceled)
					}
				})
				require.Eventually(t, func() bool { return tb.Waiting(l) == i+1 }, 20*time.Second, time.Millisecond)
			}
			rand.Shuffle(10, func(i, j int) { cancels[i], cancels[j] = cancels[j], cancels[i] })
			for _, cancel := range cancels {
				cancel()
			}
			callers.Wait()
			r, err := l.Reserve(ctx, 1)
			require.NoError(t, err)
			require.Equal(t, 200*time.Millisecond, r.Delay())
			require.NoError(t, r.Cancel(ctx))
		}
	})
}

// While time stands still, cancelling some reservations leaves the others exactly the times that they would have got
// alone, whatever the sizes and the order.
func TestCancelIsAsIfNeverCome(t *testing.T) {
	for _, kind := range limiters {
		t.Run(kind.name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				clock := clockwork.NewFakeClockAt(time.UnixMicro(1_700_000_000_000_000))
				rate := rapid.SampledFrom([]float64{5, 3, 7.7, 0.3}).Draw(t, "rate")
				open := func() *tb.RateLimiter {
					l, err := kind.open("x", rate, tb.WithClock(clock))
					require.NoError(t, err)
					require.NoError(t, l.Reset(ctx))
					clock.Advance(time.Duration(rapid.IntRange(0, 0).Draw(t, "pause")))
					return l
				}
				l, alone := open(), open()
				type held struct {
					r       *tb.Reservation
					permits int
					keep    bool
				}
				var all []*held
				for range rapid.IntRange(1, 15).Draw(t, "reservations") {
					h := &held{permits: rapid.IntRange(1, 20).Draw(t, "permits"), keep: rapid.Bool().Draw(t, "keep")}
					var err error
					h.r, err = l.Reserve(ctx, h.permits)
					require.NoError(t, err)
					all = append(all, h)
				}
				for _, i := range rapid.Permutation(indices(len(all))).Draw(t, "order") {
					h := all[i]
					if h.keep = h.keep || h.r.Delay() == 0; !h.keep { // due permits are used
						require.NoError(t, h.r.Cancel(ctx))
					}
				}
				for i, h := range all {
					if h.keep {
						want, err := alone.Reserve(ctx, h.permits)
						require.NoError(t, err)
						require.InDelta(t, want.Delay().Microseconds(), h.r.Delay().Microseconds(), 1, "reservation %d", i)
					}
				}
				a, err := l.State(ctx)
				require.NoError(t, err)
				b, err := alone.State(ctx)
				require.NoError(t, err)
				require.InDelta(t, b.NextFreeTicketMicros, a.NextFreeTicketMicros, 1)
				require.InDelta(t, b.StoredPermits, a.StoredPermits, 1e-6)
			})
		})
	}
}

func indices(n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = i
	}
	return s
}

// After a cancellation in the middle of a wait, the waiters behind it get the rest of its time, even where a bucket cannot store permits. A
// permit that was due at once and was not used serves the waiters, too.
func TestCancelMidway(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		reserve := func(l *tb.RateLimiter, n int) *tb.Reservation {
			r, err := l.Reserve(ctx, n)
			require.NoError(t, err)
			return r
		}
		l, err := tb.NewSmoothBursty("no burst", 5, tb.WithStore(open()), patient, tb.WithClock(clock), tb.WithMaxPermits(0))
		require.NoError(t, err)
		first, second, third := reserve(l, 1), reserve(l, 2), reserve(l, 1)
		clock.Advance(150 * time.Millisecond)
		require.NoError(t, first.Cancel(ctx))
		require.Equal(t, 400*time.Millisecond, second.Delay(), "two permits, since it came")
		require.Equal(t, 600*time.Millisecond, third.Delay())
		clock.Advance(250 * time.Millisecond)
		<-second.Ready()
		require.NoError(t, third.Cancel(ctx))
		require.Equal(t, 200*time.Millisecond, reserve(l, 1).Delay())

		l, err = tb.NewSmoothBursty("burst", 5, tb.WithStore(open()), patient, tb.WithClock(clock), tb.WithInitialPermits(5))
		require.NoError(t, err)
		var held []*tb.Reservation
		for range 8 {
			held = append(held, reserve(l, 1))
		}
		clock.Advance(100 * time.Millisecond)
		require.NoError(t, held[1].Cancel(ctx), "due at once, so it is used")
		require.Equal(t, 200*time.Millisecond, held[5].Delay())
		require.NoError(t, held[6].Cancel(ctx))
		require.Equal(t, 400*time.Millisecond, held[7].Delay())
		require.Equal(t, 500*time.Millisecond, reserve(l, 1).Delay())
	})
}

type due struct {
	at time.Duration
	n  float64
}

// worst is the largest excess of any window: permits in it − rate × its length.
func worst(events []due, rate float64) float64 {
	return tb.Worst(len(events), func(i int) (int64, float64) { return events[i].at.Microseconds(), events[i].n }, rate)
}

// Random reservations and cancellations by one and by three processes never break the window bound. The bound is checked on the due times
// of the permits that were not cancelled.
func TestCancelWindowBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const rate = 10.0
		clock := clockwork.NewFakeClockAt(time.UnixMicro(1_700_000_000_000_000))
		start := clock.Now()
		shared := tb.NewMemoryStore()
		size := rapid.SampledFrom([]float64{0, 1, 5, 50}).Draw(t, "bucket size")
		payment := rapid.SampledFrom([]tb.Payment{tb.PayNow, tb.PayLater}).Draw(t, "payment")
		var processes []*tb.RateLimiter
		for range rapid.SampledFrom([]int{1, 3}).Draw(t, "processes") {
			l, err := tb.NewSmoothBursty("x", rate, tb.WithStore(&process{shared}), tb.WithClock(clock),
				tb.WithMaxPermits(size), tb.WithPayment(payment))
			require.NoError(t, err)
			processes = append(processes, l)
		}
		type held struct {
			r         *tb.Reservation
			at        time.Time
			n         int
			cancelled bool
		}
		var all []*held
		biggest := rapid.SampledFrom([]int{1, 3, 20}).Draw(t, "largest")
		for range 80 {
			l := rapid.SampledFrom(processes).Draw(t, "process")
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				clock.Advance(time.Duration(rapid.IntRange(0, 400_000).Draw(t, "pause")) * time.Microsecond)
			case 1, 2:
				h := &held{n: rapid.IntRange(1, biggest).Draw(t, "permits"), at: clock.Now()}
				var err error
				h.r, err = l.TryReserve(ctx, h.n, 10*time.Second)
				require.NoError(t, err)
				if h.r.OK() {
					all = append(all, h)
				}
			case 3:
				if len(all) > 0 {
					h := all[max(0, len(all)-rapid.IntRange(1, 12).Draw(t, "which"))]
					end := h.r.Cancel
					if rapid.Bool().Draw(t, "return") {
						end = h.r.Return
					}
					require.NoError(t, end(ctx))
					h.cancelled = true
				}
			}
		}
		var events []due
		largest := 0.0
		for _, h := range all {
			if !h.cancelled {
				events = append(events, due{h.at.Add(h.r.Delay()).Sub(start), float64(h.n)})
				largest = max(largest, float64(h.n))
			}
		}
		bound := max(size, largest)
		if payment == tb.PayLater {
			bound = size + largest
		}
		require.LessOrEqual(t, worst(events, rate), bound+rate*1e-6+1e-6)
	})
}

// With three in ten waiters cancelled at random, one process still uses all of the rate: those behind move up. Between
// processes no more lapses than was cancelled.
func TestCancelKeepsTheRate(t *testing.T) {
	for _, processes := range []int{1, 3} {
		t.Run(fmt.Sprint(processes), func(t *testing.T) { cancelKeepsTheRate(t, processes) })
	}
}

func cancelKeepsTheRate(t *testing.T, processes int) {
	clock := clockwork.NewFakeClockAt(time.UnixMicro(1_700_000_000_000_000))
	start := clock.Now()
	shared, cancelled := tb.NewMemoryStore(), 0
	var fleet []*tb.RateLimiter
	for range processes {
		l, err := tb.NewSmoothBursty("x", 100, tb.WithClock(clock), tb.WithMaxPermits(1), tb.WithStore(&process{shared}))
		require.NoError(t, err)
		fleet = append(fleet, l)
	}
	type held struct {
		*tb.Reservation
		at time.Time
	}
	var queue, kept []held
	random := rand.New(rand.NewPCG(1, 2))
	for clock.Since(start) < 100*time.Second {
		for len(queue) < 50 { // full demand
			r, err := fleet[random.IntN(processes)].Reserve(ctx, 1)
			require.NoError(t, err)
			queue = append(queue, held{r, clock.Now()})
		}
		if random.IntN(10) < 3 {
			i := random.IntN(len(queue))
			require.NoError(t, queue[i].Cancel(ctx))
			queue = slices.Delete(queue, i, i+1)
			cancelled++
		}
		clock.Advance(10 * time.Millisecond)
		queue = slices.DeleteFunc(queue, func(h held) bool {
			if used := !h.at.Add(h.Delay()).After(clock.Now()); used {
				kept = append(kept, h)
				return true
			}
			return false
		})
	}
	var events []due
	for _, h := range kept {
		events = append(events, due{h.at.Add(h.Delay()).Sub(start), 1})
	}
	require.LessOrEqual(t, worst(events, 100), 1+1e-3)
	t.Logf("%d permits used in 100 s at 100/s, %d cancelled", len(kept), cancelled)
	if processes == 1 {
		require.GreaterOrEqual(t, len(kept), 9_990)
	}
	require.GreaterOrEqual(t, len(kept)+cancelled, 9_990)
}

// A million cancellations at random moments (outside of CI a tenth), by 64 callers at once, leave the bucket as if there had been no calls.
// The bucket's time lies far ahead, so a difference of a microsecond shows.
func TestMillionCancels(t *testing.T) {
	for _, rate := range []float64{1e5, 0.1} {
		l, err := tb.NewSmoothBursty("x", rate, tb.WithMaxPermits(0))
		require.NoError(t, err)
		before, err := l.State(ctx)
		require.NoError(t, err)
		began := time.Now()
		var kept, cancelled atomic.Int64
		var all sync.WaitGroup
		for range 64 {
			all.Go(func() {
				for range tb.Sized(1_000_000, 100_000) / 128 {
					n := 1 + rand.IntN(3)
					r, err := l.Reserve(ctx, n)
					if err != nil {
						t.Error(err)
						return
					}
					switch rand.IntN(8) {
					case 0:
						kept.Add(int64(n))
						continue
					case 1:
						short, cancel := context.WithCancel(ctx)
						go cancel()
						if _, err := l.Acquire(short, 1); err == nil {
							kept.Add(1)
						}
						cancelled.Add(1)
					}
					if r.Cancel(ctx) != nil {
						t.Error(err)
					}
					cancelled.Add(int64(n))
				}
			})
		}
		all.Wait()
		after, err := l.State(ctx)
		require.NoError(t, err)
		ahead := time.Duration(after.NextFreeTicketMicros-before.NextFreeTicketMicros) * time.Microsecond
		t.Logf("at %v/s: %d permits cancelled and %d kept in %v, %v ahead", rate, cancelled.Load(), kept.Load(), time.Since(began), ahead)
		if rate < 1 {
			require.InDelta(t, float64(kept.Load())/rate, ahead.Seconds(), 1e-5+time.Since(began).Seconds(), "but for what came due meanwhile")
		} else {
			require.LessOrEqual(t, ahead, time.Since(began)+time.Duration(float64(kept.Load())/rate*float64(time.Second))+time.Second)
		}
	}
}

// replyLate is a store that replies after 200 ms.
type replyLate struct{ tb.Store }

func (s replyLate) Apply(ctx context.Context, b *tb.Batch) error {
	time.Sleep(200 * time.Millisecond)
	return s.Store.Apply(ctx, b)
}

// A caller whose context ends before the reply gets the error of its context, even if its request could never be granted.
func TestContextEndsBeforeTheReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := tb.NewSmoothBursty("x", 2, tb.WithStore(replyLate{tb.NewMemoryStore()}), tb.WithMaxPermits(1))
		require.NoError(t, err)
		ending, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		_, err = l.TryReserve(ending, 3, 0)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, tb.ErrNeverGranted)
		ok, err := l.TryAcquire(ending, 3, 0)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.False(t, ok)
		time.Sleep(time.Minute) // until the reply has landed
	})
}

// Permits that were due at once go back if their call did not begin: each once, whatever was taken since, as those of a lease do.
func TestUnused(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		store := open()
		l, err := tb.NewSmoothBursty("unused", 5, tb.WithStore(store), patient, tb.WithClock(clock), tb.WithMaxPermits(5), tb.WithInitialPermits(5))
		require.NoError(t, err)
		stored := func() float64 {
			b, err := l.State(ctx)
			require.NoError(t, err)
			return b.StoredPermits
		}
		var due []*tb.Reservation
		for range 4 {
			r, err := l.TryReserve(ctx, 1, 0)
			require.NoError(t, err)
			require.True(t, r.OK())
			due = append(due, r)
		}
		require.InDelta(t, 1, stored(), 1e-9)
		require.NoError(t, due[0].Cancel(ctx))
		require.InDelta(t, 1, stored(), 1e-9, "its time has come: for Cancel it is used")
		for i, r := range []*tb.Reservation{due[1], due[3], due[3], due[2]} {
			require.NoError(t, r.Return(ctx))
			require.InDelta(t, []float64{2, 3, 3, 4}[i], stored(), 1e-9)
		}
		waits, err := l.TryReserve(ctx, 5, 1e9)
		require.NoError(t, err)
		require.True(t, waits.OK())
		require.NoError(t, waits.Return(ctx), "before it is due it is as Cancel")
		require.InDelta(t, 4, stored(), 1e-9)
		require.NoError(t, new(tb.Reservation).Return(ctx))
	})
}
