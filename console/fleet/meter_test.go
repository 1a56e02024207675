package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// table is a source of limits that can be changed.
type table struct {
	mu    sync.Mutex
	table registry.Table
	err   error
}

func (t *table) Load(context.Context) (registry.Table, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return registry.Table{Limits: append([]registry.Limit{}, t.table.Limits...), Rejected: t.table.Rejected}, t.err
}

func (t *table) set(change func(*table)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	change(t)
}

// lights is a switch.
type lights struct{ off atomic.Bool }

func (l *lights) Enabled() bool  { return !l.off.Load() }
func (l *lights) Origin() string { return "somebody" }

// metered is a registry in memory, with a Meter.
func metered(t *testing.T, source registry.Source, opts ...registry.Option) (*Meter, *registry.Registry) {
	m := NewMeter(WithInfo(func(i *Info) { i.Version = "v1" }))
	opts = append(opts, registry.WithLimiterOptions(tokenbucket.WithObserver(m.Observer())), registry.WithBypassHook(m.Bypassed), registry.WithAllowEmpty(), registry.WithLogger(slog.New(slog.DiscardHandler)))
	limits, err := registry.New(source, tokenbucket.NewMemoryStore(), opts...)
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	m.Follow(limits)
	return m, limits
}

func report(t *testing.T, m *Meter) (*Report, map[string]Limit) {
	var r Report
	m.Report(t.Context(), &r)
	all := map[string]Limit{}
	for _, l := range r.Limits {
		require.NotContains(t, all, l.Name)
		all[l.Name] = l
	}
	return &r, all
}

// A Meter counts what calls come to, by what decided about them.
func TestMeterCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sw := &lights{}
		ten := 10.0
		source := &table{table: registry.Table{
			Limits: []registry.Limit{
				{Name: "/some", Row: "1", Rate: 2, Burst: &ten, MaxWait: time.Second, Version: 7},
				{Name: "/warm", Rate: 4, Warmup: 2 * time.Second},
				{Name: "/quota", Rate: 4, Quota: true},
				{Name: "/off", Rate: 1, Disabled: true},
				{Name: "/zero"},
			},
			Rejected: []registry.RowError{{Row: "9", Name: "/bad", Field: "rate", Value: "x", Want: "a number"}},
		}}
		m, limits := metered(t, source, registry.WithSwitch(sw))
		call := func(name string, times int) (passed int) {
			for range times {
				if a, err := limits.Enter(t.Context(), name); err == nil && a.OK {
					passed++
				}
			}
			return passed
		}
		call("/some", 14) // 10 saved up, and 1 each half second up to a second
		require.Equal(t, 0, call("/zero", 3)+call("/bad", 4))
		require.Equal(t, 11, call("/off", 5)+call("/nobody", 6))
		require.NoError(t, limits.Penalize(t.Context(), "/quota", time.Minute))
		m.Penalized("/quota", time.Now().Add(time.Minute))
		m.Penalized("/quota", time.Now().Add(time.Minute+time.Second))
		r, all := report(t, m)
		require.Len(t, all, 6)
		some := all["/some"]
		require.EqualValues(t, 14, some.Granted+some.Refused)
		require.Positive(t, some.Waited)
		require.Equal(t, Config{Row: "1", Kind: Bursty, Rate: 2, MaxPermits: 10, Wait: time.Second, Version: 7}, some.Config)
		require.EqualValues(t, 10, some.Bucket.Max)
		require.EqualValues(t, 2, some.Bucket.Rate)
		require.WithinDuration(t, time.Now(), some.Bucket.At, 0)
		require.Equal(t, Config{Kind: WarmUp, Rate: 4, Warmup: 2 * time.Second, ColdFactor: 3}, all["/warm"].Config)
		require.Equal(t, Quota, all["/quota"].Config.Kind)
		require.WithinDuration(t, time.Now().Add(time.Minute), all["/quota"].Bucket.HeldUntil, 2*time.Second)
		require.Equal(t, "zero", all["/zero"].Decider)
		require.EqualValues(t, 3, all["/zero"].Refused)
		require.Equal(t, "bad_row", all["/bad"].Decider)
		require.EqualValues(t, 4, all["/bad"].Refused)
		require.Equal(t, "disabled", all["/off"].Decider)
		require.EqualValues(t, 5, all["/off"].Passed)
		require.EqualValues(t, 6, r.Info.Others.Passed)
		require.Equal(t, "v1", r.Info.Version)
		require.Equal(t, []Rejected{{Row: "9", Name: "/bad", Field: "rate", Value: "x", Want: "a number", Consequence: "its calls are refused"}}, r.Info.Rejected)
		require.Len(t, r.Events, 1, "the penalty was prolonged, and told once")

		sw.off.Store(true)
		time.Sleep(2 * time.Second) // until the registry has noticed
		require.Equal(t, 3, call("/zero", 3))
		r, all = report(t, m)
		require.EqualValues(t, 3, all["/zero"].Passed)
		require.Equal(t, "switch", all["/zero"].Decider)
		require.Equal(t, "somebody", r.Info.Switch.Origin)
		require.True(t, r.Info.Switch.Off)
		require.Equal(t, []EventKind{SwitchOff}, kinds(r.Events))
	})
}

// The same holds for a row without a rate, whose penalty may come from another instance.
func TestMeterSeesResetsWithoutRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, limits := metered(t, &table{table: registry.Table{Limits: []registry.Limit{{Name: "/a", NoRate: true, Concurrent: 2}}}}, registry.WithLocalSemaphores())
		held := func() time.Duration {
			_, all := report(t, m)
			return max(0, time.Until(all["/a"].Bucket.HeldUntil)).Round(time.Second)
		}
		require.NoError(t, limits.Penalize(t.Context(), "/a", time.Hour))
		require.Equal(t, time.Hour, held())
		m.Penalized("/a", time.Now().Add(time.Hour))
		require.Equal(t, time.Hour, held())
		require.NoError(t, limits.Reset(t.Context(), "/a"))
		require.Zero(t, held())
		require.NoError(t, limits.Penalize(t.Context(), "/a", time.Minute))
		m.Penalized("/a", time.Now().Add(time.Minute))
		r, _ := report(t, m)
		require.Equal(t, []EventKind{Penalized}, kinds(r.Events), "another one, though it is shorter than what was left of the one before")
	})
}

// A bucket that was reset is no longer shown as held back, whatever penalty was noted before.
func TestMeterSeesResets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, limits := metered(t, &table{table: registry.Table{Limits: []registry.Limit{{Name: "/a", Rate: 5, MaxWait: time.Second}}}})
		_, err := limits.Enter(t.Context(), "/a")
		require.NoError(t, err)
		time.Sleep(5 * time.Second)
		_, all := report(t, m)
		require.Equal(t, all["/a"].Bucket.Max, all["/a"].Bucket.Stored, "no call changes it any more")
		require.NoError(t, limits.Penalize(t.Context(), "/a", time.Hour))
		m.Penalized("/a", time.Now().Add(time.Hour))
		_, all = report(t, m)
		require.WithinDuration(t, time.Now().Add(time.Hour), all["/a"].Bucket.HeldUntil, time.Second)
		time.Sleep(10 * time.Second)
		_, all = report(t, m)
		require.Greater(t, time.Until(all["/a"].Bucket.HeldUntil), 50*time.Minute)
		l, err := limits.Limiter("/a")
		require.NoError(t, err)
		require.NoError(t, l.Reset(t.Context()))
		time.Sleep(2 * time.Second)
		_, all = report(t, m)
		require.Zero(t, all["/a"].Bucket.HeldUntil)
		require.NoError(t, limits.Penalize(t.Context(), "/a", time.Minute))
		m.Penalized("/a", time.Now().Add(time.Minute))
		r, all := report(t, m)
		require.Equal(t, []EventKind{Penalized}, kinds(r.Events), "another one, though it is shorter than what was left of the one before")
		require.WithinDuration(t, time.Now().Add(time.Minute), all["/a"].Bucket.HeldUntil, time.Second)
	})
}

func kinds(events []Event) (all []EventKind) {
	for _, e := range events {
		all = append(all, e.Kind)
	}
	return all
}

// Changes of the table become events once. Calls of a removed row count as others.
func TestMeterFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &table{table: registry.Table{Limits: []registry.Limit{{Name: "/a", Rate: 5, Version: 1}, {Name: "/b", Rate: 5, Version: 1}}}}
		m, limits := metered(t, source, registry.WithInterval(time.Second))
		r, _ := report(t, m)
		require.Empty(t, r.Events, "what was there before is no event")
		_, err := limits.Enter(t.Context(), "/b")
		require.NoError(t, err)
		source.set(func(s *table) {
			s.table.Limits = []registry.Limit{{Name: "/a", Rate: 7, Version: 2}, {Name: "/c", Rate: 1}}
		})
		time.Sleep(2 * time.Second)
		r, all := report(t, m)
		require.ElementsMatch(t, []Event{
			{Kind: LimitChanged, Limit: "/a", Version: 2, From: "5/s, saves up 5, does not wait", To: "7/s, saves up 7, does not wait"},
			{Kind: LimitAdded, Limit: "/c", To: "1/s, saves up 1, does not wait"},
			{Kind: LimitRemoved, Limit: "/b", From: "5/s, saves up 5, does not wait"},
		}, r.Events)
		require.NotContains(t, all, "/b")
		_, err = limits.Enter(t.Context(), "/b")
		require.NoError(t, err)
		source.set(func(s *table) { s.err = errors.New("away") })
		time.Sleep(2 * time.Second)
		r, _ = report(t, m)
		require.Equal(t, []EventKind{LoadFailed}, kinds(r.Events))
		require.Equal(t, "away", r.Info.Loads.Err)
		require.EqualValues(t, 1, r.Info.Others.Passed)
		source.set(func(s *table) { s.err, s.table.Limits = nil, []registry.Limit{{Name: "/b", Rate: 5, Version: 3}} })
		time.Sleep(2 * time.Second)
		r, all = report(t, m)
		require.Contains(t, kinds(r.Events), LoadedAgain)
		require.Equal(t, Counters{Granted: 1}, all["/b"].Counters, "as before it was gone")
		require.Len(t, all, 1)
	})
}

// Waiters are counted, with the time of the oldest.
func TestMeterCountsWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, limits := metered(t, registry.Static{{Name: "/a", Rate: 1, MaxWait: 5 * time.Second}})
		began := time.Now()
		var waiting sync.WaitGroup
		for range 4 { // one has its permit at once
			waiting.Go(func() { _, _ = limits.Enter(context.Background(), "/a") })
		}
		time.Sleep(time.Second / 2)
		_, all := report(t, m)
		require.Equal(t, Waiting{3, began}, all["/a"].Waiting)
		require.EqualValues(t, 4, all["/a"].Granted, "three of them fall due later")
		waiting.Wait()
		_, all = report(t, m)
		require.Equal(t, Waiting{}, all["/a"].Waiting)
		c := all["/a"].Counters
		require.Equal(t, Counters{Granted: 4, Waited: 3, WaitSum: 6 * time.Second, Waits: Histogram{9: 1, 10: 1, 11: 1}}, c)
		require.InDelta(t, 5*time.Second, c.Quantile(0.99), float64(time.Second/5))
		require.Zero(t, c.Quantile(0.2))
	})
}

// Outages become events, and their lengths are added up.
func TestMeterNoticesOutages(t *testing.T) {
	m := NewMeter()
	health := m.Observer().Health
	health(tokenbucket.Health{Bucket: "a", Down: true, Err: errors.New("refused")})
	health(tokenbucket.Health{Bucket: "b", Down: true, Err: errors.New("refused")})
	r, _ := report(t, m)
	require.Equal(t, []EventKind{StoreDown}, kinds(r.Events))
	require.True(t, r.Info.Store.Down)
	require.Equal(t, "refused", r.Info.Store.Err)
	health(tokenbucket.Health{Bucket: "b", After: 3 * time.Second})
	r, _ = report(t, m)
	require.Equal(t, []EventKind{StoreBack}, kinds(r.Events))
	require.Equal(t, Store{Outages: 1, Away: 3 * time.Second}, r.Info.Store)
}

// A Meter without a registry reports every name that it has counted, and calls other observers.
func TestMeterAlone(t *testing.T) {
	var others int
	m := NewMeter()
	o := m.Observer(tokenbucket.Observer{}, tokenbucket.Observer{
		Decision: func(context.Context, tokenbucket.Decision) { others++ },
		Trip:     func(tokenbucket.Trip) { others++ },
		Prefetch: func(string, int, int) { others++ },
		Lost:     func(string, int) { others++ },
		Health:   func(tokenbucket.Health) { others++ },
	})
	for _, d := range []tokenbucket.Decision{
		{Bucket: "a", Granted: true}, {Bucket: "a", Granted: true, Shadow: true}, {Bucket: "a", Shadow: true},
		{Bucket: "a"}, {Bucket: "a", Err: errors.New("x")}, {Bucket: "a", By: tokenbucket.BySwitch, Granted: true},
		{Bucket: "a", Err: errors.New("x"), Shadow: true}, {Bucket: "a", Granted: true, Wait: time.Minute},
	} {
		o.Decision(t.Context(), d)
	}
	o.Trip(tokenbucket.Trip{})
	o.Prefetch("a", 1, 1)
	o.Lost("a", 1)
	o.Health(tokenbucket.Health{})
	require.Equal(t, 12, others)
	_, all := report(t, m)
	c := all["a"].Counters
	require.Equal(t, Counters{Granted: 3, Waited: 1, WaitSum: time.Minute, Refused: 1, Failed: 1, Passed: 2, WouldRefuse: 1, Waits: Histogram{13: 1}}, c)
	require.EqualValues(t, 6, c.Through())
	require.EqualValues(t, 8, c.Calls())
	require.Equal(t, 10*time.Second, c.Quantile(0.99))
}

// Of the keys refused most none is missing, and the counts are within their errors, however many keys there are.
func TestMost(t *testing.T) {
	m := newMost(50)
	counted := map[string]int64{}
	random := rand.New(rand.NewPCG(1, 2))
	for range 100_000 {
		key := fmt.Sprint("rare", random.IntN(10_000))
		if random.IntN(2) == 0 {
			key = fmt.Sprint("often", random.IntN(5))
		}
		counted[key]++
		m.add("limit", key)
	}
	all := m.first(1000)
	require.Len(t, all, 50)
	for i, k := range all {
		require.LessOrEqual(t, k.Count-k.Error, counted[k.Key], k.Key)
		require.GreaterOrEqual(t, k.Count, counted[k.Key], k.Key)
		if i < 5 {
			require.Contains(t, k.Key, "often")
		}
	}
	require.Len(t, m.first(3), 3)
}

// A key that is cut is one key, too.
func TestMostOfLongKeys(t *testing.T) {
	m := newMost(50)
	long := strings.Repeat("k", 600)
	for range 100 {
		m.add("limit", long)
		m.add("limit", "\xff")
	}
	require.Equal(t, []Key{{Limit: "limit", Key: long[:mostName-3] + "…", Count: 100}, {Limit: "limit", Key: "\uFFFD", Count: 100}}, m.first(50))
}

// TestShortened: a text that is too long ends at a word, and within its bytes, whatever they are.
func TestShortened(t *testing.T) {
	require.Equal(t, "dial tcp: connection…", shortened("dial tcp: connection refused", 25))
	require.Equal(t, "dial tcp: connection refused", shortened("dial tcp: connection refused", 28))
	for _, s := range []string{strings.Repeat("é", 40), strings.Repeat("\xff ", 40), strings.Repeat("東", 40)} {
		got := shortened(s, 20)
		require.LessOrEqual(t, len(got), 20)
		require.True(t, utf8.ValidString(got))
		require.True(t, strings.HasSuffix(got, "…"), got)
	}
}

// Calls under another name than their row's count for the row. The most refused keys have their own names.
func TestMeterKeys(t *testing.T) {
	m, _ := metered(t, registry.Static{{Name: "/a", Rate: 5}})
	a := m.of("/a")
	for i := range 5 {
		key := fmt.Sprint("/a|x", i%2)
		m.keys.Load().add(key, func(string) *counter { return a })
		m.keys.Load().all()
		m.decided(t.Context(), tokenbucket.Decision{Bucket: key})
	}
	m.decided(t.Context(), tokenbucket.Decision{Bucket: "/a"})
	m.decided(t.Context(), tokenbucket.Decision{Bucket: "/nobody"})
	r, all := report(t, m)
	require.Equal(t, Counters{Refused: 6}, all["/a"].Counters)
	require.Equal(t, Counters{Refused: 1}, r.Info.Others)
	require.Equal(t, []Key{{Limit: "/a", Key: "x0", Count: 3}, {Limit: "/a", Key: "x1", Count: 2}, {Key: "/nobody", Count: 1}}, r.Info.Refused)

	for name, want := range map[string]string{"/a*": "/a*", "/a|x": "/a*", "/abc": "/a*", "/b": ""} {
		row, ok := rowOf(wide{}, name)
		require.Equal(t, want, row, name)
		require.Equal(t, want != "", ok)
	}
}

// wide is a registry with one row, /a*.
type wide struct{}

func (wide) Has(name string) bool { return name == "/a*" }

func (wide) Match(name string) (row string, exact, ok bool) {
	if !strings.HasPrefix(name, "/a") {
		return "", false, false
	}
	return "/a*", false, true
}

// Names are found while others come, and not more than there may be.
func TestNames(t *testing.T) {
	n := newNames[int](100)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for i := range 300 {
				name := fmt.Sprint(i % 150)
				if n.find(name) == nil {
					n.add(name, func(string) *int { return new(int) })
				}
				if i%7 == 0 {
					runtime.Gosched()
				}
			}
		})
	}
	all.Wait()
	require.Len(t, n.all(), 100)
	require.NotNil(t, n.find("3"))
	require.Nil(t, n.add("beyond", func(string) *int { return new(int) }))
}

func BenchmarkDecided(b *testing.B) {
	m := NewMeter()
	d := tokenbucket.Decision{Bucket: "/ibe/AvailFare", Permits: 1, Granted: true, Wait: time.Millisecond}
	m.counters.add(d.Bucket, func(name string) *counter { return &counter{name: name} })
	m.counters.all()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			m.decided(context.Background(), d)
		}
	})
}

// WithInfo names the instance that noticed an event.
func TestEventsHaveTheInstancesName(t *testing.T) {
	source := &table{table: registry.Table{Limits: []registry.Limit{{Name: "/a", Rate: 5}}}}
	m := NewMeter(WithInfo(func(i *Info) { i.Host = "gateway-1" }))
	limits, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithLogger(slog.New(slog.DiscardHandler)), registry.WithInterval(time.Hour))
	require.NoError(t, err)
	defer limits.Close()
	m.Follow(limits)
	m.noticed(tokenbucket.Health{Down: true, Err: errors.New("away")})
	m.Penalized("/a", time.Now().Add(time.Minute))
	source.set(func(s *table) { s.err = errors.New("no table") })
	require.Error(t, limits.Reload(t.Context()))
	r, _ := report(t, m)
	hosts := map[EventKind]string{}
	for _, e := range r.Events {
		hosts[e.Kind] = e.Host
	}
	require.Equal(t, map[EventKind]string{StoreDown: "gateway-1", Penalized: "gateway-1", LoadFailed: "gateway-1"}, hosts)
}

// New names without counters of their own are reported.
func TestTooManyNames(t *testing.T) {
	m := NewMeter()
	m.counters = newNames[counter](2)
	for _, name := range []string{"/a", "/b"} {
		m.of(name).normal.granted.Add(1)
	}
	r, _ := report(t, m)
	require.False(t, r.Info.Crowded)
	m.of("/c").normal.granted.Add(1)
	r, all := report(t, m)
	require.True(t, r.Info.Crowded)
	require.NotContains(t, all, "/c")
	require.Equal(t, int64(1), r.Info.Others.Granted)
}

// A call that gets a permit of the rate, and is then refused by the window or the concurrency, is refused and not granted,
// too. In shadow, a call that both would refuse counts once.
func TestRefusedAfterTheRateIsNotGranted(t *testing.T) {
	meter := NewMeter()
	rows := registry.Static{{Name: "/window", Rate: 20, MaxWait: time.Second, Window: time.Hour, WindowLimit: 3}, {Name: "/trial", Rate: 20, MaxWait: time.Second, Window: time.Hour, WindowLimit: 3, Shadow: true},
		{Name: "/places", Rate: 20, MaxWait: time.Second, Concurrent: 1},
		{Name: "/both", Rate: 0.001, MaxWait: time.Second, Window: time.Hour, WindowLimit: 3, Concurrent: 1, Shadow: true}}
	limits, err := registry.New(rows, tokenbucket.NewMemoryStore(), registry.WithLocalWindows(), registry.WithLocalSemaphores(),
		registry.WithLimiterOptions(tokenbucket.WithObserver(meter.Observer())), registry.WithBypassHook(meter.Bypassed), registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	meter.Follow(limits)
	passed := map[string]int64{}
	for _, row := range rows {
		for range 8 {
			a, err := limits.Enter(t.Context(), row.Name)
			require.NoError(t, err)
			if a.OK {
				passed[row.Name]++
			}
			t.Cleanup(a.Leave)
		}
	}
	require.Equal(t, map[string]int64{"/window": 3, "/trial": 8, "/places": 1, "/both": 8}, passed)
	var report Report
	meter.Report(t.Context(), &report)
	for _, l := range report.Limits {
		require.Equal(t, passed[l.Name], l.Through(), l.Name)
		require.Equal(t, int64(8), l.Calls(), l.Name)
	}
	require.Len(t, report.Limits, 4)
	used, _, err := limits.Usage(t.Context(), "/both")
	require.NoError(t, err)
	require.Equal(t, 1, used.WindowUsed, "what the rate of a shadow would refuse does not count in its window")
}

// A bucket that cannot be used until it is repaired is reported with its limit, its error and since when, until a call passes.
func TestMeterReportsFaults(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	name := fmt.Sprint("/fault/", rand.Uint64())
	meter := NewMeter()
	limits, err := registry.New(registry.Static{{Name: name, Rate: 1000}}, tokenbucket.NewRedisScriptStore(client), registry.WithLogger(slog.New(slog.DiscardHandler)),
		registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(20*time.Second))) // a slow machine is no fault
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	meter.Follow(limits)
	_, err = limits.Enter(t.Context(), name)
	require.NoError(t, err)
	r, _ := report(t, meter)
	require.Empty(t, r.Info.Faults)
	keys, err := client.Keys(t.Context(), "*"+name+"*").Result()
	require.NoError(t, err)
	require.NotEmpty(t, keys)
	for _, key := range keys {
		require.NoError(t, client.Del(t.Context(), key).Err())
		require.NoError(t, client.RPush(t.Context(), key, "what another program has written").Err())
	}
	require.Eventually(t, func() bool { _, err := limits.Enter(t.Context(), name); return err != nil }, 20*time.Second, time.Millisecond)
	r, _ = report(t, meter)
	require.Len(t, r.Info.Faults, 1)
	f := r.Info.Faults[0]
	require.Equal(t, []string{name, name, "limit"}, []string{f.Limit, f.Bucket, f.By})
	require.Contains(t, f.Err, "corrupt state")
	require.Positive(t, f.Calls)
	require.WithinDuration(t, time.Now(), f.Since, time.Minute)
	require.NoError(t, client.Del(t.Context(), keys...).Err())
	require.Eventually(t, func() bool { _, err := limits.Enter(t.Context(), name); return err == nil }, 20*time.Second, time.Millisecond)
	r, _ = report(t, meter)
	require.Empty(t, r.Info.Faults)
}
