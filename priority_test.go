package tokenbucket_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	. "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestParsePriority(t *testing.T) {
	for name, want := range map[string]Priority{"": Normal, "normal": Normal, "Low": Low, "LOWEST": Lowest} {
		got, err := ParsePriority(name)
		require.NoError(t, err)
		require.Equal(t, want, got, name)
	}
	_, err := ParsePriority("high")
	require.ErrorIs(t, err, ErrInvalidConfig)
	require.ErrorContains(t, err, `priority "high": want normal, low or lowest`)

	for _, p := range []Priority{Normal, Low, Lowest} {
		text, err := p.MarshalText()
		require.NoError(t, err)
		var back Priority
		require.NoError(t, back.UnmarshalText(text))
		require.Equal(t, p, back)
	}
	_, err = Priority(3).MarshalText()
	require.ErrorIs(t, err, ErrInvalidConfig)
}

func TestWithPriority(t *testing.T) {
	l, err := NewSmoothBursty("x", 5)
	require.NoError(t, err)
	require.Equal(t, Normal, l.Priority())
	l, err = NewSmoothBursty("x", 5, WithPriority(Lowest))
	require.NoError(t, err)
	require.Equal(t, Lowest, l.Priority())

	_, err = NewSmoothBursty("x", 5, WithPriority(3))
	require.ErrorIs(t, err, ErrInvalidConfig)
	require.ErrorContains(t, err, "priority 3: want Normal, Low or Lowest")
	_, err = NewSmoothBursty("x", 5, WithPriority(Low), WithPrefetch(time.Second))
	require.ErrorIs(t, err, ErrInvalidConfig)
	require.ErrorContains(t, err, "none with priority low")
}

// The limiters of ForPriority share the bucket, and each is made once.
func TestForPriority(t *testing.T) {
	l, err := NewSmoothBursty("x", 0.1, WithMaxPermits(3), WithInitialPermits(3), WithLabel("y"))
	require.NoError(t, err)
	low := l.ForPriority(Low)
	require.Equal(t, Low, low.Priority())
	require.Same(t, low, l.ForPriority(Low))
	require.Same(t, l, l.ForPriority(Normal))
	require.Same(t, l, low.ForPriority(Normal))
	require.Same(t, low.ForPriority(Lowest), l.ForPriority(200))
	for i, each := range []*RateLimiter{l, low, l.ForPriority(Lowest), low, l} {
		granted, err := each.TryAcquire(context.Background(), 1, 0)
		require.NoError(t, err)
		require.Equal(t, i < 3, granted, "call %d", i)
	}
}

// wait returns how long an Acquire of one permit waits.
func wait(t *testing.T, l *RateLimiter) time.Duration {
	began := time.Now()
	_, err := l.Acquire(t.Context(), 1)
	require.NoError(t, err)
	return time.Since(began)
}

// debt returns how far ahead of now permits of the bucket have been granted.
func debt(t *testing.T, l *RateLimiter) time.Duration {
	b, err := l.State(t.Context())
	require.NoError(t, err)
	return max(0, time.Duration(b.NextFreeTicketMicros-time.Now().UnixMicro())*time.Microsecond)
}

// Three hundred callers of a lower priority keep a bucket busy. A caller of Normal waits for what they own already, and no longer.
func TestHigherPriorityPasses(t *testing.T) {
	for p, most := range map[Priority]time.Duration{Low: 400 * time.Millisecond, Lowest: 200 * time.Millisecond} {
		t.Run(p.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				normal, err := NewSmoothBursty("x", 20, WithMaxPermits(1))
				require.NoError(t, err)
				ctx, stop := context.WithCancel(t.Context())
				var lower sync.WaitGroup
				var served atomic.Int64
				for range 300 {
					lower.Go(func() {
						for ctx.Err() == nil {
							if _, err := normal.ForPriority(p).Acquire(ctx, 1); err == nil {
								served.Add(1)
							}
						}
					})
				}
				time.Sleep(2 * time.Second)
				const calls = 40
				for range calls {
					require.LessOrEqual(t, wait(t, normal), most)
					time.Sleep(310 * time.Millisecond)
				}
				stop()
				lower.Wait()
				require.InDelta(t, 20*time.Since(began).Seconds(), served.Load()+calls, 2) // the whole rate
			})
		})
	}
}

// On every store, twenty callers of a lower priority in one process wait, and no clock moves. A caller of Normal in another process waits for
// what they may own, 0.3 or 0.1 horizons, and for its permit. Beside callers of Normal it waits for half a horizon at least.
func TestPrioritiesOnEveryStore(t *testing.T) {
	for p, owned := range map[Priority]struct{ least, most time.Duration }{
		Normal: {500 * time.Millisecond, 1050 * time.Millisecond},
		Low:    {50 * time.Millisecond, 350 * time.Millisecond},
		Lowest: {50 * time.Millisecond, 150 * time.Millisecond},
	} {
		t.Run(p.String(), func(t *testing.T) {
			onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() Store) {
				limiter := func(p Priority) *RateLimiter {
					l, err := NewSmoothBursty("x", 20, WithMaxPermits(0), WithPriority(p), WithStore(open()), WithClock(clock), patient)
					require.NoError(t, err)
					return l
				}
				lower, normal := limiter(p), limiter(Normal)
				ctx, stop := context.WithCancel(t.Context())
				var callers sync.WaitGroup
				for range 20 {
					callers.Go(func() { _, _ = lower.Acquire(ctx, 1) })
				}
				defer callers.Wait()
				defer stop()
				require.NoError(t, redistest.Poll(time.Minute, func() error {
					b, err := normal.State(ctx)
					owns := time.Duration(b.NextFreeTicketMicros-clock.Now().UnixMicro()) * time.Microsecond
					if waiting, _ := lower.Waiting(); err != nil || waiting < 20 || owns < owned.least {
						return fmt.Errorf("%d wait and own %v: %w", waiting, owns, err)
					}
					return nil
				}))
				r, err := normal.TryReserve(ctx, 1, time.Minute)
				require.NoError(t, err)
				require.True(t, r.OK())
				require.Greater(t, r.Delay(), owned.least)
				require.LessOrEqual(t, r.Delay(), owned.most)
			})
		})
	}
}

// A timeout beyond the look-ahead of its priority lets no caller take permits from further ahead.
func TestTimeoutsKeepToThePriority(t *testing.T) {
	for p, most := range map[Priority]time.Duration{Normal: time.Second, Low: 300 * time.Millisecond, Lowest: 150 * time.Millisecond} {
		t.Run(p.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, err := NewSmoothBursty("x", 20, WithMaxPermits(1), WithPriority(p))
				require.NoError(t, err)
				var callers sync.WaitGroup
				var granted atomic.Int64
				for range 40 {
					callers.Go(func() {
						if ok, _ := l.TryAcquire(t.Context(), 1, 900*time.Millisecond); ok {
							granted.Add(1)
						}
					})
				}
				synctest.Wait()
				require.LessOrEqual(t, debt(t, l), most)
				callers.Wait()
				require.InDelta(t, 19, granted.Load(), 1) // one at once, and 18 in 0.9 s
			})
		})
	}
}

// While callers of a higher priority wait, those of a lower one that do not wait leave the stored permits to them.
func TestStoredPermitsAreLeftToTheHigherPriority(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var by []Decider
		normal, err := NewSmoothBursty("x", 10, WithMaxPermits(1), WithObserver(Observer{Decision: func(_ context.Context, d Decision) {
			if d.Priority == Low {
				by = append(by, d.By)
			}
		}}))
		require.NoError(t, err)
		low := normal.ForPriority(Low)
		var waiters sync.WaitGroup
		for range 20 {
			waiters.Go(func() { wait(t, normal) })
		}
		synctest.Wait()
		require.NoError(t, low.Reset(t.Context())) // the bucket has a permit, and the process of the waiters has not learned of it
		granted, err := low.TryAcquire(t.Context(), 1, 0)
		require.NoError(t, err)
		require.False(t, granted)
		waiters.Wait()
		time.Sleep(time.Second)
		granted, err = low.TryAcquire(t.Context(), 1, 0)
		require.NoError(t, err)
		require.True(t, granted)
		require.Equal(t, []Decider{ByPriority, ByStore}, by)
	})
}

// applied is a store of its own to the limiter, which sends batches to it.
type applied struct{ MemoryStore }

// A reservation of a lower priority takes no permits from further ahead either, and keeps to its timeout. One without a timeout asks for its
// place.
func TestReservationsKeepToThePriority(t *testing.T) {
	for name, store := range map[string]Store{"memory": NewMemoryStore(), "applied": &applied{}} {
		for p, most := range map[Priority]time.Duration{Normal: 500 * time.Millisecond, Low: 300 * time.Millisecond, Lowest: 100 * time.Millisecond} {
			t.Run(name+" "+p.String(), func(t *testing.T) {
				l, err := NewSmoothBursty(p.String(), 20, WithMaxPermits(1), WithPriority(p), WithStore(store), WithClock(clockwork.NewFakeClock()))
				require.NoError(t, err)
				granted := 0
				for range 20 {
					r, err := l.TryReserve(t.Context(), 1, 500*time.Millisecond)
					require.NoError(t, err)
					if !r.OK() {
						require.Equal(t, 50*time.Millisecond, r.RetryAfter())
						continue
					}
					granted++
					require.LessOrEqual(t, r.Delay(), most)
				}
				require.Equal(t, 1+int(most/(50*time.Millisecond)), granted)
				r, err := l.Reserve(t.Context(), 1)
				require.NoError(t, err)
				require.Equal(t, most+50*time.Millisecond, r.Delay())
			})
		}
	}
}

// A process asks for a reservation of the lowest priority 40 times a second, while another one reserves the whole rate with Normal, and a
// shorter timeout. It gets its floor.
func TestFloorOfReservations(t *testing.T) {
	clock := clockwork.NewFakeClock()
	store := &applied{}
	limiter := func(p Priority, d time.Duration) *RateLimiter {
		l, err := NewSmoothBursty("x", 20, WithMaxPermits(1), WithPriority(p), WithStore(store), WithClock(clock), WithStoreTimeout(d))
		require.NoError(t, err)
		return l
	}
	normal, lowest := limiter(Normal, time.Second), limiter(Lowest, time.Minute)
	granted := map[*RateLimiter]int{}
	for i := range 1000 {
		for range 2 {
			for _, l := range []*RateLimiter{normal, lowest} {
				if l == lowest && i < 20 {
					continue
				}
				timeout := 500 * time.Millisecond
				if l == lowest {
					timeout = 700 * time.Millisecond
				}
				r, err := l.TryReserve(t.Context(), 1, timeout)
				require.NoError(t, err)
				if r.OK() {
					granted[l]++
				}
			}
			clock.Advance(25 * time.Millisecond)
		}
	}
	require.Positive(t, granted[lowest])
	require.InDelta(t, 0.05, float64(granted[lowest])/float64(granted[normal]), 0.03)
}
