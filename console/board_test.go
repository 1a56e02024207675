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

// told is a Source that says what it is told to.
type told struct{ now *fleet.Snapshot }

func (s *told) Snapshot(context.Context) (*fleet.Snapshot, error) { return s.now, nil }
func (*told) History(context.Context, string, time.Time) ([]fleet.Point, error) {
	return nil, nil
}
func (*told) Events(context.Context, time.Time) ([]fleet.Event, error) { return nil, nil }

// When nobody has looked for an hour, that hour is not what happens now.
func TestRatesAreOfThePresent(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	source := &told{}
	b := newBoard(source, nil, 2*time.Second)
	look := func(after time.Duration, granted int64) *view {
		source.now = counted(begin.Add(after), fleet.Counters{Granted: granted})
		b.read(t.Context())
		return b.seen
	}
	look(0, 0)
	require.Equal(t, 10.0, look(2*time.Second, 20).limit("x").through())
	require.Len(t, b.past, 1)
	v := look(time.Hour, 36_000)
	require.False(t, v.measured(), "10/s in the last hour say nothing of the present")
	require.Empty(t, b.past)
	require.Equal(t, 1.0, look(time.Hour+2*time.Second, 36_002).limit("x").through())
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
		return cmp.Or(cmp.Compare(b.turned(), a.turned()), cmp.Compare(b.through(), a.through()), cmp.Compare(a.name(), b.name()))
	}))
	require.Positive(t, all[0].turned())
	require.Equal(t, all[:50], v.ranked(50))
}

// What is remembered of limits goes with them.
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
	require.ElementsMatch(t, []string{"x", "own 1"}, slices.Collect(maps.Keys(b.past)))
}

// That an instance does not tell of all its limits is said on every page, and how many on Health.
func TestTooManyLimitsAreTold(t *testing.T) {
	now := counted(time.Unix(1_800_000_000, 0), fleet.Counters{})
	now.Instances[0].MoreLimits, now.Instances[0].Crowded = 2000, true
	v := newView(now, now)
	require.Contains(t, strings.Join(v.problems(), "\n"), "does not tell of all its limits: see Health")
	said := v.instances[0].health(v.at).Loads
	require.Contains(t, said, "2000 limits are not shown: an instance tells of at most 10000")
	require.Contains(t, said, "counted with all others")
}

// A limit in shadow has the same figures in all places: what would be refused is refused, and not granted.
func TestShadowHasTheSameFiguresEverywhere(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	c := fleet.Counters{Granted: 50, Passed: 10, WouldRefuse: 30, Refused: 20}
	v := newView(counted(begin, fleet.Counters{}), counted(begin.Add(10*time.Second), c))
	l := v.limit("x")
	require.Equal(t, []float64{6, 5}, []float64{l.through(), l.turned()})
	require.Equal(t, []float64{6, 5}, []float64{v.instances[0].granted, v.instances[0].refused})
	share := v.shares("x")[0]
	require.Equal(t, []float64{6, 5}, []float64{share.Granted, share.Refused})
	h := columns([]fleet.Point{{Minute: begin, Published: true, Granted: 300, Passed: 60, WouldRefuse: 180, Refused: 120}}, begin.Add(time.Hour))
	require.Equal(t, []float64{6, 5}, []float64{*h.Granted[0], *h.Refused[0]})
}

// Whatever numbers are in Redis, what is sent can be encoded.
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

// A row is told with all that it limits to, whether an instance has told of it or not.
func TestRowInWords(t *testing.T) {
	for want, row := range map[string]registry.Limit{
		"5/s, at most 120 in any 5 s, at most 3 under way, waits up to 0.5 s": {Rate: 5, Window: 5 * time.Second, WindowLimit: 120, Concurrent: 3, Cache: 0.5},
		"any rate, at most 1000 in any 90 s":                                  {NoRate: true, Window: 90 * time.Second, WindowLimit: 1000},
		"any rate, at most 3 under way":                                       {NoRate: true, Concurrent: 3},
		"2/s for each key, no waiting":                                        {Rate: 2, PerKey: true},
		"0/s: nothing passes":                                                 {},
		"5/s, warms up in 4 s, at most 10 in any 1 d, no waiting":             {Rate: 5, Warmup: 4 * time.Second, Window: 24 * time.Hour, WindowLimit: 10},
		"7/s, quota, no waiting":                                              {Rate: 7, Quota: true},
	} {
		v := newView(&fleet.Snapshot{}, &fleet.Snapshot{})
		row.Name = "x"
		v.include([]registry.Limit{row})
		require.Equal(t, want, describe(v.limit("x").total.Newest))
	}
	off := newView(&fleet.Snapshot{}, &fleet.Snapshot{})
	off.include([]registry.Limit{{Name: "x", Rate: 5, Disabled: true, Shadow: true}})
	require.Subset(t, off.limit("x").words(off), []string{"off", "shadow"})
}

// One limit's page says how much of its window and its concurrency is in use.
func TestUses(t *testing.T) {
	now := counted(time.Unix(1_800_000_000, 0), fleet.Counters{})
	now.Instances[0].Windows = []fleet.Window{{Name: "x", Limit: 120, Used: 30, Length: 5 * time.Second}, {Name: "y", Limit: 1, Length: time.Second}}
	now.Instances[0].Semaphores = []fleet.Semaphore{{Name: "x", Permits: 3, Used: 2}}
	v := newView(now, now)
	require.Equal(t, "30 of 120 calls in the last 5 s, 2 of 3 calls under way", v.detail("x").Uses)
	require.Empty(t, v.detail("z").Uses)
}
