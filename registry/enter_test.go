package registry_test

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
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// bounded is a row of all three: 10/s with two permits saved up, 5 in any 2 s, 3 at once, and no wait.
func bounded(name string, change ...func(*registry.Limit)) registry.Limit {
	two := 2.0
	l := registry.Limit{Name: name, Row: "1", Rate: 10, MaxPermits: &two, Window: 2 * time.Second, WindowLimit: 5, Concurrent: 3, Version: 1}
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
func enter(t testing.TB, r *registry.Registry, name string) *registry.Admission {
	t.Helper()
	a, err := r.Enter(ctx, name)
	require.NoError(t, err)
	return a
}

// entered asks until a call is admitted: on a busy machine what was given back to Redis may be there a moment later.
func entered(t testing.TB, r *registry.Registry, name string) *registry.Admission {
	t.Helper()
	var a *registry.Admission
	require.NoError(t, redistest.Poll(time.Minute, func() error {
		if a = enter(t, r, name); !a.OK {
			return fmt.Errorf("refused by %s", a.By)
		}
		return nil
	}))
	return a
}

// Each of the three refuses in its turn, and says so; Leave gives the place back, once.
func TestEnter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []string
		r := openLocal(t, registry.Static{bounded("/a")}, registry.WithBypassHook(func(name string, by registry.Decider, pass bool) {
			told = append(told, fmt.Sprint(name, " ", by, " ", pass))
		}))
		enter(t, r, "/a").Leave()
		time.Sleep(10 * time.Second) // two permits are there, and the window is empty
		first, second := enter(t, r, "/a"), enter(t, r, "/a")
		require.True(t, first.OK && second.OK)
		require.Equal(t, registry.ByLimit, first.By)
		byRate := enter(t, r, "/a")
		require.False(t, byRate.OK)
		require.Equal(t, registry.ByLimit, byRate.By)
		require.Equal(t, 100*time.Millisecond, byRate.RetryAfter)
		require.Empty(t, told, "an observer hears of these")

		time.Sleep(200 * time.Millisecond)
		third := enter(t, r, "/a")
		require.True(t, third.OK, "who was refused by the rate has given back what it had taken")
		byPlace := enter(t, r, "/a")
		require.Equal(t, registry.ByConcurrency, byPlace.By)
		require.Equal(t, time.Second, byPlace.RetryAfter)
		byPlace.Leave()
		require.Equal(t, registry.ByConcurrency, enter(t, r, "/a").By, "a refusal has nothing to leave")
		first.Leave()
		first.Leave()
		require.True(t, enter(t, r, "/a").OK)
		time.Sleep(100 * time.Millisecond) // the rate has a permit
		require.Equal(t, registry.ByConcurrency, enter(t, r, "/a").By, "who leaves twice gives back one place")
		second.Leave()
		third.Leave()

		time.Sleep(100 * time.Millisecond)
		require.True(t, enter(t, r, "/a").OK)
		byWindow := enter(t, r, "/a")
		require.Equal(t, registry.ByWindow, byWindow.By)
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
		row := bounded("/a", func(l *registry.Limit) { l.Concurrent, l.Cache, l.WindowLimit = 1, 1, 100 })
		*row.MaxPermits = 1
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

		holder := make(chan *registry.Admission, 1)
		go func() { holder <- enter(t, r, "/a") }() // due after 100 ms
		time.Sleep(50 * time.Millisecond)
		late, err := r.Enter(ctx, "/a") // due after 200
		require.NoError(t, err)
		require.Equal(t, registry.ByConcurrency, late.By)
		require.Equal(t, 380*time.Millisecond, time.Since(began))
		(<-holder).Leave()
		a := enter(t, r, "/a")
		require.True(t, a.OK)
		require.Equal(t, 400*time.Millisecond, time.Since(began), "the permit of who was refused is the next one's")
		a.Leave()

		short, cancel := context.WithCancel(ctx)
		time.AfterFunc(10*time.Millisecond, cancel)
		_, err = r.Enter(short, "/a")
		require.ErrorIs(t, err, context.Canceled)
		a = enter(t, r, "/a")
		require.True(t, a.OK)
		require.Equal(t, 500*time.Millisecond, time.Since(began), "who gives up gives its permit back")
		r.Close()
	})
}

// slow is a store whose first answer takes long.
type slow struct {
	tokenbucket.Store
	first sync.Once
	takes time.Duration
}

func (s *slow) Apply(ctx context.Context, b *tokenbucket.Batch) error {
	s.first.Do(func() { time.Sleep(s.takes) })
	return s.Store.Apply(ctx, b)
}

// A call counts in its window from when it begins, though what it asked afterwards took long.
func TestCountedWhenItBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		row := bounded("/a", func(l *registry.Limit) { l.Window, l.WindowLimit = time.Second, 1 })
		r := open(t, registry.Static{row}, &slow{Store: tokenbucket.NewMemoryStore(), takes: 500 * time.Millisecond}, registry.WithLocalWindows(), registry.WithLocalSemaphores())
		require.True(t, enter(t, r, "/a").OK)
		time.Sleep(700 * time.Millisecond)
		second := enter(t, r, "/a")
		require.Equal(t, registry.ByWindow, second.By)
		require.False(t, second.OK)
		r.Close()
	})
}

// However long before it begins a call was counted, no window has more than its limit.
func TestWindowsOfBegins(t *testing.T) {
	for _, takes := range []time.Duration{0, 19, 21, 35, 39, 41, 60} {
		synctest.Test(t, func(t *testing.T) {
			row := bounded("/a", func(l *registry.Limit) { l.Window, l.WindowLimit = 10*time.Second, 1 })
			store := &slow{Store: tokenbucket.NewMemoryStore(), takes: takes * time.Millisecond}
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

// A call counts in its window from when it begins, though it was told late that it counts: its process was stopped, or the answer was lost once.
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

// What only takes permits cannot give a place back, and says so rather than to skip it.
func TestNeedsEnter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := openLocal(t, registry.Static{bounded("/all"), bounded("/window", func(l *registry.Limit) { l.Concurrent = 0 })})
		_, err := r.Allow(ctx, "/all")
		require.ErrorIs(t, err, registry.ErrNeedsEnter)
		require.ErrorContains(t, err, `bucket "/all": its row says 5 in any 2s, 3 at once`)
		for _, name := range []string{"/all", "/window"} {
			_, err = r.Reserve(ctx, name)
			require.ErrorIs(t, err, registry.ErrNeedsEnter)
		}
		passed := 0
		for range 20 {
			ok, err := r.Allow(ctx, "/window")
			require.NoError(t, err)
			if ok {
				passed++
			}
			time.Sleep(50 * time.Millisecond)
		}
		require.Equal(t, 5, passed, "the window counts")
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
		}, registry.WithBypassHook(func(name string, by registry.Decider, pass bool) {
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
		require.Equal(t, "any rate, 2 at once", limits[0].String())
		require.Equal(t, "any rate, 4 in any 1s", limits[1].String())
		require.Equal(t, "nothing passes", limits[2].String())
		r.Close()
	})
}

// Calls of names that have nothing but a bucket, or none, are answered by Enter too.
func TestEnterPlain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plain := bounded("/plain", func(l *registry.Limit) { l.Window, l.WindowLimit, l.Concurrent, l.Cache = 0, 0, 0, 0.1 })
		r := openLocal(t, registry.Static{plain, {Name: "/off", Disabled: true}}, registry.WithUnknown(registry.Default(registry.Limit{Rate: 1})))
		began := time.Now()
		for range 2 {
			a := enter(t, r, "/plain")
			require.True(t, a.OK)
			require.Equal(t, registry.ByLimit, a.By)
			require.False(t, a.Holds())
			a.Leave()
		}
		require.Equal(t, 100*time.Millisecond, time.Since(began), "the second one has waited")
		short, cancel := context.WithCancel(ctx)
		time.AfterFunc(10*time.Millisecond, cancel)
		_, err := r.Enter(short, "/plain")
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, registry.ByDisabled, enter(t, r, "/off").By)
		for _, ok := range []bool{true, false} {
			a := enter(t, r, "/unknown")
			require.Equal(t, ok, a.OK)
			require.Equal(t, registry.ByLimit, a.By, "a bucket of its own")
		}
		r.Close()
	})
}

// Rows that name what cannot be counted are bad, and refuse their calls.
func TestBadBounds(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*registry.Limit)
		want   string
	}{
		"window":            {func(l *registry.Limit) { l.Window = -1 }, "window -1ns: want whole milliseconds"},
		"long window":       {func(l *registry.Limit) { l.Window = 91 * 24 * time.Hour }, "up to 90 days"},
		"fraction":          {func(l *registry.Limit) { l.Window = 1500 * time.Microsecond }, "window 1.5ms: want whole milliseconds"},
		"no window limit":   {func(l *registry.Limit) { l.WindowLimit = 0 }, "window limit 0: want 1 to 2147483647"},
		"no window":         {func(l *registry.Limit) { l.Window = 0 }, "window 0s: want a duration"},
		"negative limit":    {func(l *registry.Limit) { l.WindowLimit = -1 }, "window limit -1: want 1 to"},
		"places":            {func(l *registry.Limit) { l.Concurrent = -1 }, "concurrent -1: want 1 to"},
		"rate and none":     {func(l *registry.Limit) { l.NoRate = true }, "rate 10: want 0"},
		"burst of none":     {func(l *registry.Limit) { l.NoRate, l.Rate = true, 0 }, "no rate true: want neither a quota"},
		"nothing of all":    {func(l *registry.Limit) { *l = registry.Limit{Name: "/a", Row: "1", NoRate: true} }, "no rate true: want a rate, a window or"},
		"version too large": {func(l *registry.Limit) { l.Version = 1<<52 + 1 }, "2^52"},
	} {
		t.Run(name, func(t *testing.T) {
			r := openLocal(t, registry.Static{bounded("/a", c.change)}, registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
				return semaphore.NewMemory(n, opts...)
			}))
			rejected := r.Stats().Rejected
			require.Len(t, rejected, 1)
			require.ErrorContains(t, &rejected[0], c.want)
			require.False(t, enter(t, r, "/a").OK)
		})
	}
	r := open(t, registry.Static{bounded("/a"), bounded("/b", func(l *registry.Limit) { l.Window, l.WindowLimit = 0, 0 })}, tokenbucket.NewMemoryStore())
	rejected := r.Stats().Rejected
	require.Len(t, rejected, 2)
	require.ErrorContains(t, &rejected[0], "window 2s: want 0: here is nothing that counts it")
	require.ErrorContains(t, &rejected[1], "concurrent 3: want 0: here is nothing that counts it")
	for _, o := range []registry.Option{registry.WithUnknown(registry.Default(bounded(""))), registry.WithBadRows(registry.Default(bounded("")))} {
		_, err := registry.New(registry.Static{}, tokenbucket.NewMemoryStore(), registry.WithLocalWindows(), registry.WithLocalSemaphores(), o)
		require.ErrorContains(t, err, "window or concurrency 5 in any 2s, 3 at once: want none but in a row")
	}
	for _, o := range []registry.Option{registry.WithWindows(nil), registry.WithSemaphores(nil), registry.WithPlacesAway(nil)} {
		_, err := registry.New(registry.Static{}, tokenbucket.NewMemoryStore(), o)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	}
}

// Windows of every length that is allowed can be counted.
func TestWindowLengths(t *testing.T) {
	var rows registry.Static
	for i, d := range []time.Duration{
		1, 2, 7, 97, 98, 99, 100, 101, 119, 149, 1001, 1999, 2000, 2001, 86_400_000, 90 * 86_400_000, 90*86_400_000 - 1,
	} {
		rows = append(rows, registry.Limit{Name: fmt.Sprint(i), NoRate: true, Window: d * time.Millisecond, WindowLimit: 1})
	}
	r := openLocal(t, rows)
	require.Empty(t, r.Stats().Rejected)
	for _, row := range rows {
		require.True(t, enter(t, r, row.Name).OK, row.Window)

	}
}

// What is counted in this process outlives a change of the row, and its removal.
func TestBoundsFollowRow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := new(fake)
		row := func(change func(*registry.Limit)) registry.Limit {
			return bounded("/a", func(l *registry.Limit) { l.NoRate, l.Rate, l.MaxPermits = true, 0, nil }, change)
		}
		source.set(row(func(*registry.Limit) {}))
		r := openLocal(t, source, registry.WithAllowEmpty())
		inside := []*registry.Admission{enter(t, r, "/a"), enter(t, r, "/a")}
		for _, step := range []struct {
			title  string
			change func(*registry.Limit)
			by     registry.Decider
		}{
			{"fewer places", func(l *registry.Limit) { l.Concurrent = 2 }, registry.ByConcurrency},
			{"more places, window full", func(l *registry.Limit) { l.Concurrent, l.WindowLimit = 9, 2 }, registry.ByWindow},
			{"off and on again", func(l *registry.Limit) { l.Disabled = true }, registry.ByDisabled},
			{"the same", func(l *registry.Limit) { l.Concurrent = 2 }, registry.ByConcurrency},
		} {
			source.set(row(step.change))
			require.NoError(t, r.Reload(ctx))
			a := enter(t, r, "/a")
			require.Equal(t, step.by, a.By, step.title)
			require.Equal(t, step.by == registry.ByDisabled, a.OK, step.title)
			time.Sleep(time.Millisecond)
		}
		source.set()
		require.NoError(t, r.Reload(ctx))
		require.Equal(t, registry.ByUnknown, enter(t, r, "/a").By)
		source.set(row(func(l *registry.Limit) { l.Concurrent = 2 }))
		require.NoError(t, r.Reload(ctx))
		require.Equal(t, registry.ByConcurrency, enter(t, r, "/a").By, "back again")
		for _, a := range inside {
			a.Leave()
		}
		require.True(t, enter(t, r, "/a").OK)
		r.Close()
	})
}

// While the backend of the semaphores is away calls fail, or this process lets in its share.
func TestPlacesAway(t *testing.T) {
	nobody := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	t.Cleanup(func() { _ = nobody.Close() })
	away := registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
		return semaphore.NewRedis(nobody, name, n, opts...)
	})
	row := registry.Static{{Name: "/a", NoRate: true, Concurrent: 4}}
	r := open(t, row, tokenbucket.NewMemoryStore(), away)
	for range 2 { // the second one does not ask
		_, err := r.Enter(ctx, "/a")
		require.ErrorContains(t, err, `registry: bucket "/a": concurrency: `)
		require.ErrorContains(t, err, "connection refused")
	}
	r = open(t, row, tokenbucket.NewMemoryStore(), away, registry.WithPlacesAway(func(n int) int { return n / 2 }))
	first := enter(t, r, "/a")
	require.True(t, first.OK)
	require.True(t, enter(t, r, "/a").OK)
	require.Equal(t, registry.ByConcurrency, enter(t, r, "/a").By)
	first.Leave()
	require.True(t, enter(t, r, "/a").OK)
}

// Two processes share the window and the places of a row in Redis, and the newest row's bounds are in force in both.
func TestBoundsOfFleet(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	shared := []registry.Option{
		registry.WithWindows(func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
			return slidingwindow.New(name, limit, window, resolution, append(opts, slidingwindow.WithRedis(client))...)
		}),
		registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
			return semaphore.NewRedis(client, name, n, opts...)
		}),
	}
	name := fmt.Sprint("/fleet/", rand.Uint64())
	row := registry.Limit{Name: name, Row: "1", NoRate: true, Window: time.Hour, WindowLimit: 6, Concurrent: 3, Version: 5}
	behind := new(fake)
	behind.set(row)
	a := open(t, registry.Static{row}, tokenbucket.NewMemoryStore(), shared...)
	b := open(t, behind, tokenbucket.NewMemoryStore(), shared...)
	inside := []*registry.Admission{entered(t, a, name), entered(t, b, name), entered(t, a, name)}
	require.Equal(t, registry.ByConcurrency, enter(t, a, name).By)
	require.Equal(t, registry.ByConcurrency, enter(t, b, name).By)
	inside[1].Leave()
	entered(t, a, name).Leave()

	row.WindowLimit, row.Concurrent, row.Version = 5, 4, 6
	c := open(t, registry.Static{row}, tokenbucket.NewMemoryStore(), shared...) // a process that has read a newer row
	entered(t, c, name)
	require.Equal(t, registry.ByWindow, enter(t, b, name).By, "five have begun, and five is in force for all")
	require.Equal(t, registry.ByWindow, enter(t, c, name).By)
	behind.set(row)
	require.NoError(t, b.Reload(ctx))
	require.Equal(t, registry.ByWindow, enter(t, b, name).By)
}

// What somebody else has set in Redis gives way to the row after two loads; Usage tells what is in force, and in use.
func TestRowWins(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	name := fmt.Sprint("/wins/", rand.Uint64())
	var window *slidingwindow.Limiter
	var places *semaphore.Semaphore
	row := registry.Limit{Name: name, Row: "1", NoRate: true, Window: time.Hour, WindowLimit: 6, Concurrent: 3, Version: 5}
	r := open(t, registry.Static{row, bounded("/plain", func(l *registry.Limit) { l.Window, l.WindowLimit, l.Concurrent = 0, 0, 0 })}, tokenbucket.NewMemoryStore(),
		registry.WithWindows(func(name string, limit int, length, resolution time.Duration, opts ...slidingwindow.Option) (l *slidingwindow.Limiter, err error) {
			l, err = slidingwindow.New(name, limit, length, resolution, append(opts, slidingwindow.WithRedis(client))...)
			window = l
			return l, err
		}),
		registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (s *semaphore.Semaphore, err error) {
			places, err = semaphore.NewRedis(client, name, n, opts...)
			return places, err
		}))
	_, ok, err := r.Usage(ctx, name)
	require.NoError(t, err)
	require.False(t, ok, "nobody has asked for it yet")
	entered(t, r, name)
	require.NoError(t, window.SetLimit(ctx, 60))
	require.NoError(t, places.SetPermits(ctx, 30))
	usage := func() registry.Usage {
		u, ok, err := r.Usage(ctx, name)
		require.NoError(t, err)
		require.True(t, ok)
		return u
	}
	require.Equal(t, registry.Usage{Window: time.Hour, WindowUsed: 1, WindowLimit: 60, Inside: 1, Places: 1, Concurrent: 30}, usage())
	require.NoError(t, r.Reload(ctx))
	require.Equal(t, 60, usage().WindowLimit)
	require.NoError(t, r.Reload(ctx))
	require.Equal(t, registry.Usage{Window: time.Hour, WindowUsed: 1, WindowLimit: 6, Inside: 1, Places: 1, Concurrent: 3}, usage())
	_, ok, err = r.Usage(ctx, "/plain")
	require.NoError(t, err)
	require.False(t, ok)
}

// began is a call that was let pass.
type began struct{ at, until time.Time }

// arrivals has calls come at random, and returns those that passed, and when which one was refused by what.
func arrivals(t *testing.T, r *registry.Registry, random *rand.Rand, gaveUp bool) (passed []began, refused map[registry.Decider][]time.Time) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	refused = map[registry.Decider][]time.Time{}
	for range 300 {
		comes := time.Duration(random.Float64() * float64(6*time.Second))
		lasts := time.Duration(random.ExpFloat64() * float64(150*time.Millisecond))
		ctx, cancel := context.WithCancel(ctx)
		var stays time.Duration
		if gaveUp && random.IntN(3) == 0 {
			stays = time.Duration(random.ExpFloat64() * float64(50*time.Millisecond))
		}
		wg.Go(func() {
			defer cancel()
			time.Sleep(comes)
			if stays > 0 {
				time.AfterFunc(stays, cancel)
			}
			a, err := r.Enter(ctx, "/a")
			at := time.Now()
			if err != nil {
				require.ErrorIs(t, err, context.Canceled)
				return
			}
			if a.OK {
				time.Sleep(lasts)
				a.Leave()
			}
			mu.Lock()
			defer mu.Unlock()
			if a.OK {
				passed = append(passed, began{at, time.Now()})
			} else {
				refused[a.By] = append(refused[a.By], at)
			}
		})
	}
	wg.Wait()
	slices.SortFunc(passed, func(a, b began) int { return a.at.Compare(b.at) })
	return passed, refused
}

// Whatever comes when, none of the three bounds is exceeded; and none refuses that is not reached, since what a call has taken goes back
// if it is refused by another.
func TestBoundsHold(t *testing.T) {
	all := map[registry.Decider]int{}
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			size := float64(1 + random.IntN(6))
			row := registry.Limit{
				Name: "/a", Rate: float64(5 + random.IntN(60)), MaxPermits: &size, Cache: float64(random.IntN(4)) / 10, Version: 1,
				Window: time.Duration(200+random.IntN(2000)) * time.Millisecond, WindowLimit: 3 + random.IntN(30), Concurrent: 1 + random.IntN(6),
			}
			gaveUp := seed%2 == 1
			r := openLocal(t, registry.Static{row})
			passed, refused := arrivals(t, r, random, gaveUp)
			for by, at := range refused {
				all[by] += len(at)
			}
			note := fmt.Sprintf("seed %d: %s", seed, row.String())
			checkBounds(t, &row, passed, note)
			if !gaveUp {
				checkRefusals(t, &row, passed, refused, note)
			}
			time.Sleep(2*row.Window + 2*time.Second)
			least := min(int(size), row.WindowLimit, row.Concurrent)
			for range least {
				require.True(t, enter(t, r, "/a").OK, "nothing is left behind: %s", note)
			}
			r.Close()
		})
	}
	for _, by := range []registry.Decider{registry.ByLimit, registry.ByWindow, registry.ByConcurrency} {
		require.Greater(t, all[by], 500, "each of them was put to the test: %s", by)
	}
}

func checkBounds(t *testing.T, row *registry.Limit, passed []began, note string) {
	t.Helper()
	for i, p := range passed {
		inside := 0
		for j := range i + 1 {
			q := passed[i-j]
			n, ago := float64(j+1), p.at.Sub(q.at)
			require.LessOrEqual(t, n, *row.MaxPermits+row.Rate*(ago+2*time.Microsecond).Seconds(), "%d in %v: %s", j+1, ago, note)
			if ago < row.Window {
				require.LessOrEqual(t, j+1, row.WindowLimit, "in %v: %s", ago, note)
			}
			if q.until.After(p.at) {
				inside++
			}
		}
		require.LessOrEqual(t, inside, row.Concurrent, note)
	}
}

// checkRefusals tells whether windows and places refused only when they were full. A call may have been counted 20 ms before it began, and
// counts for up to a hundredth of the window longer than it must.
func checkRefusals(t *testing.T, row *registry.Limit, passed []began, refused map[registry.Decider][]time.Time, note string) {
	t.Helper()
	const lead = 20 * time.Millisecond
	for _, at := range refused[registry.ByWindow] {
		n := 0
		for _, p := range passed {
			if ago := at.Sub(p.at); ago >= -lead && ago <= row.Window*102/100+2*lead {
				n++
			}
		}
		require.GreaterOrEqual(t, n, row.WindowLimit, "refused by the window: %s", note)
	}
	for _, at := range refused[registry.ByConcurrency] {
		n := 0
		for _, p := range passed {
			if at.Sub(p.at) >= -lead && !p.until.Before(at) {
				n++
			}
		}
		require.GreaterOrEqual(t, n, row.Concurrent, "refused by the concurrency: %s", note)
	}
}

// A row that changes while Redis is away has no further share of a window that it has not changed.
func TestShareOutlivesChange(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	t.Cleanup(func() { _ = client.Close() })
	source := new(fake)
	row := registry.Limit{Name: "/a", NoRate: true, Window: time.Hour, WindowLimit: 10, Version: 1}
	source.set(row)
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores(),
		registry.WithWindows(func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
			return slidingwindow.New(name, limit, window, resolution, append(opts, slidingwindow.WithRedis(client), slidingwindow.WithShare(2),
				slidingwindow.WithHook(func(error) {}))...)
		}))
	require.True(t, enter(t, r, "/a").OK)
	require.True(t, enter(t, r, "/a").OK)
	require.False(t, enter(t, r, "/a").OK)
	row.Concurrent, row.Version = 5, 2
	source.set(row)
	require.NoError(t, r.Reload(ctx))
	a := enter(t, r, "/a")
	require.False(t, a.OK)
	require.Equal(t, registry.ByWindow, a.By)
}

// A limit that was another meanwhile is in force again with the first call, also in a process that was not asked then.
func TestWindowChangedAndBack(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	source := new(fake)
	row := registry.Limit{Name: fmt.Sprint("/back/", rand.Uint64()), NoRate: true, Window: time.Hour, WindowLimit: 2, Version: 1}
	process := func() *registry.Registry {
		return open(t, source, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores(), registry.WithInterval(time.Hour),
			registry.WithWindows(func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
				return slidingwindow.New(name, limit, window, resolution, append(opts, slidingwindow.WithRedis(client))...)
			}))
	}
	source.set(row)
	seldom, often := process(), process()
	require.True(t, enter(t, seldom, row.Name).OK)
	for _, limit := range []int{10, 2} {
		row.WindowLimit = limit
		row.Version++
		source.set(row)
		require.NoError(t, seldom.Reload(ctx))
		if limit == 10 {
			require.NoError(t, often.Reload(ctx))
			require.True(t, enter(t, often, row.Name).OK)
		}
	}
	require.False(t, enter(t, seldom, row.Name).OK)
}

// An error of the backend is the call's, whatever it says, if the row has no rate.
func TestFaultyBackend(t *testing.T) {
	made := 0
	r := open(t, registry.Static{{Name: "/a", NoRate: true, Concurrent: 1}}, tokenbucket.NewMemoryStore(),
		registry.WithSemaphores(func(_ string, most int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
			if made++; made > 1 {
				return nil, fmt.Errorf("no semaphore: %w", tokenbucket.ErrInvalidConfig)
			}
			return semaphore.NewMemory(most, opts...)
		}))
	_, err := r.Enter(ctx, "/a")
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
}
