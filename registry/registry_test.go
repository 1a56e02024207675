package registry_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler)) // what limiters and stores log; registries have loggers of their own
	redistest.Main(m)
}

var ctx = context.Background()

// fake is a source that a test changes.
type fake struct {
	mu    sync.Mutex
	table registry.Table
	err   error
	loads int
	at    []time.Time
	block chan struct{} // not nil: Load hangs until it is closed, or its context ends
}

func (f *fake) Load(ctx context.Context) (registry.Table, error) {
	f.mu.Lock()
	block := f.block
	f.loads++
	f.at = append(f.at, time.Now())
	f.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			return registry.Table{}, ctx.Err()
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.table, f.err
}

func (f *fake) set(limits ...registry.Limit) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.table, f.err = registry.Table{Limits: limits}, nil
}

func (f *fake) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

// row is a limit as a table has it.
func row(name string, rate float64, version int64) registry.Limit {
	return registry.Limit{Name: name, Row: "row of " + name, Rate: rate, MaxWait: 500 * time.Millisecond, Version: version}
}

func with(l registry.Limit, change func(*registry.Limit)) registry.Limit {
	change(&l)
	return l
}

func open(t testing.TB, source registry.Source, store tokenbucket.Store, opts ...registry.Option) *registry.Registry {
	t.Helper()
	quiet := registry.WithLogger(slog.New(slog.DiscardHandler))
	r, err := registry.New(source, store, append([]registry.Option{quiet}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(r.Close)
	return r
}

// pass counts how many of n calls in the same instant pass at once: the permits that are there.
func pass(t testing.TB, r *registry.Registry, name string, n int) (passed int) {
	t.Helper()
	for range n {
		l, err := r.Limiter(name)
		require.NoError(t, err)
		permit, err := l.TryReserve(ctx, 1, 500*time.Millisecond)
		if errors.As(err, new(*registry.RefusedError)) { // Enter refuses, too, or enters the row without a rate
			if ok, err := allow(ctx, r, name); ok {
				require.NoError(t, err)
				passed++
			}
			continue
		}
		if errors.Is(err, tokenbucket.ErrInvalidConfig) { // of another kind: a call replaces it
			ok, err := allow(ctx, r, name)
			require.NoError(t, err)
			if ok {
				passed++
			}
			continue
		}
		require.NoError(t, err)
		if permit.OK() && permit.Delay() == 0 {
			passed++
		} else {
			require.NoError(t, permit.Cancel(ctx))
		}
	}
	return passed
}

// allow has a call begin and end at once, and reports whether it was let through.
func allow(ctx context.Context, r *registry.Registry, name string) (bool, error) {
	a, err := r.Enter(ctx, name)
	if err != nil {
		return false, err
	}
	a.Leave()
	return a.OK, nil
}

// A call waits for its permit at most the row's max_wait, and is refused if that is not enough.
func TestAllow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := open(t, registry.Static{row("/a", 5, 1), with(row("/patient", 5, 1), func(l *registry.Limit) { l.MaxWait = 2 * time.Second })}, tokenbucket.NewMemoryStore())
		for name, waits := range map[string]int{"/a": 2, "/patient": 10} {
			ok, err := allow(ctx, r, name)
			require.NoError(t, err)
			require.True(t, ok, "the first permit is there")
			began := time.Now()
			var passed, refused atomic.Int64
			var wg sync.WaitGroup
			for range 20 {
				wg.Go(func() {
					if ok, err := allow(ctx, r, name); ok && err == nil {
						passed.Add(1)
					} else if err == nil {
						refused.Add(1)
					}
				})
			}
			wg.Wait()
			require.Equal(t, int64(waits), passed.Load())
			require.Equal(t, int64(20-waits), refused.Load())
			require.Equal(t, time.Duration(waits)*200*time.Millisecond, time.Since(began))
		}
		r.Close()
	})
}

// A limit with only a name and a rate limits.
func TestZeroValueLimits(t *testing.T) {
	r := open(t, registry.Static{{Name: "/a", Rate: 1}}, tokenbucket.NewMemoryStore())
	require.Equal(t, 1, pass(t, r, "/a", 9))
}

// Try of a row's limiter waits as long as Allow does, and follows the row.
func TestTryWaitsAsTheRowSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &fake{}
		set := func(d time.Duration) {
			source.set(with(row("/a", 5, 1), func(l *registry.Limit) { l.MaxWait = d }))
		}
		set(300 * time.Millisecond)
		r := open(t, source, tokenbucket.NewMemoryStore())
		defer r.Close()
		try := func() bool {
			l, err := r.Limiter("/a")
			require.NoError(t, err)
			ok, err := l.Try(ctx)
			require.NoError(t, err)
			return ok
		}
		require.True(t, try())
		require.True(t, try(), "200 ms are within 0.3 s")
		set(100 * time.Millisecond)
		require.NoError(t, r.Reload(ctx))
		require.False(t, try(), "200 ms are not within 0.1 s")
	})
}

// Off, disabled, and unknown names.
func TestPolicies(t *testing.T) {
	off := with(row("/off", -1, 1), func(l *registry.Limit) { l.Disabled = true }) // its rate does not matter
	source := registry.Static{row("/a", 1, 1), off}
	for what, c := range map[string]struct {
		opts    []registry.Option
		unknown int
	}{
		"default": {nil, 9},
		"pass":    {[]registry.Option{registry.WithUnknown(registry.Pass())}, 9},
		"refuse":  {[]registry.Option{registry.WithUnknown(registry.Refuse())}, 0},
		"limit":   {[]registry.Option{registry.WithUnknown(registry.Default(row("", 1, 0)))}, 1},
	} {
		t.Run(what, func(t *testing.T) {
			sw := killswitch.NewLocal(true)
			r := open(t, source, tokenbucket.NewMemoryStore(), append(c.opts, registry.WithSwitch(sw))...)
			require.Equal(t, 1, pass(t, r, "/a", 9))
			require.Equal(t, 9, pass(t, r, "/off", 9))
			require.Equal(t, c.unknown, pass(t, r, "/unknown", 9))
			require.Equal(t, c.unknown, pass(t, r, "/another", 9), "a bucket of its own")
			ok, err := allow(ctx, r, "/third")
			require.NoError(t, err)
			require.Equal(t, c.unknown > 0, ok)
			require.NoError(t, r.Penalize(ctx, "/unknown", time.Second))
			require.NoError(t, r.Penalize(ctx, "/off", time.Second))
			l, err := r.Limiter("/off")
			require.NoError(t, err)
			ok, err = l.TryAcquire(ctx, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
			sw.Set(false)
			require.Equal(t, 9, pass(t, r, "/a", 9))
			require.Equal(t, 9, pass(t, r, "/unknown", 9))
			sw.Set(true)
			require.Equal(t, 0, pass(t, r, "/a", 9))
		})
	}
}

// Names without a row cannot fill the memory, and a bucket in use keeps its balance.
func TestUnknownIsBounded(t *testing.T) {
	r := open(t, registry.Static{}, tokenbucket.NewMemoryStore(), registry.WithUnknown(registry.Default(row("", 0.001, 0))), registry.WithMaxUnknown(100))
	require.Equal(t, 1, pass(t, r, "used", 1))
	for i := range 1000 {
		require.Equal(t, 1, pass(t, r, fmt.Sprint("flood", i), 1))
		if i%20 == 0 {
			require.Equal(t, 0, pass(t, r, "used", 1))
		}
	}
	require.Equal(t, 0, pass(t, r, "flood7", 1), "forgotten here, but not in the store")
	require.LessOrEqual(t, r.Stats().Unknown, 100)
	require.Greater(t, r.Stats().Unknown, 40)
	for _, name := range []string{"", strings.Repeat("x", 513), "a\xff", strings.Repeat("é", 256) + "\xff"} {
		require.Equal(t, 1, pass(t, r, name, 2), "%q", name)
	}
	for _, name := range []string{"?", strings.Repeat("x", 600), "a\xfe", strings.Repeat("é", 256)} {
		require.Equal(t, 0, pass(t, r, name, 2), "the same bucket: %q", name)
	}
}

// A source that fails or hangs changes nothing. A bad row affects only itself, and its last valid limit stays in force.
func TestLastGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		var loads []registry.Load
		source := &fake{}
		source.set(row("/a", 2, 1), row("/b", 3, 1))
		r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Second), registry.WithLoadTimeout(500*time.Millisecond),
			registry.WithUnknown(registry.Refuse()), registry.WithLogger(slog.New(slog.NewTextHandler(&log, nil))),
			registry.WithHook(func(l registry.Load) { loads = append(loads, l) }))
		rate := func(name string) float64 {
			l, err := r.Limiter(name)
			require.NoError(t, err)
			if l == nil {
				return 0
			}
			return l.Rate()
		}
		check := func(what string, a, b float64) {
			t.Helper()
			time.Sleep(1100 * time.Millisecond)
			synctest.Wait()
			require.Equal(t, a, rate("/a"), what)
			require.Equal(t, b, rate("/b"), what)
		}
		check("at first", 2, 3)
		source.fail(errors.New("connection refused"))
		check("away", 2, 3)
		check("still away", 2, 3)
		require.Equal(t, 1, strings.Count(log.String(), "connection refused"), "logged once")
		require.Greater(t, r.Stats().Age, 2*time.Second)
		require.ErrorContains(t, r.Stats().Err, "connection refused")

		block := make(chan struct{})
		source.mu.Lock()
		source.block = block
		source.mu.Unlock()
		source.set(row("/a", 4, 2), row("/b", 3, 1))
		check("hangs", 2, 3)
		close(block)
		check("back", 4, 3)
		require.Contains(t, log.String(), "loaded again")
		require.Less(t, r.Stats().Age, 1100*time.Millisecond)

		source.set(row("/a", -5, 3), row("/b", 6, 3))
		check("a bad row", 4, 6)
		check("a bad row", 4, 6)
		require.Equal(t, 1, strings.Count(log.String(), "rate -5: want"), "logged once")
		last := loads[len(loads)-1]
		require.Equal(t, 1, last.Kept)
		require.Len(t, last.Rejected, 1)
		require.Equal(t, "row of /a", last.Rejected[0].Row)
		require.Contains(t, last.Rejected[0].Error(), "rate -5: want")
		require.Equal(t, last.Rejected, r.Stats().Rejected)

		source.mu.Lock() // the source itself could not read a name, only whose row it is
		source.table = registry.Table{Limits: []registry.Limit{row("/b", 6, 3)}, Rejected: []registry.RowError{{Row: "row of /a", Field: "interfaceUrl", Value: "NULL", Want: "a name"}}}
		source.mu.Unlock()
		check("a row without a name", 4, 6)
		source.set(row("/b", 6, 3), row("/b", 9, 4), row("/c", math.NaN(), 1))
		check("deleted, and twice", 0, 9)
		require.Zero(t, rate("/c"), "never good")
		require.Len(t, r.Stats().Rejected, 2)
		source.set()
		check("empty", 0, 9)
		time.Sleep(1100 * time.Millisecond)
		check("confirmed", 0, 0)
		r.Close()
	})
}

// A start without limits fails, or waits.
func TestStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &fake{err: errors.New("no route to host")}
		_, err := registry.New(source, tokenbucket.NewMemoryStore())
		require.ErrorIs(t, err, registry.ErrNotLoaded)
		require.ErrorContains(t, err, "no route to host")
		require.Equal(t, 1, source.loads)

		time.AfterFunc(10*time.Second, func() { source.set(row("/a", 5, 1)) })
		c, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		began := time.Now()
		r, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithWait(c), registry.WithInterval(2*time.Second))
		require.NoError(t, err)
		require.InDelta(t, 11, time.Since(began).Seconds(), 1)
		r.Close()

		source.fail(errors.New("no route to host"))
		c, cancel = context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		began = time.Now()
		_, err = registry.New(source, tokenbucket.NewMemoryStore(), registry.WithWait(c))
		require.ErrorIs(t, err, registry.ErrNotLoaded)
		require.Equal(t, 3*time.Second, time.Since(began))
	})
}

// If New has waited in vain, its error is the cause, and not that its context ended during the last attempt.
func TestStartTellsTheCause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		loads := 0
		source := sourceFunc(func(ctx context.Context) (registry.Table, error) {
			if loads++; loads == 1 {
				return registry.Table{}, errors.New("no such role")
			}
			<-ctx.Done()
			return registry.Table{}, errors.New("i/o timeout")
		})
		c, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithWait(c))
		require.ErrorContains(t, err, "no such role")
		require.Equal(t, 2, loads)
	})
}

// sourceFunc is a source that is a function.
type sourceFunc func(context.Context) (registry.Table, error)

func (f sourceFunc) Load(ctx context.Context) (registry.Table, error) { return f(ctx) }

func TestBadOptions(t *testing.T) {
	var nobody context.Context
	store, source := tokenbucket.NewMemoryStore(), registry.Static{}
	for want, opt := range map[string]registry.Option{
		"interval 1ms":         registry.WithInterval(time.Millisecond),
		"timeout 0s":           registry.WithLoadTimeout(0),
		"wait nil":             registry.WithWait(nobody),
		"max unknown 1":        registry.WithMaxUnknown(1),
		"max key limiters 1":   registry.WithMaxKeyLimiters(1),
		"switch nil":           registry.WithSwitch(nil),
		"logger nil":           registry.WithLogger(nil),
		"option nil":           nil,
		"without a row":        registry.WithUnknown(registry.Default(row("", -1, 0))),
		"max_wait -1s: want s": registry.WithUnknown(registry.Default(with(row("", 1, 0), func(l *registry.Limit) { l.MaxWait = -time.Second }))),
		"max waiters 0: w":     registry.WithUnknown(registry.Default(row("", 1, 0))),
	} {
		opts := []registry.Option{opt}
		if strings.HasPrefix(want, "max waiters") {
			opts = append(opts, registry.WithLimiterOptions(tokenbucket.WithMaxWaiters(0)))
		}
		_, err := registry.New(source, store, opts...)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, want)
		require.ErrorContains(t, err, want)
	}
	_, err := registry.New(nil, store)
	require.EqualError(t, err, "registry: tokenbucket: invalid configuration: source nil: want a source")
	_, err = registry.New(source, nil)
	require.ErrorContains(t, err, "store nil")
}

// Invalid rows are rejected one by one, with the wrong field.
func TestRejected(t *testing.T) {
	ten := 10.0
	for want, l := range map[string]registry.Limit{
		`name "": want a name`:   row("", 1, 1),
		"of 600 bytes":           row(strings.Repeat("n", 600), 1, 1),
		`name "\xff"`:            row("\xff", 1, 1),
		"rate -5":                row("/x", -5, 1),
		"rate NaN":               row("/x", math.NaN(), 1),
		"rate +Inf":              row("/x", math.Inf(1), 1),
		"rate 1e+300":            row("/x", 1e300, 1),
		"max_wait 2501999h":      with(row("/x", 1, 1), func(l *registry.Limit) { l.MaxWait = 1<<53*time.Microsecond + 1 }),
		"max_wait -100ms":        with(row("/x", 1, 1), func(l *registry.Limit) { l.MaxWait = -100 * time.Millisecond }),
		"rate 1.5":               with(row("/x", 1.5, 1), func(l *registry.Limit) { l.Quota = true }),
		"rate -1":                with(row("/x", -1, 1), func(l *registry.Limit) { l.Quota = true }),
		"jitter -1ns":            with(row("/x", 1, 1), func(l *registry.Limit) { l.Quota, l.Jitter = true, -1 }),
		"warmup 1ns: want no va": with(row("/x", 1, 1), func(l *registry.Limit) { l.Quota, l.Warmup = true, 1 }),
		"jitter 1ns":             with(row("/x", 1, 1), func(l *registry.Limit) { l.Jitter = 1 }),
		"burst 10":               with(row("/x", 1, 1), func(l *registry.Limit) { l.Burst, l.Warmup = &ten, time.Second }),
		"cold_factor 2":          with(row("/x", 1, 1), func(l *registry.Limit) { l.ColdFactor = 2 }),
		"cold_factor 0.5":        with(row("/x", 1, 1), func(l *registry.Limit) { l.Warmup, l.ColdFactor = time.Second, 0.5 }),
		"warmup -1µs":            with(row("/x", 1, 1), func(l *registry.Limit) { l.Warmup = -time.Microsecond }),
		"version -1":             row("/x", 1, -1),
		"version 900719925474":   row("/x", 1, 1<<53+1),
	} {
		r := open(t, registry.Static{row("/good", 1, 1), l}, tokenbucket.NewMemoryStore(), registry.WithUnknown(registry.Refuse()))
		s := r.Stats()
		require.Len(t, s.Rejected, 1, want)
		require.ErrorContains(t, &s.Rejected[0], want)
		require.Equal(t, 1, s.Limits)
		require.Equal(t, 1, pass(t, r, "/good", 2))
	}
}

// A changed row reaches the shared bucket, whatever its time of modification. A process that still has the old row gets
// the new rate with its next reply.
func TestChangedContentWins(t *testing.T) {
	for what, times := range map[string][3]int64{
		"newer":              {1000, 2000, 3000},
		"in the same second": {1000, 1000, 1000},
		"a repeated hour":    {9000, 2000, 1000},
		"no times":           {0, 0, 0},
	} {
		t.Run(what, func(t *testing.T) {
			store := tokenbucket.NewMemoryStore()
			here, there := &fake{}, &fake{}
			now := func(rate float64, version int64) registry.Limit {
				return with(row("/a", rate, version), func(l *registry.Limit) { l.MaxWait = 0 })
			}
			here.set(now(5, times[0]))
			there.set(now(5, times[0]))
			// Two registries with a line each, as two processes have.
			first := open(t, here, store)
			second := open(t, there, store, registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(2*time.Second)))
			rates := func(a, b float64) {
				t.Helper()
				for i, r := range []*registry.Registry{first, second, first, second} {
					_, err := allow(ctx, r, "/a")
					require.NoError(t, err)
					l, err := r.Limiter("/a")
					require.NoError(t, err)
					b, err := l.State(ctx)
					require.NoError(t, err)
					require.Equal(t, a, b.Rate, "bucket, asked by %d", i%2+1)
				}
				l, err := second.Limiter("/a")
				require.NoError(t, err)
				require.Equal(t, b, l.Rate())
			}
			rates(5, 5)
			reload := func(r *registry.Registry) { // an earlier time counts once three loads agree
				for range 3 {
					require.NoError(t, r.Reload(ctx))
				}
			}
			here.set(now(50, times[1]))
			reload(first)
			if times[0] != 0 { // without versions each process' own configuration applies until it has received one
				_, err := allow(ctx, first, "/a")
				require.NoError(t, err)
			}
			rates(50, 50)
			here.set(now(10, times[2]))
			reload(first)
			rates(10, 10)
			there.set(now(10, times[2]))
			reload(second)
			rates(10, 10)
		})
	}
}

// A row was changed within a second, and no process is left that loaded it: after two loads the table is in force again. The same holds after SetRate.
// If the bucket has a later row, that stays in force, since a process may have loaded it; it is told.
func TestTableIsTheTruth(t *testing.T) {
	for what, then := range map[string]int64{"same time": 5000, "earlier": 1000, "unknown": 0} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := tokenbucket.NewMemoryStore()
				old := open(t, registry.Static{row("/a", 50, 5000)}, store)
				_, err := allow(ctx, old, "/a")
				require.NoError(t, err)
				old.Close()
				r := open(t, registry.Static{row("/a", 7, then)}, store)
				asked := func() float64 {
					_, err := allow(ctx, r, "/a")
					require.NoError(t, err)
					l, err := r.Limiter("/a")
					require.NoError(t, err)
					b, err := l.State(ctx)
					require.NoError(t, err)
					return b.Rate
				}
				asked()
				for range 2 {
					require.NoError(t, r.Reload(ctx))
				}
				if what == "earlier" {
					require.Equal(t, 50.0, asked())
					require.Equal(t, []string{"/a"}, r.Stats().Outdated)
					l, err := r.Limiter("/a")
					require.NoError(t, err)
					require.NoError(t, l.Reset(ctx), "that is the way out, beside a change of the row")
					require.NoError(t, r.Reload(ctx))
					require.Equal(t, 7.0, asked())
					require.NoError(t, r.Reload(ctx))
					require.Empty(t, r.Stats().Outdated)
				}
				require.Equal(t, 7.0, asked())
				l, err := r.Limiter("/a")
				require.NoError(t, err)
				require.NoError(t, l.SetRate(ctx, 99))
				require.Equal(t, 99.0, asked())
				require.NoError(t, r.Reload(ctx))
				require.Equal(t, 99.0, asked(), "it may be that the row is about to change")
				require.NoError(t, r.Reload(ctx))
				require.Equal(t, 7.0, asked())
				r.Close()
			})
		})
	}
}

// Waiting callers keep their order when the row changes: none is lost, overtakes another, or is granted twice.
func TestWaitersKeepTheirPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		patient := func(rate float64, version int64) registry.Limit {
			return with(row("/a", rate, version), func(l *registry.Limit) { l.MaxWait = 9 * time.Second })
		}
		source := &fake{}
		source.set(patient(1, 1))
		r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
		_, err := allow(ctx, r, "/a")
		require.NoError(t, err)
		began := time.Now()
		var mu sync.Mutex
		var order []int
		var at []time.Duration
		ask := func(i int) {
			go func() {
				ok, err := allow(ctx, r, "/a")
				mu.Lock()
				defer mu.Unlock()
				if ok && err == nil {
					order, at = append(order, i), append(at, time.Since(began))
				}
			}()
			synctest.Wait()
		}
		ask(0)
		ask(1)
		source.set(patient(10, 2))
		require.NoError(t, r.Reload(ctx))
		ask(2)
		ask(3)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Equal(t, []int{0, 1, 2, 3}, order)
		require.Equal(t, []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 300 * time.Millisecond, 400 * time.Millisecond}, at, "by the new row")
		r.Close()
	})
}

// A row that turns from a rate into a warm-up and back reaches the bucket, without an error for any call, also in processes that
// have not loaded it.
func TestKindChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const interval = 100 * time.Millisecond
		store := tokenbucket.NewMemoryStore()
		source := &fake{}
		plain := row("/a", 1000, 1)
		warm := with(row("/a", 1000, 2), func(l *registry.Limit) { l.Warmup = time.Second })
		source.set(plain)
		opts := []registry.Option{registry.WithInterval(interval)}
		first := open(t, source, store, opts...)
		second := open(t, source, store, append(opts, registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(2*time.Second)))...)
		done, end := context.WithCancel(ctx)
		defer end()
		var calls, failed atomic.Int64
		var wg sync.WaitGroup
		for _, r := range []*registry.Registry{first, second} {
			for range 4 {
				wg.Go(func() {
					for done.Err() == nil {
						calls.Add(1)
						if _, err := allow(ctx, r, "/a"); err != nil {
							t.Log(err)
							failed.Add(1)
						}
						time.Sleep(time.Millisecond)
					}
				})
			}
		}
		warms := func(want bool) {
			t.Helper()
			time.Sleep(2 * interval)
			for _, r := range []*registry.Registry{first, second} {
				l, err := r.Limiter("/a")
				require.NoError(t, err)
				b, err := l.State(ctx)
				require.NoError(t, err)
				require.Equal(t, want, b.WarmupMicros > 0)
			}
		}
		warms(false)
		source.set(warm)
		warms(true)
		plain.Version = 3
		source.set(plain)
		warms(false)
		end()
		wg.Wait()
		require.Zero(t, failed.Load(), "of %d calls", calls.Load())
		require.Greater(t, calls.Load(), int64(100))
	})
}

// A fleet does not load in step, and each process loads at least once in an interval.
func TestJitter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const processes = 20
		sources := make([]*fake, processes)
		var all []*registry.Registry
		for i := range sources {
			sources[i] = &fake{}
			all = append(all, open(t, sources[i], tokenbucket.NewMemoryStore(), registry.WithInterval(10*time.Second)))
		}
		time.Sleep(10 * time.Minute)
		instants := map[time.Time]int{}
		for i, s := range sources {
			all[i].Close()
			for k := 1; k < len(s.at); k++ {
				gap := s.at[k].Sub(s.at[k-1])
				require.LessOrEqual(t, gap, 10*time.Second)
				require.GreaterOrEqual(t, gap, 8*time.Second)
				instants[s.at[k].Truncate(100*time.Millisecond)]++
			}
		}
		most := 0
		for _, n := range instants {
			most = max(most, n)
		}
		require.LessOrEqual(t, most, processes/2, "at most so many of the fleet within 100 ms")
	})
}

// A load that ends with its caller's context is no failure of the source, and the callers that share it load themselves.
func TestReloadGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := new(fake)
		source.set(row("/a", 1, 1))
		r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
		block := make(chan struct{})
		source.mu.Lock()
		source.block = block
		source.mu.Unlock()
		gone, cancel := context.WithCancel(ctx)
		first, second := make(chan error, 1), make(chan error, 1)
		go func() { first <- r.Reload(gone) }()
		synctest.Wait()
		go func() { second <- r.Reload(ctx) }()
		synctest.Wait()
		source.set(row("/a", 2, 2))
		cancel()
		require.ErrorIs(t, <-first, context.Canceled)
		close(block)
		require.NoError(t, <-second)
		require.Equal(t, 2.0, r.Limits()[0].Rate)
		require.Zero(t, r.Stats().Failures)
		r.Close()
	})
}

// Many who ask for a reload share one that began after they asked.
func TestReloadIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &fake{}
		source.set(row("/a", 1, 1))
		r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
		source.mu.Lock()
		source.block = make(chan struct{})
		source.loads = 0
		source.mu.Unlock()
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() { require.NoError(t, r.Reload(ctx)) })
			time.Sleep(time.Millisecond)
		}
		c, cancel := context.WithCancel(ctx)
		cancel()
		require.ErrorIs(t, r.Reload(c), context.Canceled)
		synctest.Wait()
		close(source.block)
		wg.Wait()
		require.Equal(t, 2, source.loads, "the one that was under way, and one for all who came later")
		r.Close()
	})
}

// Any sequence of good and bad tables leaves in force exactly the last good limit of each name.
func TestFollows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		source := &fake{}
		quiet := registry.WithLogger(slog.New(slog.DiscardHandler))
		r, err := registry.New(source, tokenbucket.NewMemoryStore(), quiet, registry.WithInterval(time.Hour), registry.WithAllowEmpty())
		require.NoError(t, err)
		defer r.Close()
		want := map[string]float64{}
		for load := range rapid.IntRange(1, 20).Draw(t, "loads") {
			if rapid.IntRange(0, 5).Draw(t, "fails") == 0 {
				source.fail(errors.New("away"))
				require.Error(t, r.Reload(ctx))
			} else {
				var limits []registry.Limit
				next := map[string]float64{}
				for _, name := range rapid.SliceOfDistinct(rapid.SampledFrom([]string{"a", "b", "c", "d"}), func(s string) string { return s }).Draw(t, "names") {
					l := row(name, rapid.SampledFrom([]float64{1, 2, 5, -1, math.Inf(1)}).Draw(t, "rate"), rapid.SampledFrom([]int64{0, int64(1 + load/2)}).Draw(t, "version"))
					l.MaxWait = 0
					limits = append(limits, l)
					if l.Rate > 0 && l.Rate < 10 {
						next[name] = l.Rate
					} else if was, ok := want[name]; ok {
						next[name] = was
					}
				}
				source.set(limits...)
				require.NoError(t, r.Reload(ctx))
				want = next
			}
			got := map[string]float64{}
			for _, l := range r.Limits() {
				got[l.Name] = l.Rate
				_, err := allow(ctx, r, l.Name)
				require.NoError(t, err)
				limiter, err := r.Limiter(l.Name)
				require.NoError(t, err)
				require.Equal(t, l.Rate, limiter.Rate(), "the bucket follows at once, since this process saw the change")
			}
			require.Equal(t, want, got)
		}
	})
}

// Ten thousand rows load in well under a second, and what did not change is not made again.
func TestTenThousandRows(t *testing.T) {
	var limits registry.Static
	for i := range 10_000 {
		limits = append(limits, row(fmt.Sprint("/ibe/", i), float64(1+i%100), 1))
	}
	server := redistest.Shared(t)
	client := server.Client(t)
	source := &fake{}
	source.set(limits...)
	began := time.Now()
	r := open(t, source, tokenbucket.NewRedisScriptStore(client, tokenbucket.WithKeyPrefix(t.Name()+":")))
	took := time.Since(began)
	require.Equal(t, 10_000, r.Stats().Limits)
	require.Equal(t, 1, pass(t, r, "/ibe/77", 1))
	l, err := r.Limiter("/ibe/77")
	require.NoError(t, err)
	writes := func() string { return client.Info(ctx, "commandstats").Val() }
	before := writes()
	began = time.Now()
	require.NoError(t, r.Reload(ctx))
	again := time.Since(began)
	require.Equal(t, strings.Count(before, "\n"), strings.Count(writes(), "\n"))
	same, err := r.Limiter("/ibe/77")
	require.NoError(t, err)
	require.Same(t, l, same)
	require.Equal(t, 1, r.Stats().Limiters)
	t.Logf("first load %v, again %v", took, again)
	require.Less(t, took, time.Minute)
}

// A row that was deleted and comes back with other limits is newer than what it was, whatever its version.
func TestRowThatComesBack(t *testing.T) {
	store := tokenbucket.NewMemoryStore()
	source := &fake{}
	r := open(t, source, store, registry.WithAllowEmpty())
	for i, rate := range []float64{5, 50, 5, 50} {
		source.set(row("/a", rate, 7))
		require.NoError(t, r.Reload(ctx))
		_, err := allow(ctx, r, "/a")
		require.NoError(t, err)
		l, err := r.Limiter("/a")
		require.NoError(t, err)
		b, err := l.State(ctx)
		require.NoError(t, err)
		require.Equal(t, rate, b.Rate, "time %d", i)
		source.set(row("/b", 1, 1))
		require.NoError(t, r.Reload(ctx))
	}
}
