package registry_test

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

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
	"github.com/go-tokenbucket/tokenbucket/tokenbuckettest"
)

// bounded is a row of all three: 10/s with two permits saved up, 5 in any 2 s, 3 at once, and no wait.
func bounded(name string, change ...func(*registry.Limit)) registry.Limit {
	two := 2.0
	l := registry.Limit{Name: name, Row: "1", Rate: 10, Burst: &two, Window: 2 * time.Second, WindowLimit: 5, Concurrent: 3, Version: 1}
	for _, c := range change {
		c(&l)
	}
	return l
}

// openLocal opens a registry that counts everything in memory.
func openLocal(t testing.TB, source registry.Source, opts ...registry.Option) *registry.Registry {
	return open(t, source, tokenbucket.NewMemoryStore(), append([]registry.Option{registry.WithLocalWindows(), registry.WithLocalSemaphores()}, opts...)...)
}

// enter asks to begin a call.
func enter(t testing.TB, r *registry.Registry, name string) *gate.Admission {
	t.Helper()
	a, err := r.Enter(ctx, name)
	require.NoError(t, err)
	return a
}

// entered asks until a call is admitted: on a busy machine a refund may reach Redis a moment later.
func entered(t testing.TB, r *registry.Registry, name string) *gate.Admission {
	t.Helper()
	var a *gate.Admission
	require.NoError(t, redistest.Poll(time.Minute, func() error {
		if a = enter(t, r, name); !a.OK {
			return fmt.Errorf("refused by %s", a.By)
		}
		return nil
	}))
	return a
}

// Each of the three limits refuses in its turn, and is named in the admission. Leave gives the place back once.
func TestEnter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []string
		r := openLocal(t, registry.Static{bounded("/a")}, registry.WithBypassHook(func(name string, by gate.Decider, pass bool) {
			told = append(told, fmt.Sprint(name, " ", by, " ", pass))
		}))
		enter(t, r, "/a").Leave()
		time.Sleep(10 * time.Second) // two permits are there, and the window is empty
		first, second := enter(t, r, "/a"), enter(t, r, "/a")
		require.True(t, first.OK && second.OK)
		require.Equal(t, gate.ByLimit, first.By)
		byRate := enter(t, r, "/a")
		require.False(t, byRate.OK)
		require.Equal(t, gate.ByLimit, byRate.By)
		require.Equal(t, 100*time.Millisecond, byRate.RetryAfter)
		require.Empty(t, told, "an observer hears of these")

		time.Sleep(200 * time.Millisecond)
		third := enter(t, r, "/a")
		require.True(t, third.OK, "who was refused by the rate has given back what it had taken")
		byPlace := enter(t, r, "/a")
		require.Equal(t, gate.ByConcurrency, byPlace.By)
		require.Equal(t, time.Second, byPlace.RetryAfter)
		byPlace.Leave()
		require.Equal(t, gate.ByConcurrency, enter(t, r, "/a").By, "a refusal has nothing to leave")
		first.Leave()
		first.Leave()
		require.True(t, enter(t, r, "/a").OK)
		time.Sleep(100 * time.Millisecond) // the rate has a permit
		require.Equal(t, gate.ByConcurrency, enter(t, r, "/a").By, "who leaves twice gives back one place")
		second.Leave()
		third.Leave()

		time.Sleep(100 * time.Millisecond)
		require.True(t, enter(t, r, "/a").OK)
		byWindow := enter(t, r, "/a")
		require.Equal(t, gate.ByWindow, byWindow.By)
		require.InDelta(t, 1.6, byWindow.RetryAfter.Seconds(), 0.1, "two began 400 ms ago")
		require.Equal(t, []string{"/a concurrency false", "/a concurrency false", "/a concurrency false", "/a window false"}, told)

		time.Sleep(byWindow.RetryAfter)
		require.True(t, enter(t, r, "/a").OK, "what was refused does not count in the window")
		r.Close()
	})
}

// A call that waits for its rate holds no place meanwhile, and is refused in time if there is none at its turn: the permit goes back.
func TestEnterWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		row := bounded("/a", func(l *registry.Limit) { l.Concurrent, l.MaxWait, l.WindowLimit = 1, time.Second, 100 })
		*row.Burst = 1
		r := openLocal(t, registry.Static{row})
		first := enter(t, r, "/a")
		require.True(t, first.OK)
		first.Leave()
		var wg sync.WaitGroup
		began := time.Now()
		for range 2 { // due after 100 and 200 ms
			wg.Go(func() {
				a, err := r.Enter(ctx, "/a")
				require.NoError(t, err)
				require.True(t, a.OK)
				a.Leave()
			})
		}
		synctest.Wait()
		wg.Wait()
		require.Equal(t, 200*time.Millisecond, time.Since(began), "both wait, though there is one place")

		holder := make(chan *gate.Admission, 1)
		go func() { holder <- enter(t, r, "/a") }() // due after 100 ms
		time.Sleep(50 * time.Millisecond)
		late, err := r.Enter(ctx, "/a") // due after 200
		require.NoError(t, err)
		require.Equal(t, gate.ByConcurrency, late.By)
		require.InDelta(t, 399, time.Since(began).Seconds()*1000, 0.1, "asked as late as it can be")
		(<-holder).Leave()
		a := enter(t, r, "/a")
		require.True(t, a.OK)
		require.InDelta(t, 400, time.Since(began).Seconds()*1000, 0.1, "the permit of who was refused is the next one's")
		a.Leave()

		short, cancel := context.WithCancel(ctx)
		time.AfterFunc(10*time.Millisecond, cancel)
		_, err = r.Enter(short, "/a")
		require.ErrorIs(t, err, context.Canceled)
		a = enter(t, r, "/a")
		require.True(t, a.OK)
		require.InDelta(t, 500, time.Since(began).Seconds()*1000, 0.1, "who gives up gives its permit back")
		r.Close()
	})
}

// A call counts in its window from when it begins, though what it asked afterwards took long.
func TestCountedWhenItBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		row := bounded("/a", func(l *registry.Limit) { l.Window, l.WindowLimit = time.Second, 1 })
		store := tokenbuckettest.NewStore()
		store.FailNext(1, tokenbuckettest.Slow(500*time.Millisecond))
		r := open(t, registry.Static{row}, store, registry.WithLocalWindows(), registry.WithLocalSemaphores())
		require.True(t, enter(t, r, "/a").OK)
		time.Sleep(700 * time.Millisecond)
		second := enter(t, r, "/a")
		require.Equal(t, gate.ByWindow, second.By)
		require.False(t, second.OK)
		r.Close()
	})
}

// However long before it begins a call was counted, no window has more than its limit.
func TestWindowsOfBegins(t *testing.T) {
	for _, takes := range []time.Duration{0, 19, 21, 35, 39, 41, 60} {
		synctest.Test(t, func(t *testing.T) {
			row := bounded("/a", func(l *registry.Limit) { l.Window, l.WindowLimit = 10*time.Second, 1 })
			store := tokenbuckettest.NewStore()
			store.FailNext(1, tokenbuckettest.Slow(takes*time.Millisecond))
			r := open(t, registry.Static{row}, store, registry.WithLocalWindows(), registry.WithLocalSemaphores())
			a := enter(t, r, "/a")
			require.True(t, a.OK)
			a.Leave()
			began := time.Now()
			for !enter(t, r, "/a").OK {
				time.Sleep(time.Millisecond)
			}
			require.GreaterOrEqual(t, time.Since(began), row.Window, "the answer took %d ms", takes)
			r.Close()
		})
	}
}

// stopping is the clock of a process that is stopped, once, when it has just read it.
type stopping struct {
	clockwork.Clock
	stops atomic.Bool
}

func (s *stopping) Since(t time.Time) time.Duration {
	since := s.Clock.Since(t)
	if s.stops.Swap(false) {
		time.Sleep(500 * time.Millisecond)
	}
	return since
}

// A call counts in its window from its beginning, also if the reply was late: the process was stopped, or a reply was lost.
func TestCountedWhenItIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := &stopping{Clock: clockwork.NewRealClock()}
		row := registry.Limit{Name: "/a", NoRate: true, Window: time.Second, WindowLimit: 1}
		r := open(t, registry.Static{row}, tokenbucket.NewMemoryStore(), registry.WithLocalWindows(slidingwindow.WithClock(clock)))
		clock.stops.Store(true)
		require.True(t, enter(t, r, "/a").OK)
		began := time.Now()
		for !enter(t, r, "/a").OK {
			time.Sleep(time.Millisecond)
		}
		require.GreaterOrEqual(t, time.Since(began), row.Window)
		r.Close()
	})
}

// A row without a rate is limited by the rest alone; a rate of 0 still lets nothing pass.
func TestNoRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []string
		r := openLocal(t, registry.Static{
			{Name: "/window", Row: "1", NoRate: true, Window: time.Second, WindowLimit: 4},
			{Name: "/places", Row: "2", NoRate: true, Concurrent: 2},
			{Name: "/zero", Row: "3", Window: time.Second, WindowLimit: 4},
		}, registry.WithBypassHook(func(name string, by gate.Decider, pass bool) {
			told = append(told, fmt.Sprint(name, " ", by, " ", pass))
		}))
		for name, most := range map[string]int{"/window": 4, "/places": 2, "/zero": 0} {
			for i := range 6 {
				require.Equal(t, i < most, enter(t, r, name).OK, "%s %d", name, i)
			}
		}
		require.Contains(t, told, "/window window true")
		require.Contains(t, told, "/window window false")
		require.Contains(t, told, "/places concurrency true")
		require.Contains(t, told, "/places concurrency false")
		require.Contains(t, told, "/zero zero false")
		require.Len(t, told, 18)
		limits := r.Limits()
		require.Equal(t, "at most 2 at once", limits[0].String())
		require.Equal(t, "at most 4 in any 1 s", limits[1].String())
		require.Equal(t, "nothing passes", limits[2].String())
		r.Close()
	})
}

// Calls of names that have nothing but a bucket, or none, are answered by Enter too.
func TestEnterPlain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plain := bounded("/plain", func(l *registry.Limit) {
			l.Window, l.WindowLimit, l.Concurrent, l.MaxWait = 0, 0, 0, 100*time.Millisecond
		})
		r := openLocal(t, registry.Static{plain, {Name: "/off", Disabled: true}}, registry.WithUnknown(registry.Default(registry.Limit{Rate: 1})))
		began := time.Now()
		for range 2 {
			a := enter(t, r, "/plain")
			require.True(t, a.OK)
			require.Equal(t, gate.ByLimit, a.By)
			require.False(t, a.Holds())
			a.Leave()
		}
		require.Equal(t, 100*time.Millisecond, time.Since(began), "the second one has waited")
		short, cancel := context.WithCancel(ctx)
		time.AfterFunc(10*time.Millisecond, cancel)
		_, err := r.Enter(short, "/plain")
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, gate.ByDisabled, enter(t, r, "/off").By)
		for _, ok := range []bool{true, false} {
			a := enter(t, r, "/unknown")
			require.Equal(t, ok, a.OK)
			require.Equal(t, gate.ByLimit, a.By, "a bucket of its own")
		}
		r.Close()
	})
}

// A call that its rate refuses from local state is not counted in the window first, nor does it take a place.
func TestRefusedByTheRateFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one, counted := 1.0, 0
		row := registry.Limit{Name: "/a", Rate: 100, Burst: &one, Window: time.Hour, WindowLimit: 1000}
		r := open(t, registry.Static{row}, tokenbucket.NewMemoryStore(), registry.WithLocalWindows(slidingwindow.WithObserver(slidingwindow.Observer{
			Decision: func(context.Context, slidingwindow.Decision) { counted++ },
		})))
		defer r.Close()
		require.True(t, enter(t, r, "/a").OK)
		for range 10 {
			a := enter(t, r, "/a")
			require.False(t, a.OK)
			require.Equal(t, gate.ByLimit, a.By)
		}
		require.Equal(t, 1, counted)
	})
}

// A call whose observer panics gives back what it has taken: its place, too.
func TestPanicOfAnObserver(t *testing.T) {
	panics := true
	r := openLocal(t, registry.Static{{Name: "/a", Row: "1", Rate: 1000, MaxWait: 500 * time.Millisecond, Concurrent: 1}}, registry.WithLimiterOptions(
		tokenbucket.WithObserver(tokenbucket.Observer{Decision: func(context.Context, tokenbucket.Decision) {
			if panics {
				panic("boom")
			}
		}})))
	require.PanicsWithValue(t, "boom", func() { _, _ = r.Enter(ctx, "/a") })
	panics = false
	a := enter(t, r, "/a")
	require.True(t, a.OK, "refused by %s", a.By)
	a.Leave()
}
