package registry_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// Rows that name what cannot be counted are bad, and refuse their calls.
func TestBadBounds(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*registry.Limit)
		want   string
	}{
		"window":            {func(l *registry.Limit) { l.Window = -1 }, "window -1ns: want seconds to the millisecond"},
		"long window":       {func(l *registry.Limit) { l.Window = 36501 * 24 * time.Hour }, "window 876024h0m0s: want seconds to the millisecond, 0.001 to 3153600000 (36,500 d), or a duration such as 24h"},
		"fraction":          {func(l *registry.Limit) { l.Window = 1500 * time.Microsecond }, "window 1.5ms: want seconds to the millisecond"},
		"no window limit":   {func(l *registry.Limit) { l.WindowLimit = 0 }, "window_limit 0: want 1 to 2147483647"},
		"no window":         {func(l *registry.Limit) { l.Window = 0 }, "window 0s: want a length"},
		"negative limit":    {func(l *registry.Limit) { l.WindowLimit = -1 }, "window_limit -1: want a whole number of calls, 1 to"},
		"places":            {func(l *registry.Limit) { l.Concurrent = -1 }, "concurrent -1: want a whole number of calls, 1 to"},
		"rate and none":     {func(l *registry.Limit) { l.NoRate = true }, "rate 10: want 0"},
		"burst of none":     {func(l *registry.Limit) { l.NoRate, l.Rate = true, 0 }, "burst 2: want no value: the row has no rate"},
		"nothing of all":    {func(l *registry.Limit) { *l = registry.Limit{Name: "/a", Row: "1", NoRate: true} }, "rate none: want a rate, a window or"},
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
	require.ErrorContains(t, &rejected[0], "window 2s: want no value: the registry counts none (WithWindows, WithSemaphores)")
	require.ErrorContains(t, &rejected[1], "concurrent 3: want no value: the registry counts none (WithWindows, WithSemaphores)")
	for _, o := range []registry.Option{registry.WithUnknown(registry.Default(bounded(""))), registry.WithBadRows(registry.Default(bounded("")))} {
		_, err := registry.New(registry.Static{}, tokenbucket.NewMemoryStore(), registry.WithLocalWindows(), registry.WithLocalSemaphores(), o)
		require.ErrorContains(t, err, "window or concurrency at most 5 in any 2 s, at most 3 at once: want none but in a row")
	}
	for _, o := range []registry.Option{registry.WithWindows(nil), registry.WithSemaphores(nil), registry.WithSemaphoreFailurePolicy(tokenbucket.LocalShare(0))} {
		_, err := registry.New(registry.Static{}, tokenbucket.NewMemoryStore(), o)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	}
}

// Windows of every length that is allowed can be counted.
func TestWindowLengths(t *testing.T) {
	var rows registry.Static
	for i, d := range []time.Duration{
		1, 2, 7, 97, 98, 99, 100, 101, 119, 149, 1001, 1999, 2000, 2001, 86_400_000, 90 * 86_400_000, 90*86_400_000 - 1, 36500 * 86_400_000, 36500*86_400_000 - 1,
	} {
		rows = append(rows, registry.Limit{Name: fmt.Sprint(i), NoRate: true, Window: d * time.Millisecond, WindowLimit: 1})
	}
	r := openLocal(t, rows)
	require.Empty(t, r.Stats().Rejected)
	for _, row := range rows {
		require.True(t, enter(t, r, row.Name).OK, row.Window)

	}
}

// Local counts outlive a change of the row, and its removal.
func TestBoundsFollowRow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := new(fake)
		row := func(change func(*registry.Limit)) registry.Limit {
			return bounded("/a", func(l *registry.Limit) { l.NoRate, l.Rate, l.Burst = true, 0, nil }, change)
		}
		source.set(row(func(*registry.Limit) {}))
		r := openLocal(t, source, registry.WithAllowEmpty())
		inside := []*gate.Admission{enter(t, r, "/a"), enter(t, r, "/a")}
		for _, step := range []struct {
			title  string
			change func(*registry.Limit)
			by     gate.Decider
		}{
			{"fewer places", func(l *registry.Limit) { l.Concurrent = 2 }, gate.ByConcurrency},
			{"more places, window full", func(l *registry.Limit) { l.Concurrent, l.WindowLimit = 9, 2 }, gate.ByWindow},
			{"off and on again", func(l *registry.Limit) { l.Disabled = true }, gate.ByDisabled},
			{"the same", func(l *registry.Limit) { l.Concurrent = 2 }, gate.ByConcurrency},
		} {
			source.set(row(step.change))
			require.NoError(t, r.Reload(ctx))
			a := enter(t, r, "/a")
			require.Equal(t, step.by, a.By, step.title)
			require.Equal(t, step.by == gate.ByDisabled, a.OK, step.title)
			time.Sleep(time.Millisecond)
		}
		source.set()
		require.NoError(t, r.Reload(ctx))
		require.Equal(t, gate.ByUnknown, enter(t, r, "/a").By)
		source.set(row(func(l *registry.Limit) { l.Concurrent = 2 }))
		require.NoError(t, r.Reload(ctx))
		require.Equal(t, gate.ByConcurrency, enter(t, r, "/a").By, "back again")
		for _, a := range inside {
			a.Leave()
		}
		require.True(t, enter(t, r, "/a").OK)
		r.Close()
	})
}

// While the backend of the semaphores is away calls fail, or this process lets in its share.
func TestSemaphoreFailurePolicy(t *testing.T) {
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
	r = open(t, row, tokenbucket.NewMemoryStore(), away, registry.WithSemaphoreFailurePolicy(tokenbucket.LocalShare(2)))
	first := enter(t, r, "/a")
	require.True(t, first.OK)
	require.True(t, enter(t, r, "/a").OK)
	require.Equal(t, gate.ByConcurrency, enter(t, r, "/a").By)
	first.Leave()
	require.True(t, enter(t, r, "/a").OK)
	for policy, admitted := range map[tokenbucket.FailurePolicy]int{tokenbucket.FailOpen: 4, tokenbucket.LocalShare(5): 1} {
		r = open(t, row, tokenbucket.NewMemoryStore(), away, registry.WithSemaphoreFailurePolicy(policy))
		for i := range 6 {
			require.Equal(t, i < admitted, enter(t, r, "/a").OK)
		}
	}
}

// Two processes share the window and the places of a row in Redis, and the newest row's bounds are in force in both.
func TestBoundsOfFleet(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	shared := []registry.Option{
		registry.WithWindows(func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
			return slidingwindow.New(name, limit, window, resolution, append(opts, slidingwindow.WithRedis(client), slidingwindow.WithStoreTimeout(20*time.Second))...)
		}),
		registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
			return semaphore.NewRedis(client, name, n, append(opts, semaphore.WithStoreTimeout(20*time.Second))...)
		}),
	}
	name := fmt.Sprint("/fleet/", rand.Uint64())
	row := registry.Limit{Name: name, Row: "1", NoRate: true, Window: time.Hour, WindowLimit: 6, Concurrent: 3, Version: 5}
	behind := new(fake)
	behind.set(row)
	a := open(t, registry.Static{row}, tokenbucket.NewMemoryStore(), shared...)
	b := open(t, behind, tokenbucket.NewMemoryStore(), shared...)
	inside := []*gate.Admission{entered(t, a, name), entered(t, b, name), entered(t, a, name)}
	require.Equal(t, gate.ByConcurrency, enter(t, a, name).By)
	require.Equal(t, gate.ByConcurrency, enter(t, b, name).By)
	inside[1].Leave()
	entered(t, a, name).Leave()

	row.WindowLimit, row.Concurrent, row.Version = 5, 4, 6
	c := open(t, registry.Static{row}, tokenbucket.NewMemoryStore(), shared...) // a process that has read a newer row
	entered(t, c, name)
	require.Equal(t, gate.ByWindow, enter(t, b, name).By, "five have begun, and five is in force for all")
	require.Equal(t, gate.ByWindow, enter(t, c, name).By)
	behind.set(row)
	require.NoError(t, b.Reload(ctx))
	require.Equal(t, gate.ByWindow, enter(t, b, name).By)
}

// A limit that another program sets in Redis is replaced by the row's with the first call after two loads. Usage has the limits in force and their use.
func TestRowWins(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	name := fmt.Sprint("/wins/", rand.Uint64())
	var window *slidingwindow.Limiter
	var places *semaphore.Semaphore
	log := new(logged)
	row := registry.Limit{Name: name, Row: "1", NoRate: true, Window: time.Hour, WindowLimit: 6, Concurrent: 3, Version: 5}
	r := open(t, registry.Static{row, bounded("/plain", func(l *registry.Limit) { l.Window, l.WindowLimit, l.Concurrent = 0, 0, 0 })}, tokenbucket.NewMemoryStore(), log.option(),
		registry.WithWindows(func(name string, limit int, length, resolution time.Duration, opts ...slidingwindow.Option) (l *slidingwindow.Limiter, err error) {
			l, err = slidingwindow.New(name, limit, length, resolution, append(opts, slidingwindow.WithRedis(client), slidingwindow.WithStoreTimeout(20*time.Second))...)
			window = l
			return l, err
		}),
		registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (s *semaphore.Semaphore, err error) {
			places, err = semaphore.NewRedis(client, name, n, append(opts, semaphore.WithStoreTimeout(20*time.Second))...)
			return places, err
		}))
	_, ok, err := r.Usage(ctx, name)
	require.NoError(t, err)
	require.False(t, ok, "no call has asked for it yet")
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
	entered(t, r, name)
	require.Equal(t, registry.Usage{Window: time.Hour, WindowUsed: 2, WindowLimit: 6, Inside: 2, Places: 2, Concurrent: 3}, usage())
	require.Contains(t, log.String(), "registry: the bucket has differed from its row for two loads; the row is put in force again")
	_, ok, err = r.Usage(ctx, "/plain")
	require.NoError(t, err)
	require.False(t, ok)
}

// A row that changes during an outage of Redis gets no further share of its window: the count continues under the new limit.
func TestShareOutlivesChange(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	t.Cleanup(func() { _ = client.Close() })
	source := new(fake)
	row := registry.Limit{Name: "/a", NoRate: true, Window: time.Hour, WindowLimit: 10, Version: 1}
	source.set(row)
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores(),
		registry.WithWindows(func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
			return slidingwindow.New(name, limit, window, resolution, append(opts, slidingwindow.WithRedis(client), slidingwindow.WithFailurePolicy(slidingwindow.LocalShare(limit/5)))...)
		}))
	require.True(t, enter(t, r, "/a").OK)
	require.True(t, enter(t, r, "/a").OK)
	require.False(t, enter(t, r, "/a").OK)
	row.Concurrent, row.Version = 5, 2
	source.set(row)
	require.NoError(t, r.Reload(ctx))
	a := enter(t, r, "/a")
	require.False(t, a.OK)
	require.Equal(t, gate.ByWindow, a.By)
	for i, limit := range []int{15, 5} {
		row.WindowLimit, row.Version = limit, int64(3+i)
		source.set(row)
		require.NoError(t, r.Reload(ctx))
		require.Equal(t, limit == 15, enter(t, r, "/a").OK, "a share of 3, of 1: %d", limit)
		require.False(t, enter(t, r, "/a").OK)
	}
}

// A limit that was another meanwhile is in force again with the first call, also in a process that was not asked then.
func TestWindowChangedAndBack(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	source := new(fake)
	row := registry.Limit{Name: fmt.Sprint("/back/", rand.Uint64()), NoRate: true, Window: time.Hour, WindowLimit: 2, Version: 1}
	process := func() *registry.Registry {
		return open(t, source, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores(), registry.WithInterval(time.Hour),
			registry.WithWindows(func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
				return slidingwindow.New(name, limit, window, resolution, append(opts, slidingwindow.WithRedis(client), slidingwindow.WithStoreTimeout(20*time.Second))...)
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

// If the row has no rate, the call returns any error of the backend.
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

// A process that reads a replica that lags behind does not set the fleet's window and concurrency to those of its earlier row, also if both rows have the same
// rate, or none.
func TestLaggingProcessBounds(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	for what, rate := range map[string]float64{"no rate": 0, "the same rate": 1000} {
		t.Run(what, func(t *testing.T) {
			name := fmt.Sprint("/lags/", rand.Uint64())
			start := func(most int, version int64) *registry.Registry {
				row := registry.Limit{Name: name, Row: "1", Rate: rate, NoRate: rate == 0, MaxWait: time.Second, Window: time.Hour, WindowLimit: 10 * most, Concurrent: most, Version: version}
				return open(t, registry.Static{row}, tokenbucket.NewRedisScriptStore(client), registry.WithInterval(time.Hour),
					registry.WithWindows(func(name string, limit int, length, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
						return slidingwindow.New(name, limit, length, resolution, append(opts, slidingwindow.WithRedis(client), slidingwindow.WithStoreTimeout(20*time.Second))...)
					}),
					registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
						return semaphore.NewRedis(client, name, n, append(opts, semaphore.WithStoreTimeout(20*time.Second))...)
					}))
			}
			now := time.Now().UnixMicro()
			newer, older := start(2, now), start(100, now-10_000_000)
			for range 4 {
				enter(t, newer, name).Leave()
				enter(t, older, name).Leave()
				require.NoError(t, older.Reload(ctx))
			}
			require.Equal(t, []string{name}, older.Stats().Outdated)
			enter(t, older, name).Leave()
			u, _, err := newer.Usage(ctx, name)
			require.NoError(t, err)
			require.Equal(t, []int{20, 2}, []int{u.WindowLimit, u.Concurrent})
		})
	}
}

// A row that is accepted has a version that its semaphore accepts, too, whether it counts changes or is a time.
func TestVersionsOfSemaphores(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	for _, version := range []int64{1<<42 - 1, 1<<43 - 1, 1 << 52} {
		r := open(t, registry.Static{{Name: fmt.Sprint("/version/", version), Row: "1", NoRate: true, Concurrent: 3, Version: version}}, tokenbucket.NewMemoryStore(),
			registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
				return semaphore.NewRedis(client, fmt.Sprint(name, rand.Uint64()), n, append(opts, semaphore.WithStoreTimeout(20*time.Second))...)
			}))
		require.Empty(t, r.Stats().Rejected)
		require.True(t, enter(t, r, fmt.Sprint("/version/", version)).OK)
	}
}
