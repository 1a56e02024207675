package fleet

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// sized counts the bytes written.
type sized struct {
	Client
	bytes, writes int
}

func (s *sized) Process(ctx context.Context, cmd redis.Cmder) error {
	for _, arg := range cmd.Args() {
		text := fmt.Sprint(arg)
		s.bytes += len(text) + len(strconv.Itoa(len(text))) + 5 // as Redis reads it
	}
	s.writes++
	return s.Client.Process(ctx, cmd)
}

// many returns a source of the given number of limits, of which busy are called at each heartbeat.
func many(limits, busy int) (s *stub, call func()) {
	var names []string
	for i := range limits {
		names = append(names, fmt.Sprintf("/partner/%05d/availability", i))
	}
	s = newStub(names...)
	n := int64(0)
	return s, func() {
		n++
		for i := range busy {
			l := s.limits[names[i]]
			l.Granted += 10 + n%3
			l.Refused += n % 5
			l.Waited += n % 2
			l.WaitSum += 13 * time.Millisecond
			l.Waits[4] += n % 2
			l.Bucket.Stored = float64(n%7) / 3
			l.Bucket.Max, l.Bucket.At = 5, time.Now()
		}
	}
}

// memory is what a key takes in Redis.
func (w *world) memory(key string) int64 {
	w.t.Helper()
	n, err := w.client.Do(background, "MEMORY", "USAGE", key, "SAMPLES", "0").Int64()
	require.NoError(w.t, err)
	return n
}

// What a beat takes follows from how many limits have calls, not from how many there are; and a limit's day has a bound.
func TestCost(t *testing.T) {
	server := redistest.Start(t)
	w := newWorld(t, server)
	w.prefix = WithKeyPrefix("tokenbucket:")
	for _, size := range []struct{ limits, busy, first, beat int }{
		{10, 10, 15_000, 2_500}, {10_000, 10, 3_000_000, 2_500}, {10_000, 1000, 3_000_000, 200_000},
	} {
		require.NoError(t, w.client.FlushAll(background).Err())
		s, call := many(size.limits, size.busy)
		p := w.publisher(s)
		counting := &sized{Client: w.client}
		p.client = counting
		call()
		w.beat(p)
		first := counting.bytes
		call()
		w.beat(p)
		counting.bytes, counting.writes = 0, 0
		server, own := w.busy()
		const beats = 4
		for range beats {
			call()
			w.beat(p)
		}
		server2, own2 := w.busy()
		t.Logf("%d limits, %d of them busy: first beat %d bytes, then %d in %.1f writes, %v of Redis and %v here; the instance %d bytes, its rows %d",
			size.limits, size.busy, first, counting.bytes/beats, float64(counting.writes)/beats, (server2-server)/beats, (own2-own)/beats, w.memory(p.instanceKey(p.id)), w.memory(p.rowsKey(p.id)))
		require.LessOrEqual(t, first, size.first)
		require.LessOrEqual(t, counting.bytes/beats, size.beat)
	}
}

// busy is the processor time that Redis and this process have used: other than the time that passes, it is the same on a busy machine.
func (w *world) busy() (server, own time.Duration) {
	w.t.Helper()
	info, err := w.client.Info(background, "cpu").Result()
	require.NoError(w.t, err)
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if seconds, err := strconv.ParseFloat(value, 64); err == nil && (name == "used_cpu_user" || name == "used_cpu_sys") {
			server += time.Duration(seconds * float64(time.Second))
		}
	}
	return server, processorTime(w.t)
}

// A day of a limit that has calls in each minute.
func TestLimitDay(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	w := newWorld(t, server)
	r := w.reader()
	name := "/partner/00017/availability"
	now := time.Now()
	for kind, point := range map[string]string{"busy": "12000 3100 450 0 0 0 45000123", "usual": "312 7 12 0 0 0 40213", "quiet": "3"} {
		total := int64(0)
		for h := range int64(25) {
			key := r.historyKey(hourOf(now.UnixMilli())-h, name+kind)
			fields := []any{"r0", "200"}
			for m := range 60 {
				fields = append(fields, m, point)
			}
			require.NoError(t, w.client.HSet(background, key, fields...).Err())
			require.NoError(t, w.client.Expire(background, key, 25*time.Hour).Err())
			encoding, err := w.client.ObjectEncoding(background, key).Result()
			require.NoError(t, err)
			require.Equal(t, "listpack", encoding, "a hash table would take several times as much")
			total += w.memory(key)
		}
		t.Logf("%s: %d bytes", kind, total)
		require.Less(t, total, int64(60_000))
		points, err := r.History(background, name+kind, time.Time{})
		require.NoError(t, err)
		require.Len(t, points, 1440)
		for _, p := range points[1:] {
			require.EqualValues(t, 200, p.Rate)
			require.Positive(t, p.Granted)
		}
		points, err = r.History(background, name+kind, now.Add(-10*time.Minute))
		require.NoError(t, err)
		require.InDelta(t, 11, len(points), 1)
	}
}

// All keys of a fleet are in one slot of a cluster, also of limits whose names have braces.
func TestOneSlot(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	a := newStub("/a", "{b}", "c}{d", "}")
	for name := range a.limits {
		a.count(name, 1, 1)
	}
	seen := map[int]bool{}
	lister := &listed{Client: w.client}
	p := w.publisher(a)
	p.client = lister
	w.beat(p)
	r := w.reader()
	r.client = lister
	s, err := r.Snapshot(background)
	require.NoError(t, err)
	require.Len(t, s.Instances[0].Limits, 4)
	for name := range a.limits {
		_, err := r.History(background, name, time.Time{})
		require.NoError(t, err)
	}
	_, err = r.Events(background, time.Time{})
	require.NoError(t, err)
	require.Greater(t, len(lister.keys), 200)
	for _, key := range lister.keys {
		begin := strings.IndexByte(key, '{')
		require.Equal(t, "{fleet}", key[begin:begin+strings.IndexByte(key[begin:], '}')+1], key)
		seen[begin] = true
	}
	require.Len(t, seen, 1)
}

// listed notes the keys of scripts.
type listed struct {
	Client
	keys []string
}

func (l *listed) Process(ctx context.Context, cmd redis.Cmder) error {
	if args := cmd.Args(); len(args) > 2 && strings.HasPrefix(strings.ToLower(args[0].(string)), "eval") {
		for _, key := range args[3 : 3+args[2].(int)] {
			l.keys = append(l.keys, key.(string))
		}
	}
	return l.Client.Process(ctx, cmd)
}

// Reading three instances with 10,000 limits each, of which 1,000 have calls.
func BenchmarkSnapshot(b *testing.B) {
	w := newWorld(b, redistest.Shared(b))
	for range 3 {
		s, call := many(10_000, 1000)
		call()
		p := w.publisher(s)
		require.NoError(b, redistest.Poll(time.Minute, func() error { return p.beat(background, false) })) // the first may take long
	}
	r := w.reader()
	_, err := r.Snapshot(background)
	require.NoError(b, err)
	server, own := w.busy()
	b.ReportAllocs()
	for b.Loop() {
		s, err := r.Snapshot(background)
		require.NoError(b, err)
		require.Len(b, s.Instances, 3)
	}
	server2, own2 := w.busy()
	b.ReportMetric(float64((server2-server).Microseconds())/float64(b.N), "redis-µs/op")
	b.ReportMetric(float64((own2-own).Microseconds())/float64(b.N), "cpu-µs/op")
}
