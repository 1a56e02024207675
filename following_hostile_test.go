package tokenbucket_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// hostileRules follow one limiter at a time.
type hostileRules struct {
	now   atomic.Pointer[tb.Rule]
	asked atomic.Int64
}

func (r *hostileRules) Rule() tb.Rule                                                { r.asked.Add(1); return *r.now.Load() }
func (r *hostileRules) Repair(_ context.Context, _ *tb.RateLimiter, err error) error { return err }
func (r *hostileRules) set(l *tb.RateLimiter)                                        { r.now.Store(&tb.Rule{Limiter: l}) }

func hostileBursty(t *testing.T, name string, rate float64, opts ...tb.Option) *tb.RateLimiter {
	t.Helper()
	l, err := tb.NewSmoothBursty(name, rate, opts...)
	require.NoError(t, err)
	return l
}

// within fails the test if f does not return in real time.
func within(t *testing.T, d time.Duration, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(d):
		t.Fatalf("no answer within %v", d)
	}
}

// A limit that alternates between two limiters, as by day and by night: of one bucket, or of two.
func TestHostileBackToTheFormerLimiter(t *testing.T) {
	for name, store := range map[string]tb.Store{"memory": tb.NewMemoryStore(), "other": &tb.Distant{Store: tb.NewMemoryStore()}} {
		for _, nights := range []string{"", " by night"} {
			t.Run(name+nights, func(t *testing.T) {
				day := hostileBursty(t, t.Name(), 1000, tb.WithStore(store))
				night := hostileBursty(t, t.Name()+nights, 500, tb.WithStore(store))
				rules := new(hostileRules)
				rules.set(day)
				l := tb.Following(t.Name(), rules)
				turn := func(from, to *tb.RateLimiter) { rules.set(to); from.Supersede(to, nil) }
				turn(day, night)
				turn(night, day)
				within(t, 5*time.Second, func() {
					limited, cancel := context.WithTimeout(ctx, 2*time.Second)
					defer cancel()
					for range 5 {
						if _, err := l.Acquire(limited, 1); err != nil {
							t.Errorf("%v", err)
						}
					}
				})
			})
		}
	}
}

// A group whose member alternates.
func TestHostileGroupBackToTheFormerLimiter(t *testing.T) {
	store := tb.NewMemoryStore()
	day := hostileBursty(t, t.Name()+"day", 10, tb.WithStore(store))
	night := hostileBursty(t, t.Name()+"night", 5, tb.WithStore(store))
	wide := hostileBursty(t, t.Name()+"wide", 1e6, tb.WithStore(store))
	rules := new(hostileRules)
	rules.set(day)
	g, err := tb.All(tb.Following(t.Name(), rules), wide)
	require.NoError(t, err)
	_, err = g.Acquire(ctx, 1)
	require.NoError(t, err)
	turn := func(from, to *tb.RateLimiter) { rules.set(to); from.Supersede(to, nil) }
	turn(day, night)
	turn(night, day)
	within(t, 5*time.Second, func() {
		limited, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		for range 5 {
			if _, err := g.Acquire(limited, 1); err != nil {
				t.Errorf("%v", err)
			}
		}
	})
	require.Less(t, rules.asked.Load(), int64(1000), "five calls spin")
}

// A rule may name a limiter that follows a rule itself, as Registry.Limiter returns.
func TestHostileFollowingAFollower(t *testing.T) {
	inner, outer := new(hostileRules), new(hostileRules)
	inner.set(hostileBursty(t, t.Name(), 100))
	outer.set(tb.Following("inner", inner))
	l := tb.Following("outer", outer)
	require.NotPanics(t, func() {
		_, err := l.TryAcquire(ctx, 1, time.Second)
		require.NoError(t, err)
	})
}

// Supersede of a limiter that follows, as Registry.Limiter returns.
func TestHostileSupersedeAFollower(t *testing.T) {
	inner := new(hostileRules)
	inner.set(hostileBursty(t, t.Name(), 100))
	l := tb.Following("inner", inner)
	require.NotPanics(t, func() { l.Supersede(nil, nil) })
	other := hostileBursty(t, t.Name()+"other", 100)
	require.NotPanics(t, func() { other.Supersede(l, nil) })
}

// The zero values of the arguments.
func TestHostileNil(t *testing.T) {
	require.NotPanics(t, func() {
		l := tb.Following("nothing", &hostileRules{})
		_ = l
	})
	l := hostileBursty(t, t.Name(), 100)
	require.NotPanics(t, func() { l.Supersede(nil, nil) })
	require.NotPanics(t, func() { l.Supersede(nil, nil) })
	require.NotPanics(t, func() { new(tb.Watch).Changed() })
}

// Waiting callers of a rule whose priority is raised are decided by the rule in force: they no longer yield.
func TestHostilePriorityRaised(t *testing.T) {
	for name, trip := range map[string]time.Duration{"memory": 0, "distant": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var store tb.Store = tb.NewMemoryStore()
				if trip != 0 {
					store = &tb.Distant{Store: store, Takes: trip}
				}
				low := hostileBursty(t, "r", 10, tb.WithStore(store), tb.WithPriority(tb.Low), tb.WithVersion(1))
				high := hostileBursty(t, "r", 10, tb.WithStore(store), tb.WithVersion(1))
				rules := new(hostileRules)
				rules.set(low)
				l := tb.Following("r", rules)
				within, cancel := context.WithCancel(ctx)
				var calls sync.WaitGroup
				var rival, mine atomic.Int64
				for range 40 { // want the whole rate
					calls.Go(func() {
						for {
							if _, err := high.Acquire(within, 1); err != nil {
								return
							}
							rival.Add(1)
						}
					})
				}
				time.Sleep(2 * time.Second)
				for range 40 {
					calls.Go(func() {
						if _, err := l.Acquire(within, 1); err == nil {
							mine.Add(1)
						}
					})
				}
				time.Sleep(5 * time.Second)
				t.Logf("before: rival %d, mine %d", rival.Load(), mine.Load())
				rules.set(high)
				low.Supersede(high, nil)
				before := mine.Load()
				time.Sleep(6 * time.Second)
				got := mine.Load() - before
				t.Logf("after: rival %d, mine %d", rival.Load(), mine.Load())
				cancel()
				calls.Wait()
				time.Sleep(2 * time.Second)
				require.GreaterOrEqual(t, got, int64(15), "of 40 that wait behind 40 in one queue, of 60 permits")
			})
		})
	}
}

// listRules cannot be compared.
type listRules []*tb.RateLimiter

func (r listRules) Rule() tb.Rule                                                { return tb.Rule{Limiter: r[0]} }
func (r listRules) Repair(_ context.Context, _ *tb.RateLimiter, err error) error { return err }

// Rules that cannot be compared are refused by groups.
func TestHostileRulesOfOneGroup(t *testing.T) {
	one := tb.Following("one", listRules{hostileBursty(t, "one", 1)})
	two := tb.Following("two", listRules{hostileBursty(t, "two", 1)})
	require.NotPanics(t, func() {
		_, err := tb.All(one, two)
		require.ErrorIs(t, err, tb.ErrInvalidConfig)
		require.ErrorContains(t, err, "comparable")
		_, err = tb.Any(one, two)
		require.ErrorIs(t, err, tb.ErrInvalidConfig)
	})
}

// The wait of a call that waited by several rules is the whole one, for its caller and for observers.
func TestHostileWholeWait(t *testing.T) {
	for name, other := range map[string]string{"same bucket": "", "another bucket": "other"} {
		for _, way := range []string{"alone", "All"} {
			t.Run(name+", "+way, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					store := tb.NewMemoryStore()
					var got []tb.Decision
					opts := []tb.Option{tb.WithStore(store), tb.WithInitialPermits(0), tb.WithObserver(tb.Observer{
						Decision: func(_ context.Context, d tb.Decision) { got = append(got, d) },
					})}
					first := hostileBursty(t, "a", 0.1, append(opts, tb.WithVersion(1))...)
					second := hostileBursty(t, "a"+other, 0.5, append(opts, tb.WithVersion(2))...)
					rules := new(hostileRules)
					rules.set(first)
					l := tb.Following("a", rules)
					acquire := l.Acquire
					if way == "All" {
						g, err := tb.All(l)
						require.NoError(t, err)
						acquire = g.Acquire
					}
					time.AfterFunc(3*time.Second, func() {
						rules.set(second)
						first.Supersede(second, nil)
					})
					began := time.Now()
					waited, err := acquire(ctx, 1)
					require.NoError(t, err)
					whole := time.Since(began)
					require.InDelta(t, whole, waited, float64(time.Millisecond))
					require.Len(t, got, 1)
					require.InDelta(t, whole, got[0].Wait, float64(time.Millisecond))
					require.InDelta(t, whole, got[0].Elapsed, float64(time.Millisecond))
				})
			})
		}
	}
}

// Calls that a lower rate makes too late are refused by Supersede at once.
func TestHostileSupersedeRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &tb.Distant{Store: tb.NewMemoryStore(), Takes: time.Millisecond}
		day := hostileBursty(t, t.Name(), 10, tb.WithStore(store), tb.WithVersion(1))
		night := hostileBursty(t, t.Name(), 2, tb.WithStore(store), tb.WithVersion(2))
		rules := new(hostileRules)
		rules.set(day)
		l := tb.Following(t.Name(), rules)
		var granted atomic.Int64
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				ok, err := l.TryAcquire(ctx, 1, 900*time.Millisecond)
				require.NoError(t, err)
				if ok {
					granted.Add(1)
				}
			})
		}
		time.Sleep(50 * time.Millisecond)
		rules.set(night)
		day.Supersede(night, nil)
		wg.Wait()
		require.EqualValues(t, 2, granted.Load(), "one at once, and one after half a second")
	})
}
