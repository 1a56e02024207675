package fleet

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func logTo(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }

// Foreign content in an instance's keys is skipped and reported; the rest is read.
func TestAlienContent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	s := newStub("/a", "/b", "/c")
	s.count("/a", 3, 0)
	s.count("/b", 4, 0)
	s.info = Info{Host: "h", Rejected: []Rejected{{Row: "1"}}}
	p := w.publisher(s)
	w.beat(p)
	key := p.instanceKey(p.id)
	set := func(key string, values ...any) { require.NoError(t, w.client.HSet(background, key, values...).Err()) }
	set(key, "=/b", "1 2 x", "=/c", ";99:3", "=/nobody", "1", infoField, "{", semaphorePrefix+"x", "[1]", "what", "ever",
		windowPrefix+"y", `{"name":""}`, rejectedField, `{"a":1}`, "huge", strings.Repeat("x", mostFieldSize+1))
	require.NoError(t, w.client.ZAdd(background, p.instancesKey(),
		redis.Z{Score: 1e15, Member: "nobody"}, redis.Z{Score: 1e15, Member: strings.Repeat("x", 100)}, redis.Z{Score: 1e15, Member: "list"},
		redis.Z{Score: 1e15, Member: "nonsense"}).Err())
	require.NoError(t, w.client.LPush(background, p.instanceKey("list"), 1).Err())
	set(p.instanceKey("nonsense"), "beat", "-1", "started", "1e999", "seen", "")
	set(p.rowsKey(p.id), "/x", "nonsense", "", "{}")
	got := w.snapshot()
	require.Len(t, got.Instances, 1)
	i := got.Instances[0]
	require.Equal(t, int64(3), i.Limits["/a"].Granted)
	require.Zero(t, i.Limits["/b"].Granted)
	require.Len(t, i.Limits, 3)
	skipped := map[string]bool{}
	for _, e := range got.Skipped {
		require.NotEmpty(t, e.Error())
		skipped[strings.TrimPrefix(strings.TrimPrefix(e.Key, p.instancesKey()), p.prefix+"{fleet}:")+" "+e.Field] = true
	}
	for _, want := range []string{"i:" + p.id + " =/b", "i:" + p.id + " =/c", "i:" + p.id + " info", "i:" + p.id + " s:x", "i:" + p.id + " rejected", "i:" + p.id + " ",
		"i:list ", "i:nonsense ", "c:" + p.id + " /x", " "} {
		require.Contains(t, skipped, want, "%v", got.Skipped)
	}

	points, err := w.reader().History(background, "/a", time.Time{})
	require.NoError(t, err)
	hour := hourOf(points[len(points)-1].Minute.UnixMilli())
	set(p.historyKey(hour, "/b"), "0", "x", "1", "5", "2", "1 2 3 4 5 6 7 8", "3", strings.Repeat("1", 300), "r4", "-3")
	require.NoError(t, w.client.Set(background, p.historyKey(hour, "/c"), "x", 0).Err())
	require.NoError(t, w.client.Del(background, p.publishedKey(hour)).Err())
	require.NoError(t, w.client.LPush(background, p.publishedKey(hour), 1).Err())
	for _, name := range []string{"/b", "/c"} {
		_, err = w.reader().History(background, name, time.Time{})
		require.NoError(t, err)
	}
	for _, name := range []string{"", strings.Repeat("x", 600), "\xff"} {
		_, err = w.reader().History(background, name, time.Time{})
		require.Error(t, err)
	}

	// A publisher goes on in spite of it.
	s.count("/a", 1, 0)
	s.count("/c", 1, 0)
	w.beat(p)
	require.Equal(t, int64(1), w.snapshot().Total("/c").Granted)

	now := time.Now().UnixMilli()
	require.NoError(t, w.client.ZAdd(background, p.eventsKey(), redis.Z{Score: float64(now), Member: "x"}, redis.Z{Score: 1e300, Member: `1:{"kind":"x"}`},
		redis.Z{Score: float64(now), Member: fmt.Sprintf(`%d:{"kind":"what else"}`, now)}, redis.Z{Score: float64(now), Member: strings.Repeat("y", 1<<20)}).Err())
	events, err := w.reader().Events(background, time.Time{})
	require.NoError(t, err)
	require.Equal(t, []EventKind{InstanceBegins, "what else"}, kinds(events))
}

// The data of all instances takes no more memory than the bound, nor that of one key: the rest is skipped and reported. Another
// tenant of the Redis can write any amount of it.
func TestReadingIsBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	s := newStub("/a")
	s.count("/a", 1, 0)
	p := w.publisher(s)
	w.beat(p)
	now := time.Now()
	forge := func(id string, age time.Duration, fields int, value string) {
		key, at := p.instanceKey(id), now.Add(-age).UnixMilli()
		pipe := w.client.Pipeline()
		pipe.HSet(background, key, "beat", "1", "started", at, "seen", at)
		for i := range fields {
			pipe.HSet(background, key, fmt.Sprint("=forged-", i), value)
		}
		pipe.ZAdd(background, p.instancesKey(), redis.Z{Score: float64(at), Member: id})
		_, err := pipe.Exec(background)
		require.NoError(t, err)
	}
	forge("large", time.Second, 9000, strings.Repeat("x", 3<<10)) // no page of which is too large
	got := w.snapshot()
	require.Len(t, got.Instances, 1, "a key that is too large does not keep the others from being read")
	require.Len(t, got.Skipped, 1)
	require.Contains(t, got.Skipped[0].Error(), "i:large")
	require.Contains(t, got.Skipped[0].Error(), "takes more than 24 MB")

	require.NoError(t, w.client.Del(background, p.instanceKey("large")).Err())
	for i := range 10 {
		forge(fmt.Sprint("many-", i), time.Duration(i+1)*time.Second, 500, "1")
	}
	r := NewReader(w.client, w.prefix, WithReadLimit(1<<20))
	for range 2 { // also with what the reader remembers
		got, err := r.Snapshot(background)
		require.NoError(t, err)
		require.Len(t, got.Instances, 4, "the newest that fit: each forged one takes about 260 kB")
		last := got.Skipped[len(got.Skipped)-1]
		require.Contains(t, last.Error(), "of 12 instances: the data of all takes more than 1 MB")
	}
	require.Len(t, w.snapshot().Instances, 11)
	_, err := NewReader(w.client, w.prefix, WithReadLimit(0)).Snapshot(background)
	require.ErrorContains(t, err, "read limit 0")
}

// Keys of another type than expected are skipped, too, and do not prevent the rest from being read.
func TestKeysOfAnotherType(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	r := w.reader()
	for _, key := range []string{r.instancesKey(), r.eventsKey()} {
		require.NoError(t, w.client.Set(background, key, "x", 0).Err())
	}
	s, err := r.Snapshot(background)
	require.NoError(t, err)
	require.Len(t, s.Skipped, 1)
	require.WithinDuration(t, time.Now(), s.At, time.Minute)
	events, err := r.Events(background, time.Time{})
	require.NoError(t, err)
	require.Empty(t, events)
	p := w.publisher(newStub("/a"))
	require.ErrorContains(t, p.beat(background, false), "WRONGTYPE")
}

// A Redis that is full may drop one of an instance's keys. Two beats later it is there again.
func TestEvictedKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	a := newStub("/a")
	p := w.publisher(a)
	r := w.reader() // that knows the rows from before
	for _, key := range []string{p.rowsKey(p.id), p.instanceKey(p.id), p.instancesKey()} {
		a.count("/a", 1, 0)
		w.beat(p)
		_, err := r.Snapshot(background)
		require.NoError(t, err)
		require.NoError(t, w.client.Del(background, key).Err())
		w.beat(p, p)
		require.Contains(t, w.snapshot().Instances[0].Limits, "/a", key)
		s, err := r.Snapshot(background)
		require.NoError(t, err)
		require.Contains(t, s.Instances[0].Limits, "/a", key)
	}
	require.Equal(t, int64(3), w.history("/a").Granted)
}

// A prefix with braces would spread the keys over a cluster.
func TestBadPrefix(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	w.prefix = WithKeyPrefix("a{b}")
	_, err := NewPublisher(w.client, newStub(), w.prefix)
	require.Error(t, err)
	_, err = w.reader().Snapshot(background)
	require.Error(t, err)
	_, err = w.reader().Events(background, time.Time{})
	require.Error(t, err)
	_, err = w.reader().History(background, "/a", time.Time{})
	require.Error(t, err)
	_, err = NewPublisher(nil, newStub())
	require.Error(t, err)
}

// Reading an instance does not panic whatever its fields contain, the result is bounded, and it can be written and read again unchanged.
func FuzzDecode(f *testing.F) {
	f.Add("120 31 5 0 0 0 4500;3:2 5:3;0 5 2.25 5 7012 0 3 7", `{"rate":5}`, `{"host":"h","clock":1}`, `[{"row":"1"}]`, "1:{\"kind\":\"x\"}")
	f.Add("1;;0 5", `{"rate":5}`, `{}`, `[{"limit":"/a","priority":"low","counters":{"Granted":-1,"Waits":[1]}}]`, "")
	f.Add(";;", `{"rate":1e400}`, `{"loads":{"last":"2020-01-01T00:00:00Z"}}`, `[{"count":-1}]`, "")
	f.Add("9999999999999999 1;0:1;5 1e308 1e308 1 1 1 1 1", "null", "null", "null", ":")
	f.Fuzz(func(t *testing.T, record, row, info, list, event string) {
		rows := decoder{fields: map[string]string{"/a": row, "": row}}
		d := decoder{
			fields: map[string]string{
				"beat": "1", "started": "1700000000000", "seen": "1700000001000", "=/a": record, "=": record, infoField: info, rejectedField: list, refusedField: list, refusalsField: list, lowerField: list, faultsField: list,
				semaphorePrefix + "s": info, windowPrefix + "w": info, semaphorePrefix: list,
			},
			rows: rows.limits(),
		}
		i := d.instance("x")
		if i == nil {
			t.Fatal("its own fields are right")
		}
		if len(i.Rejected) > MostRejected || len(i.Refused) > MostKeys || len(i.Refusals) > MostRefusals || len(i.Priorities) > MostPriorities || len(i.Faults) > MostFaults || len(i.Limits) > 1 || len(d.skipped) > mostSkipped {
			t.Fatal("more than there may be")
		}
		if l := i.Limits["/a"]; l != nil {
			k := clock{i.Started}
			again := Limit{Name: l.Name, Config: l.Config}
			if err := parseRecord(string(appendRecord(nil, l, k)), &again, k); err != nil {
				t.Fatal(err)
			}
			again.Bucket.Stored = l.Bucket.Stored // is rounded
			if again != *l {
				t.Fatalf("%+v\n%+v", *l, again)
			}
			_ = l.Quantile(0.99)
			if c, ok := l.Config.Curve(l.Bucket.Rate); ok {
				_ = c.Interval(l.Bucket.Stored)
			}
		}
		s := Snapshot{At: i.Beat, Instances: []Instance{*i}}
		_ = Rates(&Snapshot{At: i.Beat.Add(-time.Second)}, &s)
		_ = RatesByPriority(&Snapshot{At: i.Beat.Add(-time.Second)}, &s, "/a")
		if _, err := json.Marshal(s.Totals()); err != nil && !strings.Contains(err.Error(), "year outside") {
			t.Fatal(err)
		}
		_, _ = parseEvent(member{event, 5})
		_ = fill([]Point{{Minute: time.Unix(0, 0)}}, 0, []string{record, "2", "0", record, "x"})
	})
}
