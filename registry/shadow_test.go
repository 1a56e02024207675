package registry_test

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

func inShadow(l *registry.Limit) { l.Shadow = true }

// heard records the calls of an observer and of the hook for calls without a bucket.
type heard struct{ granted, refused, shadowed, bypassed atomic.Int64 }

func (h *heard) options() []registry.Option {
	observer := tokenbucket.Observer{Decision: func(_ context.Context, d tokenbucket.Decision) {
		switch {
		case d.Shadow && !d.Granted:
			h.shadowed.Add(1)
		case d.Granted:
			h.granted.Add(1)
		default:
			h.refused.Add(1)
		}
	}}
	return []registry.Option{registry.WithLimiterOptions(tokenbucket.WithObserver(observer)),
		registry.WithBypassHook(func(_ string, by gate.Decider, pass bool) {
			if by == gate.ByShadow && pass {
				h.bypassed.Add(1)
			}
		})}
}

// A row in shadow decides and counts, and lets every call pass; others limit.
func TestShadowOfARow(t *testing.T) {
	var h heard
	rejected := registry.RowError{Row: "7", Name: "/read", Field: "rateLimit", Value: "NULL", Want: "a number", Shadow: true}
	source := &fake{table: registry.Table{Rejected: []registry.RowError{rejected}, Limits: []registry.Limit{
		with(row("/a", 1, 1), inShadow), row("/b", 1, 1), with(row("/zero", 0, 1), inShadow), with(row("/bad", -1, 1), inShadow), row("/worse", -1, 1),
		with(row("/each/*", 1, 1), func(l *registry.Limit) { l.Shadow, l.PerKey = true, true })}}}
	r := open(t, source, tokenbucket.NewMemoryStore(), append(h.options(), registry.WithInterval(time.Hour))...)
	require.Equal(t, 9, pass(t, r, "/a", 9))
	require.Equal(t, int64(8), h.shadowed.Load())
	require.Equal(t, int64(1), h.granted.Load())
	require.Equal(t, 9, pass(t, r, "/each/x", 9))
	require.Equal(t, 9, pass(t, r, "/each/y", 9))
	require.Equal(t, int64(3*8), h.shadowed.Load())
	require.Zero(t, h.bypassed.Load())
	for i, name := range []string{"/zero", "/bad", "/read"} {
		ok, err := allow(ctx, r, name)
		require.NoError(t, err)
		require.True(t, ok, name)
		by, pass := r.Decider(name)
		require.Equal(t, gate.ByShadow, by)
		require.True(t, pass)
		require.Equal(t, int64(i+1), h.bypassed.Load())
	}
	require.Equal(t, 1, pass(t, r, "/b", 9))
	require.Equal(t, 0, pass(t, r, "/worse", 9))
	s := r.Stats()
	require.Equal(t, []string{"/a", "/bad", "/each/*", "/read", "/zero"}, s.Shadow)
	require.False(t, s.AllShadow)
	for _, e := range s.Rejected {
		want := "its calls pass, and count as refused: it is in shadow"
		if e.Name == "/worse" {
			want = "its calls are refused"
		}
		require.Equal(t, want, e.Consequence, e.Name)
	}
	require.Equal(t, "in shadow: 1/s, saves up 1, waits up to 500 ms", r.Limits()[0].String())
}

// In shadow nothing at all is refused.
func TestShadowOfAll(t *testing.T) {
	var h heard
	out := new(logged)
	r := open(t, registry.Static{row("/a", 1, 1), row("/zero", 0, 1), row("/bad", -1, 1)}, tokenbucket.NewMemoryStore(),
		append(h.options(), registry.WithShadow(), registry.WithUnknown(registry.Refuse()), out.option())...)
	for _, name := range []string{"/a", "/zero", "/bad", "/unknown"} {
		require.Equal(t, 9, pass(t, r, name, 9), name)
	}
	for _, name := range []string{"/zero", "/bad", "/unknown"} {
		for range 9 {
			ok, err := allow(ctx, r, name)
			require.NoError(t, err)
			require.True(t, ok)
		}
	}
	require.Equal(t, int64(8), h.shadowed.Load())
	require.Equal(t, int64(3*9), h.bypassed.Load())
	require.True(t, r.Stats().AllShadow)
	require.Contains(t, out.String(), `level=WARN msg="registry: every limit is in shadow: it counts calls and refuses none" limits=2`)
	require.NotContains(t, out.String(), "limits are in shadow")
}

// A shadow has a bucket of its own: neither its calls nor an upstream's Retry-After reach the limit of that name that is in force.
func TestShadowHasABucketOfItsOwn(t *testing.T) {
	store := tokenbucket.NewMemoryStore()
	shadow := open(t, registry.Static{with(row("/a", 1, 1), inShadow)}, store)
	real := open(t, registry.Static{row("/a", 1, 1)}, store)
	require.Equal(t, 9, pass(t, shadow, "/a", 9))
	require.NoError(t, shadow.Penalize(ctx, "/a", time.Minute))
	require.Equal(t, 9, pass(t, shadow, "/a", 9))
	require.Equal(t, 1, pass(t, real, "/a", 9))
}

// Limits in shadow are logged at the beginning, every minute, and at the end.
func TestShadowIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out, source := new(logged), &fake{}
		source.set(row("/a", 1, 1), with(row("/b", 1, 1), inShadow), with(row("/off", 1, 1), func(l *registry.Limit) { l.Shadow, l.Disabled = true, true }))
		r := open(t, source, tokenbucket.NewMemoryStore(), out.option(), registry.WithInterval(time.Second))
		count := func(text string) int { return strings.Count(out.String(), text) }
		require.Equal(t, 1, count(`level=WARN msg="registry: limits are in shadow: they count calls and refuse none" limits=1 buckets=/b`))
		time.Sleep(5*time.Minute + 30*time.Second)
		require.Equal(t, 5, count(`level=WARN msg="registry: limits are still in shadow: they count calls and refuse none" limits=1 buckets=/b`))
		require.Equal(t, 1, count("limits are in shadow"))
		source.set(with(row("/a", 1, 1), inShadow), with(row("/b", 1, 1), inShadow))
		time.Sleep(2 * time.Second)
		require.Equal(t, 1, count(`limits=2 buckets="/a, /b"`))
		require.Equal(t, 1, count(`level=WARN msg="registry: a limit changed" bucket=/a row="row of /a" from="1/s, saves up 1, waits up to 500 ms" to="in shadow: 1/s, saves up 1, waits up to 500 ms"`))
		require.Equal(t, 9, pass(t, r, "/a", 9))
		source.set(row("/a", 1, 1), row("/b", 1, 1))
		time.Sleep(2 * time.Second)
		require.Equal(t, 1, count(`level=WARN msg="registry: no limit is in shadow any longer: all refuse calls"`))
		require.Equal(t, 1, pass(t, r, "/a", 9))
		require.Equal(t, 1, pass(t, r, "/b", 9))
		before := count("shadow")
		time.Sleep(5 * time.Minute)
		require.Equal(t, before, count("shadow"))
		r.Close()
	})
}

// A row in shadow that changes from a rate to a warm-up counts by its new limit, although a shadow's calls return no error.
func TestShadowOfAnotherKind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h heard
		store, source := tokenbucket.NewMemoryStore(), &fake{}
		source.set(with(row("/a", 1, 1), inShadow), with(row("/k/*", 1, 1), func(l *registry.Limit) { l.Shadow, l.PerKey = true, true }))
		r := open(t, source, store, append(h.options(), registry.WithInterval(time.Second))...)
		require.Equal(t, 9, pass(t, r, "/a", 9))
		require.Equal(t, 9, pass(t, r, "/k/x", 9))
		source.set(with(row("/a", 1, 2), func(l *registry.Limit) { l.Shadow, l.Warmup = true, time.Second }),
			with(row("/k/*", 1, 2), func(l *registry.Limit) { l.Shadow, l.PerKey, l.Warmup = true, true, time.Second }))
		time.Sleep(2 * time.Second)
		for range 2 { // the limiters are made, and asked at the next load
			pass(t, r, "/a", 1)
			pass(t, r, "/k/x", 1)
			time.Sleep(2 * time.Second)
		}
		for _, name := range []string{"/a", "/k/x"} {
			l, err := r.Limiter(name)
			require.NoError(t, err)
			b, err := l.State(ctx)
			require.NoError(t, err)
			require.Positive(t, b.WarmupMicros)
		}
		r.Close()
	})
}

// A bad row that comes into shadow, and leaves it, is not refused, and is refused.
func TestBadRowComesIntoShadow(t *testing.T) {
	source := &fake{}
	source.set(row("/bad", -1, 1))
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
	for _, passes := range []int{0, 9, 0} {
		require.Equal(t, passes, pass(t, r, "/bad", 9))
		source.set(with(row("/bad", -1, 1), func(l *registry.Limit) { l.Shadow = passes == 0 }))
		require.NoError(t, r.Reload(ctx))
	}
}

// A row in shadow refuses no call by its window or its concurrency, either. Calls that they would refuse go to the hook, and are counted apart.
func TestShadowOfBounds(t *testing.T) {
	for name, opt := range map[string]registry.Option{"the row": nil, "all": registry.WithShadow()} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				told := map[gate.Decider]int{}
				opts := []registry.Option{registry.WithLocalWindows(), registry.WithLocalSemaphores(), registry.WithLogger(slog.New(slog.DiscardHandler)), registry.WithBypassHook(func(name string, by gate.Decider, pass bool) {
					require.Equal(t, "x", name)
					require.True(t, pass)
					told[by]++
				})}
				if opt != nil {
					opts = append(opts, opt)
				}
				r, err := registry.New(registry.Static{{Name: "x", NoRate: true, Window: time.Minute, WindowLimit: 3, Concurrent: 2, Shadow: opt == nil}}, tokenbucket.NewMemoryStore(), opts...)
				require.NoError(t, err)
				defer r.Close()
				for range 5 {
					a, err := r.Enter(t.Context(), "x")
					require.NoError(t, err)
					require.True(t, a.OK)
					require.Equal(t, gate.ByShadow, a.By)
					defer a.Leave()
				}
				require.Equal(t, map[gate.Decider]int{gate.ByShadow: 3, gate.ByWindow: 2}, told, "two of five are within both")
			})
		})
	}
}

// A window and a concurrency are of all keys together, so a row for each key with one of them is a bad row.
func TestPerKeyHasNoBounds(t *testing.T) {
	for what, row := range map[string]registry.Limit{
		"window":      {Name: "x", Rate: 1, PerKey: true, Window: time.Second, WindowLimit: 1},
		"concurrency": {Name: "x", Rate: 1, PerKey: true, Concurrent: 1},
	} {
		rejected := openLocal(t, registry.Static{row}).Stats().Rejected
		require.Len(t, rejected, 1, what)
		require.Equal(t, "per_key", rejected[0].Field, what)
		require.ErrorContains(t, &rejected[0], "per_key true: want no value beside a window or a concurrency: give single keys rows of their own")
		row.Disabled = true
		require.NoError(t, row.Check(), "of a row that is off nothing matters but its name")
	}
	long := registry.Limit{Name: strings.Repeat("x", 257), PerKey: true, Disabled: true}
	require.NoError(t, long.Check())
}
