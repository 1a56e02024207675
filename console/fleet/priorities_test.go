package fleet

import (
	"maps"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Calls that the rate has decided with a priority below Normal are counted by priority, too, with their waits and waiters.
func TestMeterCountsPriorities(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := 1.0
		m, limits := metered(t, registry.Static{
			{Name: "/a", Rate: 20, Burst: &one, MaxWait: 500 * time.Millisecond}, {Name: "/low", Rate: 5, MaxWait: 500 * time.Millisecond, Priority: tokenbucket.Low}, {Name: "/normal", Rate: 5},
			{Name: "/window", Rate: 5, Window: time.Hour, WindowLimit: 1},
		}, registry.WithLocalWindows())
		var calling sync.WaitGroup
		enter := func(p tokenbucket.Priority, name string) {
			ctx := gate.WithPriority(t.Context(), p)
			calling.Go(func() { _, _ = limits.Enter(ctx, name) })
			synctest.Wait()
		}
		began := time.Now()
		for range 3 { // of Normal, the first has the stored permit, and the others wait for 100 and 150 ms; Lowest waits for 50 ms, and looks no further
			enter(tokenbucket.Normal, "/a")
			enter(tokenbucket.Lowest, "/a")
		}
		enter(tokenbucket.Normal, "/low")
		enter(tokenbucket.Normal, "/normal")
		enter(tokenbucket.Low, "/window")
		enter(tokenbucket.Low, "/window") // the window refuses it
		time.Sleep(20 * time.Millisecond)
		r, all := report(t, m)
		require.Equal(t, []Priority{
			{Limit: "/a", Name: "lowest", Waiting: 1, Counters: Counters{Granted: 1, Waited: 1, WaitSum: 50 * time.Millisecond, Refused: 2, Waits: Histogram{5: 1}}},
			{Limit: "/low", Name: "low", Counters: Counters{Granted: 1}}, {Limit: "/window", Name: "low", Counters: Counters{Granted: 1}},
		}, r.Info.Priorities)
		require.Equal(t, Counters{Granted: 4, Waited: 3, WaitSum: 300 * time.Millisecond, Refused: 2, Waits: Histogram{5: 1, 6: 1, 7: 1}}, all["/a"].Counters)
		require.Equal(t, Waiting{3, began}, all["/a"].Waiting)
		require.Equal(t, Counters{Granted: 1}, all["/low"].Counters)
		require.Equal(t, Counters{Granted: 1, Refused: 1}, all["/window"].Counters)
		calling.Wait()
		r, all = report(t, m)
		require.Zero(t, r.Info.Priorities[0].Waiting)
		require.Zero(t, all["/a"].Waiting)
	})
}

// Each outcome of a call counts for its priority. A priority above the known ones counts as Lowest.
func TestMeterCountsOutcomesByPriority(t *testing.T) {
	m := NewMeter()
	for _, p := range []tokenbucket.Priority{tokenbucket.Normal, tokenbucket.Low, 7} {
		for _, d := range []tokenbucket.Decision{
			{Granted: true, Wait: time.Minute}, {}, {Err: tokenbucket.ErrStoreTimeout}, {By: tokenbucket.BySwitch, Granted: true}, {Shadow: true}, {Err: tokenbucket.ErrStoreTimeout, Shadow: true},
		} {
			d.Bucket, d.Priority = "a", p
			m.decided(t.Context(), d)
		}
	}
	r, all := report(t, m)
	each := Counters{Granted: 1, Waited: 1, WaitSum: time.Minute, Refused: 1, Failed: 1, Passed: 2, WouldRefuse: 1, Waits: Histogram{13: 1}}
	require.Equal(t, []Priority{{"a", "low", each, 0}, {"a", "lowest", each, 0}}, r.Info.Priorities)
	require.Equal(t, each.Plus(&each).Plus(ref(each)), all["a"].Counters)
	require.EqualValues(t, 18, m.of("a").calls())
	require.Equal(t, []Refusal{{"a", "limit", 3}}, r.Info.Refusals)
}

// Callers of Normal publish what they did before there were priorities. Those of a lower one add one field, and change no other.
func TestPrioritiesAreAFieldOfTheirOwn(t *testing.T) {
	published := func(p tokenbucket.Priority) (fields map[string]string) {
		synctest.Test(t, func(t *testing.T) {
			m, limits := metered(t, registry.Static{{Name: "/a", Rate: 2, MaxWait: 100 * time.Millisecond}, {Name: "/b", Rate: 2}})
			began := time.Now()
			for range 3 {
				_, err := limits.Enter(gate.WithPriority(t.Context(), p), "/a")
				require.NoError(t, err)
			}
			_, err := limits.Enter(t.Context(), "/b")
			require.NoError(t, err)
			r, _ := report(t, m)
			l := newLedger()
			l.note(r, clock{began})
			fields = map[string]string{}
			for name, f := range l.fields.all {
				fields[name] = f.now
			}
			for name, e := range l.limits {
				fields[recordPrefix+name] = e.record
			}
			for name, f := range l.rows.all {
				fields["row "+name] = f.now
			}
		})
		return fields
	}
	normal, lowest := published(tokenbucket.Normal), published(tokenbucket.Lowest)
	require.Equal(t, "1 2;;0 2 0 2 1", normal["=/a"])
	require.Equal(t, `{"kind":"bursty","rate":2,"wait":100000000}`, normal["row /a"])
	require.Equal(t, `[{"limit":"/a","by":"limit","count":2}]`, normal[refusalsField])
	require.Contains(t, lowest, lowerField)
	delete(lowest, lowerField)
	require.Equal(t, normal, lowest)
	require.ElementsMatch(t, []string{infoField, refusalsField, "=/a", "=/b", "row /a", "row /b"}, keysOf(normal))
}

func keysOf(m map[string]string) (all []string) {
	for k := range maps.Keys(m) {
		all = append(all, k)
	}
	return all
}

// A Reader reads the priorities that a Publisher has written, and one of an older version reads the rest.
func TestReadersOfPriorities(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	s := newStub("/a")
	s.count("/a", 3, 4)
	s.info = Info{Host: "h", Priorities: []Priority{{Limit: "/a", Name: "low", Waiting: 2, Counters: Counters{Granted: 1, Refused: 4, Waited: 1, WaitSum: time.Second, Waits: Histogram{9: 1}}}}}
	p := w.publisher(s)
	w.beat(p)
	require.Equal(t, s.info.Priorities, w.snapshot().Instances[0].Priorities)
	fields, err := w.client.HGetAll(background, p.instanceKey(p.id)).Result()
	require.NoError(t, err)
	require.NotContains(t, fields[infoField], "priorities")
	require.Regexp(t, olderRecord, fields["=/a"])
	for field := range fields {
		require.Contains(t, []string{"beat", "started", "seen", "ended", infoField, rowsField, "=/a", lowerField}, field)
	}
	s.info.Priorities = nil
	w.beat(p)
	require.Empty(t, w.snapshot().Instances[0].Priorities)
}

// A Reader reads priorities that have more than it knows, and skips those that it cannot decode.
func TestPrioritiesOfOtherVersions(t *testing.T) {
	read := func(priorities string) (*Instance, []*DataError) {
		rows := decoder{fields: map[string]string{"/a": `{"rate":5}`}}
		d := decoder{rows: rows.limits(), fields: map[string]string{"beat": "1", "started": "1700000000000", "seen": "1700000001000", "=/a": "3 4", lowerField: priorities}}
		i := d.instance("x")
		require.NotNil(t, i)
		require.EqualValues(t, 4, i.Limits["/a"].Refused)
		return i, d.skipped
	}
	newer, skipped := read(`[{"limit":"/a","priority":"moon","counters":{"Granted":4,"Refused":-1,"Later":1},"waiting":-2,"share":0.5}]`)
	require.Equal(t, []Priority{{Limit: "/a", Name: "moon", Counters: Counters{Granted: 4}}}, newer.Priorities)
	require.Empty(t, skipped)
	_, skipped = read(`{"another":"form"}`)
	require.Len(t, skipped, 1, "and the rest of the instance is read")
}

// Rates by priority are sums over the instances. Normal has the rest: also the calls of instances of older versions, and of those whose
// earlier counts are not known.
func TestRatesByPriority(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	one := func(id string, after time.Duration, l Limit, all ...Priority) Instance {
		l.Name, l.Config.Wait = "/a", time.Second
		return Instance{ID: id, Beat: at.Add(after), Info: Info{Started: at.Add(-time.Hour), Priorities: all}, Limits: map[string]*Limit{"/a": &l}}
	}
	limit := func(granted, refused int64, waiting int) Limit {
		return Limit{Counters: Counters{Granted: granted, Refused: refused}, Waiting: Waiting{Count: waiting}}
	}
	lower := func(limit, name string, granted, refused int64, waiting int) Priority {
		return Priority{limit, name, Counters{Granted: granted, Refused: refused}, waiting}
	}
	full := make([]Priority, MostPriorities)
	for i := range full {
		full[i] = lower("/"+strconv.Itoa(i), "low", 10, 0, 0)
	}
	before := &Snapshot{At: at, Instances: []Instance{
		one("a", 0, limit(100, 10, 0), lower("/a", "low", 50, 5, 0)), one("b", 0, limit(100, 0, 0)), one("old", 0, limit(100, 0, 0)), one("full", 0, limit(100, 0, 0), full...),
		one("silent", 0, limit(100, 0, 0)),
	}}
	now := &Snapshot{At: at.Add(10 * time.Second), Instances: []Instance{
		one("a", 10*time.Second, limit(200, 40, 9), lower("/a", "low", 70, 25, 3), lower("/b", "low", 1000, 0, 5)),
		one("b", 10*time.Second, limit(150, 0, 2), lower("/a", "low", 30, 0, 1), lower("/a", "lowest", 10, 0, 1)),
		one("old", 10*time.Second, limit(110, 0, 4)), one("full", 10*time.Second, limit(110, 0, 0), lower("/a", "low", 1000, 0, 0)),
		one("silent", 0, limit(100, 0, 100), lower("/a", "lowest", 0, 0, 100)),
	}}
	all := RatesByPriority(before, now, "/a")
	require.Len(t, all, 3)
	for name, want := range map[string]PriorityRate{
		"normal": {Rate: Rate{Granted: 11, Refused: 1}, Waiting: 10}, "low": {Rate: Rate{Granted: 5, Refused: 2}, Waiting: 4}, "lowest": {Rate: Rate{Granted: 1}, Waiting: 1},
	} {
		require.InDelta(t, want.Granted, all[name].Granted, 1e-9, name)
		require.InDelta(t, want.Refused, all[name].Refused, 1e-9, name)
		require.Equal(t, want.Waiting, all[name].Waiting, name)
	}
	require.Nil(t, RatesByPriority(before, now, "/nobody"))
	now.Instances = now.Instances[2:3]
	require.Nil(t, RatesByPriority(before, now, "/a"), "an instance of an older version")
}

// The p99 of a priority is that of its own waits, and no longer than the row allows.
func TestWaitsByPriority(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	instance := func(after time.Duration, c Counters, all ...Priority) *Snapshot {
		return &Snapshot{At: at.Add(after), Instances: []Instance{{ID: "a", Beat: at.Add(after), Info: Info{Started: at.Add(-time.Hour), Priorities: all},
			Limits: map[string]*Limit{"/a": {Name: "/a", Config: Config{Wait: 300 * time.Millisecond}, Counters: c}}}}}
	}
	low := Counters{Granted: 100, Waited: 100, Waits: Histogram{2: 100}}
	all := RatesByPriority(instance(0, Counters{}), instance(10*time.Second, low.Plus(&Counters{Granted: 100, Waited: 100, Waits: Histogram{8: 100}}), Priority{Limit: "/a", Name: "low", Counters: low}), "/a")
	require.InDelta(t, 300*time.Millisecond, all["normal"].P99, float64(2*time.Millisecond))
	require.InDelta(t, 5*time.Millisecond, all["low"].P99, float64(100*time.Microsecond))
}
