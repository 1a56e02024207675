package console

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// counted is a fleet of one instance with one limit.
func counted(at time.Time, c fleet.Counters) *fleet.Snapshot {
	return &fleet.Snapshot{At: at, Instances: []fleet.Instance{{ID: "i", Beat: at, Info: fleet.Info{Started: at.Add(-time.Hour)}, Limits: map[string]*fleet.Limit{
		"x": {Name: "x", Decider: "limit", Counters: c},
	}}}}
}

// told is a Source that returns fixed snapshots.
type told struct{ now *fleet.Snapshot }

func (s *told) Snapshot(context.Context) (*fleet.Snapshot, error) { return s.now, nil }
func (*told) History(context.Context, string, time.Time) ([]fleet.Point, error) {
	return nil, nil
}
func (*told) Events(context.Context, time.Time) ([]fleet.Event, error) { return nil, nil }

// After an hour without viewers, rates are those of the present and not of that hour.
func TestRatesAreOfThePresent(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	source := &told{}
	b := newBoard(source, nil, 2*time.Second)
	look := func(after time.Duration, granted int64) *view {
		source.now = counted(begin.Add(after), fleet.Counters{Granted: granted})
		b.read(t.Context())
		return b.latest
	}
	look(0, 0)
	require.Equal(t, 10.0, look(2*time.Second, 20).limit("x").granted())
	require.Len(t, b.sparks, 1)
	v := look(time.Hour, 36_000)
	require.False(t, v.measured(), "10/s in the last hour say nothing of the present")
	require.Empty(t, b.sparks)
	require.Equal(t, 1.0, look(time.Hour+2*time.Second, 36_002).limit("x").granted())
}

// The first limits of a page are those that a whole order would have first.
func TestRanked(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	past, now := counted(begin, fleet.Counters{}), counted(begin.Add(10*time.Second), fleet.Counters{})
	for i := range 500 {
		name := fmt.Sprintf("/%03d", i*37%500)
		past.Instances[0].Limits[name] = &fleet.Limit{Name: name}
		now.Instances[0].Limits[name] = &fleet.Limit{Name: name, Counters: fleet.Counters{Refused: int64(i * 7 % 9), Granted: int64(i * 11 % 5)}}
	}
	v := newView(past, now)
	all := v.ranked(1000)
	require.Len(t, all, 501)
	require.True(t, slices.IsSortedFunc(all, func(a, b *limit) int {
		return cmp.Or(cmp.Compare(b.refused(), a.refused()), cmp.Compare(b.granted(), a.granted()), cmp.Compare(a.name(), b.name()))
	}))
	require.Positive(t, all[0].refused())
	require.Equal(t, all[:50], v.ranked(50))
}

// Sparklines are dropped with their limits.
func TestRemovedLimitsAreForgotten(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	source := &told{}
	b := newBoard(source, nil, 2*time.Second)
	for i := range 10 {
		source.now = counted(begin.Add(time.Duration(2*i)*time.Second), fleet.Counters{Granted: int64(20 * i)})
		limits := source.now.Instances[0].Limits
		limits["own "+itoa(i/5)] = limits["x"]
		b.read(t.Context())
	}
	require.ElementsMatch(t, []string{"x", "own 1"}, slices.Collect(maps.Keys(b.sparks)))
}

// An instance that reports only some of its limits is named on every page, and Health has their number.
func TestTooManyLimitsAreReported(t *testing.T) {
	now := counted(time.Unix(1_800_000_000, 0), fleet.Counters{})
	now.Instances[0].MoreLimits, now.Instances[0].Crowded = 2000, true
	v := newView(now, now)
	require.Contains(t, texts(v), "does not report all of its limits: see Health")
	said := v.health(&v.instances[0]).Loads
	require.Contains(t, said, "2,000 limits are not shown: an instance reports at most 10,000")
	require.Contains(t, said, "new limits share one counter")
}

// A limit in shadow has the same figures in all places that are about it alone: what would be refused is not granted. Sums over
// several limits count these calls as passed, because no caller was refused.
func TestShadowHasTheSameFiguresEverywhere(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	c := fleet.Counters{Granted: 50, Passed: 10, WouldRefuse: 30, Refused: 20}
	v := newView(counted(begin, fleet.Counters{}), counted(begin.Add(10*time.Second), c))
	l := v.limit("x")
	require.Equal(t, []float64{6, 5}, []float64{l.granted(), l.refused()})
	require.Equal(t, []float64{9, 2}, []float64{v.instances[0].granted, v.instances[0].refused})
	total := v.totals()
	require.Equal(t, []float64{9, 2}, []float64{total.Granted, total.Refused})
	share := v.shares("x")[0]
	require.Equal(t, []float64{6, 5}, []float64{share.Granted, share.Refused})
	h := columns([]fleet.Point{{Minute: begin, Published: true, Granted: 300, Passed: 60, WouldRefuse: 180, Refused: 120}}, begin.Add(time.Hour))
	require.Equal(t, []float64{6, 5}, []float64{*h.Granted[0], *h.Refused[0]})
}

// Frames can be encoded, whatever numbers are in Redis.
func TestAnyNumberCanBeSent(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	for _, f := range []float64{0, 5e-324, 1e-310, 1e-300, 1e-9, 1, math.MaxFloat32, 1e308, math.MaxFloat64} {
		_, err := json.Marshal(round(f))
		require.NoError(t, err, f)
		now := counted(begin, fleet.Counters{})
		l := now.Instances[0].Limits["x"]
		l.Config = fleet.Config{Kind: fleet.WarmUp, Rate: f, Warmup: math.MaxInt64, ColdFactor: 3}
		l.Bucket = fleet.Bucket{At: begin, Stored: 1, Max: 1}
		v := newView(now, now)
		_, err = json.Marshal(v.detail("x"))
		require.NoError(t, err, f)
	}
}

// A stream for which there is no room leaves nothing behind.
func TestRefusedStreamLeavesNothing(t *testing.T) {
	c, err := New(Config{Source: &told{counted(time.Now(), fleet.Counters{})}, MaxStreams: 1})
	require.NoError(t, err)
	t.Cleanup(c.Close)
	require.True(t, c.enter())
	for _, path := range []string{"/stream/limit?name=a", "/stream/limit?name=b", "/stream/health", "/stream/holders"} {
		r := httptest.NewRequest("GET", "http://127.0.0.1"+path, nil)
		r.RemoteAddr = "127.0.0.1:1"
		w := httptest.NewRecorder()
		c.ServeHTTP(w, r)
		require.Equal(t, 503, w.Code)
	}
	require.Empty(t, c.feeds)
}

// A row with a window and without a rate lets calls pass.
func TestRowWithoutARate(t *testing.T) {
	v := newView(&fleet.Snapshot{}, &fleet.Snapshot{})
	v.include([]registry.Limit{{Name: "x", NoRate: true, Window: time.Second, WindowLimit: 5}})
	require.False(t, strings.Contains(describe(v.limit("x").total.Newest), "nothing passes"))
}

// A row is described with all of its bounds, whether an instance reports it or not.
func TestRowInWords(t *testing.T) {
	for want, row := range map[string]registry.Limit{
		"5/s, saves up 5, at most 120 in any 5 s, at most 3 at once, waits up to 500 ms": {Rate: 5, Window: 5 * time.Second, WindowLimit: 120, Concurrent: 3, MaxWait: 500 * time.Millisecond},
		"at most 1,000 in any 90 s":                                              {NoRate: true, Window: 90 * time.Second, WindowLimit: 1000},
		"at most 3 at once (waits up to 2 s)":                                    {NoRate: true, Concurrent: 3, ConcurrentWait: 2 * time.Second},
		"at most 3 at once":                                                      {NoRate: true, Concurrent: 3},
		"2/s for each key, saves up 2, does not wait":                            {Rate: 2, PerKey: true},
		"1,000,000/s, saves up 1,000,000, does not wait":                         {Rate: 1e6},
		"nothing passes":                                                         {},
		"5/s, warms up from 1.67/s in 4 s, at most 10 in any 1 d, does not wait": {Rate: 5, Warmup: 4 * time.Second, Window: 24 * time.Hour, WindowLimit: 10},
		"at most 7 in any second, does not wait":                                 {Rate: 7, Quota: true},
	} {
		v := newView(&fleet.Snapshot{}, &fleet.Snapshot{})
		row.Name = "x"
		v.include([]registry.Limit{row})
		require.Equal(t, want, describe(v.limit("x").total.Newest))
	}
	off := newView(&fleet.Snapshot{}, &fleet.Snapshot{})
	off.include([]registry.Limit{{Name: "x", Rate: 5, Disabled: true, Shadow: true}})
	require.Subset(t, off.limit("x").states(off), []string{"off", "shadow"})
}

// A limit's page shows the usage of its window and its concurrency.
func TestUses(t *testing.T) {
	now := counted(time.Unix(1_800_000_000, 0), fleet.Counters{})
	now.Instances[0].Windows = []fleet.Window{{Name: "x", Limit: 120, Used: 30, Length: 5 * time.Second}, {Name: "y", Limit: 1, Length: time.Second}}
	now.Instances[0].Semaphores = []fleet.Semaphore{{Name: "x", Permits: 3, Used: 2}}
	v := newView(now, now)
	require.Equal(t, "30 of 120 in 5 s, 2 of 3 at once", v.uses["x"])
	require.Empty(t, v.uses["z"])
	require.Equal(t, []tile{{"In the last 5 s", "30", "of 120 calls", "", 30, 120, nil}, {"At once", "2", "of 3 calls", "", 2, 3, nil}}, v.useTiles("x"))
	require.Subset(t, v.detail("x").Tiles, v.useTiles("x"))
	require.Empty(t, v.useTiles("z"))
}

// TestUseOverTime: a limit's page shows the usage of its window and its concurrency since the console was opened, in bounded
// memory.
func TestUseOverTime(t *testing.T) {
	source := &told{}
	b := newBoard(source, nil, 2*time.Second)
	look := func(after time.Duration, window int64, places int) [][]float64 {
		source.now = counted(noon.Add(after), fleet.Counters{})
		source.now.Instances[0].Windows = []fleet.Window{{Name: "x", Limit: 120, Used: window, Length: 5 * time.Second}}
		source.now.Instances[0].Semaphores = []fleet.Semaphore{{Name: "x", Permits: 3, Used: places}}
		b.read(t.Context())
		var all [][]float64
		for _, tile := range b.latest.useTiles("x") {
			all = append(all, tile.Past)
		}
		return all
	}
	require.Equal(t, [][]float64{{5}, {1}}, look(0, 5, 1))
	first := b.latest
	require.Equal(t, [][]float64{{5, 7}, {1, 3}}, look(2*time.Second, 7, 3))
	for i := range mostUses {
		look(time.Duration(4+2*i)*time.Second, int64(i), 2)
	}
	last := look(time.Hour-time.Minute, 1, 1)
	require.Equal(t, [][]float64{{1}, {1}}, last, "what was before a time in which nobody looked does not belong to it")
	require.Equal(t, []float64{5}, first.useTiles("x")[0].Past, "a view does not change")
	for i := range mostUses + 5 {
		last = look(time.Hour+time.Duration(2*i)*time.Second, int64(i), 2)
	}
	require.Len(t, last[0], mostUses)
	require.Equal(t, float64(mostUses+4), last[0][mostUses-1])
	source.now = counted(noon.Add(time.Hour+mostUses*3*time.Second), fleet.Counters{})
	b.read(t.Context())
	require.Empty(t, b.used)
}

// TestRefusedByInWords: the list, the strip and the page of a limit name which of its bounds refuses calls now.
func TestRefusedByInWords(t *testing.T) {
	past, now := counted(noon, fleet.Counters{}), counted(noon.Add(10*time.Second), fleet.Counters{Granted: 50, Refused: 293})
	look := func(all ...fleet.Refusal) *view {
		now.Instances[0].Refusals = all
		return newView(past, now)
	}
	refused := func(v *view) tile {
		tiles := v.detail("x").Tiles
		return tiles[slices.IndexFunc(tiles, func(t tile) bool { return t.Title == "Refused" })]
	}
	v := look()
	require.Equal(t, tile{Title: "Refused", Value: "29.3", Unit: "/s", Tone: "bad"}, refused(v), "an instance of an older version")
	require.Equal(t, "x refuses", v.strip()[0].Text)
	v = look(fleet.Refusal{Limit: "x", By: "window", Count: 293})
	require.Equal(t, "/s, by: window", refused(v).Unit)
	require.Equal(t, "x refuses, by: window", v.strip()[0].Text)
	require.Contains(t, string(v.limit("x").figures(v)), `"refused by: window"`)
	v = look(fleet.Refusal{Limit: "x", By: "limit", Count: 93}, fleet.Refusal{Limit: "x", By: "window", Count: 200}, fleet.Refusal{Limit: "x", By: "moon\n", Count: 1})
	require.Equal(t, `/s, by: window 20, rate 9.3, moon\n 0.1`, refused(v).Unit)
	now.Instances[0].Windows = []fleet.Window{{Name: "x", Limit: 120, Used: 120, Length: 5 * time.Second}}
	v = look(fleet.Refusal{Limit: "x", By: "limit", Count: 93}, fleet.Refusal{Limit: "x", By: "window", Count: 200})
	require.Contains(t, string(v.limit("x").figures(v)), `"refused by: rate, window · 120 of 120 in 5 s"`)
	require.Empty(t, newView(now, now).refusers("x"), "what was refused before does not refuse now")
}

// TestPrioritiesOfALimit: a limit's page has the calls by priority, the highest first, once there are calls below Normal. Refusals by a bound
// without priorities are in no row.
func TestPrioritiesOfALimit(t *testing.T) {
	past, now := counted(noon, fleet.Counters{}), counted(noon.Add(10*time.Second), fleet.Counters{Granted: 200, Refused: 493, Waited: 40, Waits: fleet.Histogram{5: 40}})
	now.Instances[0].Refusals = []fleet.Refusal{{Limit: "x", By: "limit", Count: 223}, {Limit: "x", By: "window", Count: 200}, {Limit: "x", By: "penalty", Count: 70}}
	now.Instances[0].Limits["x"].Waiting.Count = 9
	d := newView(past, now).detail("x")
	require.Nil(t, d.Priorities)
	text, err := json.Marshal(d)
	require.NoError(t, err)
	require.NotContains(t, string(text), "priorities")
	now.Instances[0].Priorities = []fleet.Priority{
		{Limit: "x", Name: "moon\n", Counters: fleet.Counters{Granted: 10}}, {Limit: "x", Name: "lowest", Waiting: 4, Counters: fleet.Counters{Refused: 200}},
		{Limit: "x", Name: "low", Waiting: 2, Counters: fleet.Counters{Granted: 100, Refused: 50, Waited: 40, Waits: fleet.Histogram{5: 40}}}, {Limit: "y", Name: "low"},
	}
	require.Equal(t, []priority{{"normal", 9, 4.3, 3, 0}, {"low", 10, 5, 2, 49.3}, {"lowest", 0, 20, 4, 0}, {`moon\n`, 1, 0, 0, 0}}, newView(past, now).detail("x").Priorities)
	for i := range 20 {
		now.Instances[0].Priorities = append(now.Instances[0].Priorities, fleet.Priority{Limit: "x", Name: fmt.Sprint(i)})
	}
	require.Len(t, newView(past, now).detail("x").Priorities, mostPriorities)
}

// TestStrip: unusual states are on top, those that concern most calls first, each with a link.
func TestStrip(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	past, now := counted(begin, fleet.Counters{}), counted(begin.Add(10*time.Second), fleet.Counters{})
	add := func(name string, l fleet.Limit) {
		past.Instances[0].Limits[name] = &fleet.Limit{Name: name}
		l.Name = name
		now.Instances[0].Limits[name] = &l
	}
	texts := func() (all []string) {
		v := newView(past, now)
		for _, n := range v.strip() {
			all = append(all, n.Tone+" "+n.Text+" "+n.Calls+" "+n.Link)
		}
		return all
	}
	delete(past.Instances[0].Limits, "x")
	delete(now.Instances[0].Limits, "x")
	add("/well", fleet.Limit{Counters: fleet.Counters{Granted: 100}})
	require.Empty(t, texts())
	add("/a", fleet.Limit{Counters: fleet.Counters{Granted: 10, Refused: 20}})
	add("/b", fleet.Limit{Counters: fleet.Counters{Granted: 10, Refused: 30}})
	add("/dry\n", fleet.Limit{Config: fleet.Config{Shadow: true}, Counters: fleet.Counters{Granted: 10, WouldRefuse: 900}})
	add("/held", fleet.Limit{Bucket: fleet.Bucket{HeldUntil: now.At.Add(90 * time.Second)}, Counters: fleet.Counters{Refused: 40}})
	add("/bad", fleet.Limit{Decider: "bad_row", Counters: fleet.Counters{Refused: 10}})
	add("/none", fleet.Limit{})
	add("/none too", fleet.Limit{})
	now.Instances[0].Store = fleet.Store{Down: true}
	now.Instances[0].Host, now.Instances[0].PID = "gw", 7
	require.Equal(t, []string{
		"bad Store unavailable: gw:7 113/s health",
		`warm /dry\n is in shadow and would refuse 90/s limit?name=%2Fdry%0A`,
		"warm 2 limits refuse 5/s ./?sort=-refused",
		"bad /held is held back for another 90 s 4/s limit?name=%2Fheld",
		"bad /bad has a row that is rejected 1/s limit?name=%2Fbad",
		"quiet 2 limits have no traffic  ./?q=no+traffic",
	}, texts())
}

// TestChartBeginsWithWholeMinutes: the minute in which the first instance began, and the present one at first, have no rate: it would be
// that of a part.
func TestChartBeginsWithWholeMinutes(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0).Truncate(fleet.Minute)
	var points []fleet.Point
	for i := range 5 {
		points = append(points, fleet.Point{Minute: begin.Add(time.Duration(i) * fleet.Minute), Published: i > 0, Granted: 300})
	}
	points[1].Granted = 20 // an instance began 4 s before its end
	rates := func(now time.Duration) (all []any) {
		for _, f := range columns(points, begin.Add(now)).Granted {
			if f == nil {
				all = append(all, nil)
			} else {
				all = append(all, *f)
			}
		}
		return all
	}
	require.Equal(t, []any{5.0, 5.0, nil}, rates(4*fleet.Minute+9*time.Second))
	require.Equal(t, []any{5.0, 5.0, 10.0}, rates(4*fleet.Minute+30*time.Second))
	points[0].Published, points[2].Published = true, false // an outage: the minute after it is a part, too
	require.Equal(t, []any{nil, nil, 10.0}, rates(4*fleet.Minute + 30*time.Second)[2:])
	points[2].Published = true
	points[1].Granted = 300
	require.Equal(t, []any{5.0, 5.0, 5.0, 5.0, 10.0}, rates(4*fleet.Minute+30*time.Second))
}

// TestRefusedWithoutKeys: a limit that refuses calls has keys, or the page says why there are none.
func TestRefusedWithoutKeys(t *testing.T) {
	now := counted(time.Unix(1_800_000_000, 0), fleet.Counters{Granted: 5})
	require.Equal(t, "No call was refused since the instances started.", newView(now, now).detail("x").NoKeys)
	now = counted(now.At, fleet.Counters{Refused: 293})
	require.Contains(t, newView(now, now).detail("x").NoKeys, "Keys are not counted for this row")
	now.Instances[0].Refused = []fleet.Key{{Limit: "x", Key: "10.0.0.7", Count: 293}}
	require.Empty(t, newView(now, now).detail("x").NoKeys)
}

// TestTilesOfALimit: a limit has the tiles of what it has, and no empty ones.
func TestTilesOfALimit(t *testing.T) {
	for _, test := range []struct {
		limit fleet.Limit
		want  []string
	}{
		{fleet.Limit{Config: fleet.Config{Kind: fleet.Quota, Rate: 5}, Bucket: fleet.Bucket{Rate: 5, Max: 5}}, []string{"Rate in force", "Granted", "Refused"}},
		{fleet.Limit{Config: fleet.Config{NoRate: true, Concurrent: 3}}, []string{"Granted", "Refused", "At once"}},
		{fleet.Limit{Config: fleet.Config{Kind: fleet.Bursty, Rate: 5, Wait: time.Second, Shadow: true}, Bucket: fleet.Bucket{Rate: 5, Max: 5}},
			[]string{"Rate in force", "Granted", "Would be refused", "Waited", "p99 wait", "Waiting now", "Saved up"}},
	} {
		now := counted(time.Unix(1_800_000_000, 0), fleet.Counters{})
		test.limit.Name = "x"
		now.Instances[0].Limits["x"] = &test.limit
		if test.limit.Config.Concurrent > 0 {
			now.Instances[0].Semaphores = []fleet.Semaphore{{Name: "x", Permits: 3, Used: 3}}
		}
		var titles []string
		for _, tile := range newView(now, now).detail("x").Tiles {
			titles = append(titles, tile.Title)
			require.NotEmpty(t, tile.Value)
		}
		require.Equal(t, test.want, titles)
	}
	require.Equal(t, []string{"", "warm", "bad", "bad"}, []string{full(7, 10), full(8, 10), full(200, 200), full(3, 2)})
}

// The oldest waiter has waited as long as its instance reported. The time since that report is no part of it: a row that waits
// half a second has no waiter of two.
func TestOldestWaiterIsAsReported(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	now := counted(begin, fleet.Counters{})
	now.At = begin.Add(1900 * time.Millisecond) // shortly before the next report
	l := now.Instances[0].Limits["x"]
	l.Waiting = fleet.Waiting{Count: 2, Since: begin.Add(-140 * time.Millisecond)}
	v := newView(now, now)
	require.Equal(t, 140.0, v.shares("x")[0].Oldest)
	var unit string
	for _, tile := range v.detail("x").Tiles {
		if tile.Title == "Waiting now" {
			unit = tile.Unit
		}
	}
	require.Equal(t, "oldest 140 ms", unit)
}
