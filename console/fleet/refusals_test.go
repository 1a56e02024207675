package fleet

import (
	"regexp"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Each refusal counts for the bound that refuses: the rate, the window, the concurrency, a penalty, a rate of 0 or a bad row.
func TestRefusalsByBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := 1.0
		source := &table{table: registry.Table{
			Limits: []registry.Limit{
				{Name: "/window", Rate: 100, MaxWait: time.Second, Window: time.Hour, WindowLimit: 3},
				{Name: "/rate", Rate: 0.001, Burst: &one, Window: time.Hour, WindowLimit: 1000},
				{Name: "/places", NoRate: true, Concurrent: 2},
				{Name: "/zero"},
				{Name: "/held", Rate: 100},
				{Name: "/shadow", NoRate: true, Concurrent: 1, Shadow: true},
			},
			Rejected: []registry.RowError{{Row: "9", Name: "/bad", Field: "rate", Value: "x", Want: "a number"}},
		}}
		m, limits := metered(t, source, registry.WithLocalWindows(), registry.WithLocalSemaphores())
		enter := func(name string, times int) {
			for range times {
				a, err := limits.Enter(t.Context(), name)
				require.NoError(t, err)
				t.Cleanup(a.Leave)
			}
		}
		enter("/window", 8)
		enter("/rate", 5)
		enter("/places", 9)
		enter("/zero", 2)
		enter("/bad", 1)
		enter("/shadow", 4)
		enter("/held", 1)
		require.NoError(t, limits.Penalize(t.Context(), "/held", time.Hour)) // by another instance: this one reads it from the bucket
		enter("/held", 1)                                                    // its bucket is looked at since there was a call
		report(t, m)
		enter("/held", 6)
		r, _ := report(t, m)
		require.Equal(t, []Refusal{
			{"/places", "concurrency", 7}, {"/held", "penalty", 6}, {"/window", "window", 5}, {"/rate", "limit", 4}, {"/zero", "zero", 2}, {"/bad", "bad_row", 1},
			{"/held", "limit", 1},
		}, r.Info.Refusals)
	})
}

// A penalty by this instance counts from the moment of the call.
func TestRefusalsOfAPenalty(t *testing.T) {
	m := NewMeter()
	c := m.of("/a")
	require.Equal(t, gate.ByLimit, c.byRate(time.Now()))
	m.Penalized("/a", time.Now().Add(time.Hour))
	require.Equal(t, gate.ByPenalty, c.byRate(time.Now()))
	require.Equal(t, gate.ByLimit, c.byRate(time.Now().Add(2*time.Hour)))
}

// Refusals are rates of the increase of the counts. A count that is new among the most frequent may be an old one.
func TestRefusedBy(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	one := func(id string, after time.Duration, all ...Refusal) Instance {
		return Instance{ID: id, Beat: at.Add(after), Info: Info{Refusals: all, Started: at.Add(-time.Hour)}}
	}
	full := make([]Refusal, MostRefusals)
	for i := range full {
		full[i] = Refusal{"/" + strconv.Itoa(i), "limit", 10}
	}
	before := &Snapshot{At: at, Instances: []Instance{one("a", 0, Refusal{"/x", "window", 100}), one("full", 0, full...), one("old", 0)}}
	now := &Snapshot{At: at.Add(10 * time.Second), Instances: []Instance{
		one("a", 10*time.Second, Refusal{"/x", "window", 150}, Refusal{"/x", "limit", 20}), one("full", 10*time.Second, Refusal{"/y", "limit", 1000}, Refusal{"/1", "limit", 20}),
		one("old", 10*time.Second), one("long known", 10*time.Second, Refusal{"/x", "window", 1e6})}}
	require.Equal(t, map[string]map[string]float64{"/x": {"window": 5, "limit": 2}, "/1": {"limit": 1}}, RefusedBy(before, now))
	require.Empty(t, RefusedBy(now, now))
}

// olderRecord is what a Reader without refusals takes for a record: up to 7 counters, waits, up to 8 figures of its state.
var olderRecord = regexp.MustCompile(`^\d*( \d+){0,6}(;(\d+:\d+( \d+:\d+)*)?(;[\d.]*( [\d.]+){0,7})?)?$`)

// A Reader of an older version reads the records of an instance that publishes refusals: they are in a field that it does not look at.
func TestOlderReaderReadsRefusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	s := newStub("/a")
	s.limits["/a"].Waits[2], s.limits["/a"].Waiting.Count = 3, 2
	s.info = Info{Host: "h", Refusals: []Refusal{{"/a", "window", 4}}}
	s.count("/a", 3, 4)
	p := w.publisher(s)
	w.beat(p)
	require.Equal(t, s.info.Refusals, w.snapshot().Instances[0].Refusals)
	fields, err := w.client.HGetAll(background, p.instanceKey(p.id)).Result()
	require.NoError(t, err)
	require.JSONEq(t, `[{"limit":"/a","by":"window","count":4}]`, fields[refusalsField])
	require.NotContains(t, fields[infoField], "refusals")
	require.Regexp(t, olderRecord, fields["=/a"])
	for field := range fields {
		require.Contains(t, []string{"beat", "started", "seen", "ended", infoField, rowsField, "=/a", refusalsField}, field)
	}
	require.NotContains(t, []string{recordPrefix, semaphorePrefix, windowPrefix}, refusalsField[:1])
	require.NotContains(t, []string{semaphorePrefix, windowPrefix}, refusalsField[:2])
}

// A Reader of this version reads instances without refusals, and instances whose refusals have more than it knows.
func TestReaderOfOtherVersions(t *testing.T) {
	read := func(refusals string) (*Instance, []*DataError) {
		rows := decoder{fields: map[string]string{"/a": `{"rate":5,"later":1}`}}
		d := decoder{rows: rows.limits(), fields: map[string]string{"beat": "1", "started": "1700000000000", "seen": "1700000001000", "ended": "",
			infoField: `{"host":"h","clock":1700000000000,"later":{}}`, "=/a": "3 4;2:3;0 5", "later": "x"}}
		if refusals != "" {
			d.fields[refusalsField] = refusals
		}
		i := d.instance("x")
		require.NotNil(t, i)
		require.Equal(t, "h", i.Host)
		require.EqualValues(t, 4, i.Limits["/a"].Refused)
		return i, d.skipped
	}
	older, skipped := read("")
	require.Empty(t, older.Refusals)
	require.Empty(t, skipped)
	newer, skipped := read(`[{"limit":"/a","by":"moon","count":4,"share":0.5}]`)
	require.Equal(t, []Refusal{{"/a", "moon", 4}}, newer.Refusals)
	require.Empty(t, skipped)
	_, skipped = read(`{"another":"form"}`)
	require.Len(t, skipped, 1, "and the rest of the instance is read")
}
