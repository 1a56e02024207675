package fleet

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

var background = context.Background()

// stub is a source with settable content.
type stub struct {
	mu     sync.Mutex
	info   Info
	limits map[string]*Limit
	events []Event
}

func newStub(names ...string) *stub {
	s := &stub{limits: map[string]*Limit{}}
	for _, name := range names {
		s.limits[name] = &Limit{Name: name, Decider: "limit", Config: Config{Kind: Bursty, Rate: 5, Version: 1}, Bucket: Bucket{Rate: 5}}
	}
	return s
}

func (s *stub) Report(_ context.Context, to *Report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	to.Info = s.info
	for _, name := range slices.Sorted(maps.Keys(s.limits)) {
		to.Limits = append(to.Limits, *s.limits[name])
	}
	to.Events = append(to.Events, s.events...)
	s.events = nil
}

// count notes calls.
func (s *stub) count(name string, granted, refused int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limits[name].Granted += granted
	s.limits[name].Refused += refused
}

// fake is a clock that goes on by itself, and can be moved.
type fake struct {
	mu sync.Mutex
	by time.Duration
}

func (f *fake) now() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return time.Now().Add(f.by)
}

func (f *fake) move(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.by += d
}

// world is a Redis with keys of its own, or a part of a shared one.
type world struct {
	t      testing.TB
	client *redis.Client
	prefix Option
	clock  *fake
}

func newWorld(t testing.TB, server *redistest.Server) *world {
	return &world{t, server.Client(t, func(o *redis.Options) { o.MaxRetries, o.ContextTimeoutEnabled, o.DialerRetries = -1, true, 1 }), WithKeyPrefix(fmt.Sprintf("%s:%d:", t.Name(), rand.Uint64())), &fake{}}
}

// publisher returns a Publisher that beats on demand.
func (w *world) publisher(s Source) *Publisher {
	w.t.Helper()
	p, err := newPublisher(w.client, s, w.clock.now, []Option{w.prefix, WithLogger(slog.New(slog.DiscardHandler))})
	require.NoError(w.t, err)
	return p
}

func (w *world) beat(all ...*Publisher) {
	w.t.Helper()
	for _, p := range all {
		require.NoError(w.t, p.beat(background, false))
	}
}

func (w *world) reader() *Reader { return NewReader(w.client, w.prefix) }

func (w *world) snapshot() *Snapshot {
	w.t.Helper()
	s, err := w.reader().Snapshot(background)
	require.NoError(w.t, err)
	return s
}

// history sums the points of a limit.
func (w *world) history(name string) (sum Point) {
	w.t.Helper()
	points, err := w.reader().History(background, name, time.Time{})
	require.NoError(w.t, err)
	require.Len(w.t, points, 1440)
	for _, p := range points {
		sum.Granted += p.Granted
		sum.Refused += p.Refused
		if p.Rate > 0 {
			sum.Rate = p.Rate
		}
	}
	require.True(w.t, slices.ContainsFunc(points, func(p Point) bool { return p.Published }))
	return sum
}

// Instances are read as they were published, and the history has their sum.
func TestPublishAndRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	a, b := newStub("/a", "/b"), newStub("/a")
	began, start := w.clock.now(), time.Now()
	full := Limit{
		Name: "/a", Decider: "zero",
		Counters: Counters{
			Granted: 10, Refused: 9, Waited: 8, Failed: 7, Passed: 6, WouldRefuse: 5, WaitSum: 4321 * time.Microsecond, Waits: Histogram{3: 2, 13: 6},
		},
		Config:  Config{Row: "17", Kind: WarmUp, Rate: 2.5, Warmup: 4 * time.Second, ColdFactor: 4, Wait: time.Second / 2, Version: 1700000000000000, Shadow: true},
		Bucket:  Bucket{At: began.Add(time.Second), Rate: 2.5, Stored: 3.125, Max: 7, HeldUntil: began.Add(time.Hour)},
		Waiting: Waiting{Count: 3, Since: began.Add(time.Second / 2)},
	}
	*a.limits["/a"] = full
	a.info = Info{
		Host: "one", PID: 7, Version: "v1", Loads: Loads{Tried: 3, Last: began, Limits: 2}, Switch: Switch{Known: true, Origin: "sql"},
		Store:    Store{Kind: "script", Policy: "open", Outages: 1, Away: time.Second},
		Rejected: []Rejected{{Row: "3", Name: "/x", Field: "rate", Value: "-5", Want: "0 or more", Consequence: "its calls are refused"}}, MoreRejected: 2,
		Refused:    []Key{{Limit: "/a", Key: "1.2.3.4", Count: 9, Error: 1}},
		Semaphores: []Semaphore{{Name: "s", Permits: 5, Used: 2, Waiting: 1, Holders: []Holder{{Fence: 4, Label: "h", Permits: 2}}}},
		Windows:    []Window{{Name: "w", Limit: 100, Used: 33, Length: time.Minute}}, Others: Counters{Passed: 77},
	}
	one, two := w.publisher(a), w.publisher(b)
	b.count("/a", 100, 50)
	w.beat(one, two)

	s := w.snapshot()
	require.Empty(t, s.Skipped)
	require.Len(t, s.Instances, 2)
	i := s.Instances[slices.IndexFunc(s.Instances, func(i Instance) bool { return i.ID == one.ID() })]
	slack := 100*time.Millisecond + time.Since(start) // a beat, and Redis, may take any time
	require.WithinDuration(t, began, i.Started, slack)
	require.WithinDuration(t, s.At, i.Beat, 5*time.Second)
	require.Len(t, i.Limits, 2)
	got := *i.Limits["/a"]
	for _, at := range []struct{ want, got *time.Time }{
		{&full.Bucket.At, &got.Bucket.At}, {&full.Bucket.HeldUntil, &got.Bucket.HeldUntil}, {&full.Waiting.Since, &got.Waiting.Since}, {&a.info.Loads.Last, &i.Loads.Last},
	} {
		require.WithinDuration(t, *at.want, *at.got, time.Second+slack)
		*at.got = *at.want
	}
	require.Equal(t, full, got)
	want := a.info
	want.Started = i.Started
	require.Equal(t, want, i.Info)

	require.Equal(t, int64(110), s.Total("/a").Granted)
	require.Equal(t, 2, s.Total("/a").Instances)
	require.Equal(t, []string{"/a", "/b"}, []string{s.Totals()[0].Name, s.Totals()[1].Name})
	h := w.history("/a")
	require.Equal(t, []int64{110, 59}, []int64{h.Granted, h.Refused})
	require.Zero(t, w.history("/b").Granted)
}

// A write that was carried out, and whose answer was lost, counts once; so does one that arrives late, behind the next.
func TestRepeatedWriteCountsOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	a := newStub("/a")
	p := w.publisher(a)
	lossy := &lossyClient{Client: w.client}
	p.client = lossy
	a.count("/a", 5, 1)
	w.beat(p)
	lossy.lose = true
	a.count("/a", 7, 0)
	require.Error(t, p.beat(background, false))
	require.Equal(t, int64(12), w.history("/a").Granted, "it was carried out")
	lossy.lose = false
	a.count("/a", 1, 0)
	w.beat(p)
	require.Equal(t, int64(13), w.history("/a").Granted)
	require.NoError(t, lossy.again(background)) // the one that was thought to be lost, once more
	require.Equal(t, int64(13), w.history("/a").Granted)
	require.Equal(t, int64(13), w.snapshot().Total("/a").Granted)
	require.EqualValues(t, 1, p.Missed().Beats)
}

// A limit's row is removed while the outcome of the last write is unknown, and comes back: the calls in that write count
// once.
func TestGoneInDoubtCountsOnce(t *testing.T) {
	t.Parallel()
	for _, lost := range []int{0, 1, 3} { // answers, while the row is gone
		t.Run(fmt.Sprint(lost), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, redistest.Shared(t))
			a := newStub("/a", "/b")
			p := w.publisher(a)
			lossy := &lossyClient{Client: w.client}
			p.client = lossy
			a.count("/a", 5, 0)
			w.beat(p)
			lossy.lose = true
			a.count("/a", 7, 0)
			require.Error(t, p.beat(background, false))
			row := a.limits["/a"]
			delete(a.limits, "/a")
			for range lost {
				require.Error(t, p.beat(background, false))
			}
			lossy.lose = false
			w.beat(p)
			row.Granted++
			a.limits["/a"] = row
			w.beat(p)
			require.Equal(t, int64(13), w.history("/a").Granted)
			require.Equal(t, int64(13), w.snapshot().Total("/a").Granted)

			delete(a.limits, "/a")
			w.beat(p)
			require.False(t, w.client.HExists(background, p.instanceKey(p.id), recordPrefix+"/a").Val(), "nothing of it is in doubt")
		})
	}
}

// lossyClient loses answers.
type lossyClient struct {
	Client
	lose bool
	lost []any
}

func (l *lossyClient) Process(ctx context.Context, cmd redis.Cmder) error {
	if !l.lose {
		return l.Client.Process(ctx, cmd)
	}
	l.lost = slices.Clone(cmd.Args())
	_ = l.Client.Process(ctx, cmd)
	err := io.EOF // the answer
	cmd.SetErr(err)
	return err
}

func (l *lossyClient) again(ctx context.Context) error {
	return l.Client.Process(ctx, redis.NewCmd(ctx, l.lost...))
}

// Several instances publish at random, one of which restarts, while replies are lost and Redis loses its data. The history
// has exactly the calls counted since the last loss.
func TestCountsAreExact(t *testing.T) {
	t.Parallel()
	random := redistest.Seed(t)
	server := redistest.Start(t)
	w := newWorld(t, server)
	names := []string{"/a", "/b", "/c/{d}", "/ü"}
	type instance struct {
		*stub
		*Publisher
		lossy *lossyClient
	}
	start := func() *instance {
		i := &instance{stub: newStub(names...)}
		i.Publisher, i.lossy = w.publisher(i.stub), &lossyClient{Client: w.client}
		i.Publisher.client = i.lossy
		return i
	}
	all := []*instance{start(), start(), start()}
	counted, flushed := map[string]int64{}, map[string]int64{}
	settle := func() {
		for _, i := range all {
			i.lossy.lose = false
			w.beat(i.Publisher)
		}
	}
	for range 300 {
		i := all[random.IntN(len(all))]
		name := names[random.IntN(len(names))]
		n := random.Int64N(10)
		i.count(name, n, 0)
		counted[name] += n
		switch chance := random.IntN(100); {
		case chance < 3:
			settle()
			require.NoError(t, w.client.FlushAll(background).Err())
			flushed = maps.Clone(counted)
		case chance < 6:
			i.lossy.lose = false
			require.NoError(t, i.beat(background, true))
			all[slices.Index(all, i)] = start()
		case chance < 10:
			l := i.limits[name]
			delete(i.limits, name) // its row is gone, and comes back with the same counters
			for range 1 + random.IntN(3) {
				i.lossy.lose = random.IntN(2) == 0
				_ = i.beat(background, false)
			}
			i.limits[name] = l
		case chance < 50:
			i.lossy.lose = random.IntN(3) == 0
			_ = i.beat(background, false)
		}
	}
	settle()
	for _, name := range names {
		require.Equal(t, counted[name]-flushed[name], w.history(name).Granted, name)
	}
}

// publish has an instance publish, and reads it.
func (w *world) publish(p *Publisher) Instance {
	w.t.Helper()
	w.beat(p)
	s := w.snapshot()
	return s.Instances[slices.IndexFunc(s.Instances, func(i Instance) bool { return i.ID == p.ID() })]
}

// The hour is Redis'. An instance whose clock is wrong by days writes into the right minute, and is read at the right times.
func TestWrongClocks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	a, b := newStub("/a"), newStub("/a")
	right := w.publisher(a)
	w.clock.move(-49 * time.Hour)
	wrong := w.publisher(b)
	b.info.Loads.Last = w.clock.now()
	b.info.Faults = []Fault{{Limit: "/a", Bucket: "/a", By: "window", Err: "corrupt state", Since: w.clock.now().Add(-time.Minute), Calls: 3}}
	b.info.Store.Since = w.clock.now().Add(-time.Minute)
	b.limits["/a"].Bucket.HeldUntil = w.clock.now().Add(time.Minute)
	a.count("/a", 3, 0)
	b.count("/a", 4, 0)
	w.clock.move(49 * time.Hour)
	w.beat(right)
	w.clock.move(-49 * time.Hour)
	w.beat(wrong)
	s := w.snapshot()
	require.Equal(t, int64(7), w.history("/a").Granted)
	require.Len(t, s.Instances, 2)
	for _, i := range s.Instances {
		require.WithinDuration(t, s.At, i.Started, 10*time.Second)
		require.False(t, i.Silent(s.At))
		if i.ID == wrong.ID() {
			require.WithinDuration(t, s.At, i.Loads.Last, 10*time.Second)
			require.WithinDuration(t, s.At.Add(-time.Minute), i.Store.Since, 10*time.Second)
			require.Len(t, i.Faults, 1)
			require.WithinDuration(t, s.At.Add(-time.Minute), i.Faults[0].Since, 10*time.Second)
			require.Equal(t, Fault{Limit: "/a", Bucket: "/a", By: "window", Err: "corrupt state", Since: i.Faults[0].Since, Calls: 3}, i.Faults[0])
			require.WithinDuration(t, s.At.Add(time.Minute), i.Limits["/a"].Bucket.HeldUntil, 10*time.Second)
		}
	}
}

// A limit that is gone is no longer shown; a semaphore, a window and a rejected row neither.
func TestWhatIsGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Shared(t))
	a := newStub("/a", "/b")
	a.count("/b", 4, 0)
	a.info.Semaphores = []Semaphore{{Name: "s", Permits: 1}}
	a.info.Windows = []Window{{Name: "w"}}
	a.info.Rejected = []Rejected{{Row: "1"}}
	p := w.publisher(a)
	i := w.publish(p)
	require.Len(t, i.Limits, 2)
	require.Len(t, i.Semaphores, 1)
	b := a.limits["/b"]
	delete(a.limits, "/b")
	a.info = Info{}
	i = w.publish(p)
	require.Len(t, i.Limits, 1)
	require.Empty(t, i.Semaphores)
	require.Empty(t, i.Windows)
	require.Empty(t, i.Rejected)
	a.limits["/b"] = b
	a.count("/b", 1, 0)
	i = w.publish(p)
	require.Equal(t, int64(5), i.Limits["/b"].Granted)
	require.Equal(t, int64(5), w.history("/b").Granted)
	b.Decider = "disabled"
	require.Equal(t, "disabled", w.publish(p).Limits["/b"].Decider)
	b.Decider = "limit"
	require.Equal(t, "limit", w.publish(p).Limits["/b"].Decider)
}

// Everything that Publishers write has an end.
func TestExpiry(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	w := newWorld(t, server)
	a := newStub("/a", "/b")
	a.count("/a", 4, 0)
	a.events = []Event{{Kind: StoreDown}}
	w.beat(w.publisher(a))
	keys, err := w.client.Keys(background, "*").Result()
	require.NoError(t, err)
	require.Len(t, keys, 6)
	for _, key := range keys {
		ttl := w.client.TTL(background, key).Val()
		require.Positive(t, ttl, key)
		switch {
		case strings.Contains(key, ":h:"):
			require.LessOrEqual(t, ttl, 25*time.Hour, key)
			require.Greater(t, ttl, Day, key)
		case strings.HasSuffix(key, ":events"):
			require.LessOrEqual(t, ttl, Day, key)
		default:
			require.LessOrEqual(t, ttl, ForgottenAfter, key)
		}
	}
}
