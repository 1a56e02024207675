package fleet

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Rates are the differences between two snapshots. An instance that has started in between counts from its start; one that died or was lost
// counts nothing; nothing is ever below zero.
func TestRates(t *testing.T) {
	at := time.UnixMilli(1_700_000_000_000)
	sec := func(s float64) time.Time { return at.Add(time.Duration(s * float64(time.Second))) }
	instance := func(id string, started, beat float64, granted int64) Instance {
		l := &Limit{Name: "/a", Counters: Counters{Granted: granted, Refused: 2 * granted}}
		return Instance{ID: id, Info: Info{Started: sec(started)}, Beat: sec(beat), Limits: map[string]*Limit{"/a": l}}
	}
	before := &Snapshot{At: sec(100), Instances: []Instance{
		instance("goes on", 0, 99, 1000), instance("dies", 0, 99, 500), instance("ends", 0, 80, 10), instance("was reset", 0, 99, 700),
	}}
	now := &Snapshot{At: sec(110), Instances: []Instance{
		instance("goes on", 0, 109, 1100), instance("dies", 0, 99, 500), instance("was reset", 0, 109, 3),
		instance("is new", 105, 108, 40), instance("was forgotten by Redis", 0, 109, 5_000_000),
	}}
	r := Rates(before, now)["/a"]
	require.InDelta(t, 10+5, r.Granted, 1e-9)
	require.InDelta(t, 20+10, r.Refused, 1e-9)
	of := RatesOf(before, now, "/a")
	require.InDelta(t, 10, of["goes on"].Granted, 1e-9)
	require.InDelta(t, 5, of["is new"].Granted, 1e-9)
	require.Zero(t, of["was reset"].Granted)
	require.Len(t, of, 3)
	require.Empty(t, RatesOf(before, now, "/b"))
	require.Empty(t, Rates(now, now))

	require.True(t, now.Instances[1].Silent(now.At))
	require.False(t, now.Instances[0].Silent(now.At))
	total := now.Total("/a")
	require.Equal(t, 4, total.Instances)
	require.EqualValues(t, 1100+500+3+40+5_000_000, total.Granted)
	require.Nil(t, now.Total("/b"))
}

// The newest version of a limit counts, then the latest reading of the bucket. Waiters of all living instances are added up.
func TestTotals(t *testing.T) {
	at := time.UnixMilli(1_700_000_000_000)
	limit := func(version int64, looked, since time.Duration, decider string) map[string]*Limit {
		l := &Limit{Name: "/a", Decider: decider, Config: Config{Version: version}, Bucket: Bucket{At: at.Add(looked)}, Waiting: Waiting{2, at.Add(since)}}
		return map[string]*Limit{"/a": l}
	}
	s := &Snapshot{At: at, Instances: []Instance{
		{ID: "died", Beat: at.Add(-time.Minute), Limits: limit(9, 0, 0, "zero")},
		{ID: "old", Beat: at, Limits: limit(1, time.Second, -3*time.Second, "limit")},
		{ID: "new", Beat: at, Limits: limit(2, -time.Second, -4*time.Second, "limit")},
		{ID: "newest", Beat: at, Limits: limit(2, 0, -time.Second, "disabled")},
	}}
	total := s.Totals()[0]
	require.Same(t, s.Instances[3].Limits["/a"], total.Newest)
	require.Equal(t, Waiting{6, at.Add(-4 * time.Second)}, total.Waiting)
	require.Equal(t, []string{"limit", "disabled"}, total.Deciders)
	require.Equal(t, 3, total.Instances)
	s.Instances = s.Instances[:1]
	require.Equal(t, "zero", s.Total("/a").Newest.Decider, "nobody else")
}

// A p99 is within the bounds between which the true one lies.
func TestQuantile(t *testing.T) {
	var c Counters
	require.Zero(t, c.Quantile(0.99))
	c.Granted = 1000
	for i := range 100 { // 0.5 to 50 ms; 900 did not wait
		d := time.Duration(i+1) * time.Millisecond / 2
		c.Waits[placeOf(d)]++
	}
	require.Zero(t, c.Quantile(0.5))
	require.InDelta(t, 45*time.Millisecond, c.Quantile(0.99), float64(2*time.Millisecond))
	require.InDelta(t, 5*time.Millisecond, c.Quantile(0.91), float64(time.Millisecond))
	require.Equal(t, 50*time.Millisecond, c.Quantile(1))
	require.Len(t, WaitBounds(), len(Histogram{})-1)
}

// The curve is that of the library's warm-up limiters.
func TestCurve(t *testing.T) {
	for _, c := range []Config{
		{Kind: WarmUp, Warmup: 4 * time.Second, ColdFactor: 3}, {Kind: WarmUp, Warmup: time.Minute, ColdFactor: 7.5}, {Kind: WarmUp, Warmup: time.Second},
	} {
		opts := []tokenbucket.Option{tokenbucket.WithStore(tokenbucket.NewMemoryStore())}
		if c.ColdFactor != 0 {
			opts = append(opts, tokenbucket.WithColdFactor(c.ColdFactor))
		}
		l, err := tokenbucket.NewSmoothWarmingUp("/a", 5, c.Warmup, opts...)
		require.NoError(t, err)
		b, err := l.State(t.Context())
		require.NoError(t, err)
		curve, ok := c.Curve(5)
		require.True(t, ok)
		require.InDelta(t, b.MaxPermits, curve.Max, 1e-9)
		require.Equal(t, 200*time.Millisecond, curve.Stable)
		require.Equal(t, curve.Stable, curve.Interval(0))
		require.Equal(t, curve.Stable, curve.Interval(curve.Threshold))
		require.Equal(t, curve.Cold, curve.Interval(curve.Max))
		require.Equal(t, curve.Cold, curve.Interval(math.Inf(1)))
	}
	_, ok := (&Config{Kind: Bursty, Rate: 5}).Curve(5)
	require.False(t, ok)
	_, ok = (&Config{Kind: WarmUp, Warmup: time.Second}).Curve(0)
	require.False(t, ok)
}

// A row is described with its bounds besides the rate.
func TestRowIsToldWhole(t *testing.T) {
	row := registry.Limit{Name: "/a", Row: "7", Window: 5 * time.Second, WindowLimit: 120, Concurrent: 3, NoRate: true, PerKey: true, Shadow: true, Version: 9}
	c := ConfigOf(&row)
	require.Equal(t, Config{Row: "7", Window: 5 * time.Second, WindowLimit: 120, Concurrent: 3, NoRate: true, PerKey: true, Shadow: true, Version: 9}, c)
	d := decoder{fields: map[string]string{"/a": rowText(c)}}
	require.Equal(t, c, d.limits()["/a"].Config)
	require.Equal(t, gate.ByLimit, DeciderOf(&row))
	require.Equal(t, gate.ByZero, DeciderOf(&registry.Limit{}))
	require.Equal(t, gate.ByDisabled, DeciderOf(&registry.Limit{Disabled: true}))
}

// No quantile is above what a row lets a call wait, whatever the bounds of the histogram are.
func TestQuantileIsNotAboveTheRow(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	waits := func(n int64) Counters {
		c := Counters{Granted: n, Waited: n}
		c.Waits[placeOf(290*time.Millisecond)] = n // between 200 and 500 ms
		return c
	}
	at2 := at.Add(10 * time.Second)
	fleetOf := func(at time.Time, wait time.Duration, n int64) *Snapshot {
		return &Snapshot{At: at, Instances: []Instance{{ID: "i", Beat: at, Limits: map[string]*Limit{"/a": {Name: "/a", Config: Config{Wait: wait}, Counters: waits(n)}}}}}
	}
	for wait, want := range map[time.Duration][2]time.Duration{
		300 * time.Millisecond: {295 * time.Millisecond, 300 * time.Millisecond},
		100 * time.Millisecond: {100 * time.Millisecond, 100 * time.Millisecond}, // calls that waited by an earlier row
		time.Second:            {490 * time.Millisecond, 500 * time.Millisecond},
		0:                      {490 * time.Millisecond, 500 * time.Millisecond}, // it is not known
	} {
		before, now := fleetOf(at, wait, 0), fleetOf(at2, wait, 1000)
		p99 := Rates(before, now)["/a"].P99
		require.True(t, want[0] <= p99 && p99 <= want[1], "%v: %v", wait, p99)
		require.Equal(t, p99, RatesOf(before, now, "/a")["i"].P99)
	}
	beyond := Counters{Granted: 1}
	beyond.Waits[len(beyond.Waits)-1] = 1
	require.Equal(t, 300*time.Millisecond, beyond.QuantileWithin(0.99, 300*time.Millisecond))
}

// Calls without a row have a rate, of all instances that have published in between.
func TestOthersRate(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	one := func(id string, at time.Time, c Counters) Instance {
		return Instance{ID: id, Beat: at, Info: Info{Others: c, Started: at.Add(-time.Hour)}}
	}
	later := at.Add(10 * time.Second)
	before := &Snapshot{At: at, Instances: []Instance{one("a", at, Counters{Passed: 100}), one("b", at, Counters{}), one("silent", at, Counters{Passed: 5})}}
	now := &Snapshot{At: later, Instances: []Instance{one("a", later, Counters{Passed: 1900}), one("b", later, Counters{Refused: 50}), one("silent", at, Counters{Passed: 5}),
		{ID: "long known", Beat: later, Info: Info{Others: Counters{Passed: 1e6}, Started: at.Add(-time.Hour)}}}}
	require.Equal(t, Rate{Passed: 180, Refused: 5}, OthersRate(before, now))
	require.Zero(t, OthersRate(now, now))
}
