package batch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// The guarantees of the package comment hold for random sources and backends.
func TestTrips(t *testing.T) {
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, seed)
			w.run()
			w.check()
			if t.Failed() {
				t.Logf("seed %d: Max %d, Parallel %d, Stall %v, %d sources", seed, w.trips.Max, w.trips.Parallel, w.trips.Stall, len(w.shops))
			}
		})
		if t.Failed() {
			return
		}
	}
}

// world has random sources on two routes, and a random backend.
type world struct {
	t     *testing.T
	trips Trips[*parcel, int]
	shops []*shop

	mu     sync.Mutex
	rand   *rand.Rand
	routes map[string]*road
}

// road records the trips of a route.
type road struct {
	departed []string // sources, in the order of their batches
	sends    []*send
}

// send records a call of Send.
type send struct {
	began time.Time
	items []*Item[*parcel, int]
	over  bool
}

// shop is a source.
type shop struct {
	Place
	world       *world
	route, name string
	most        int // the most things in a batch
	busy        atomic.Bool

	mu      sync.Mutex
	added   int // things added so far
	things  int // to be sent
	parcels []*parcel
	waits   int // batches that had departed on the route when the source became ready; -1 if it has nothing to send
}

// parcel is a batch.
type parcel struct {
	id, things int
	deadline   time.Time
	landed     []string // the calls of Land
	away       atomic.Bool
}

var errBackend = errors.New("of the backend")

func newWorld(t *testing.T, seed uint64) *world {
	r := rand.New(rand.NewPCG(seed, 1))
	w := &world{t: t, rand: r, routes: map[string]*road{"a": {}, "b": {}}}
	w.trips.Send, w.trips.Direct = w.send, w.send
	w.trips.Max, w.trips.Parallel = 1+r.IntN(5), 1+r.IntN(3)
	if r.IntN(2) == 0 {
		w.trips.Size, w.trips.MaxSize = func(p *parcel) int { return p.things }, 1+r.IntN(6)
	}
	w.trips.Stall = time.Duration(r.IntN(2)) * 20 * time.Millisecond
	for i := range 1 + r.IntN(12) {
		route := []string{"a", "a", "b"}[r.IntN(3)]
		w.shops = append(w.shops, &shop{world: w, route: route, name: fmt.Sprint(route, i), most: 1 + r.IntN(4), waits: -1})
	}
	return w
}

// draw returns a random number below n.
func (w *world) draw(n int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rand.IntN(n)
}

func (w *world) sleep(longest time.Duration) {
	time.Sleep(time.Duration(w.draw(int(longest))))
}

func (w *world) run() {
	var callers sync.WaitGroup
	for _, s := range w.shops {
		for range 1 + w.draw(3) {
			callers.Go(func() {
				for range 20 {
					w.sleep(20 * time.Millisecond)
					s.add(1+w.draw(3), w.draw(2) == 0)
				}
			})
		}
	}
	callers.Wait()
	time.Sleep(time.Minute) // until everything is sent, since nothing is added
	synctest.Wait()
}

// send answers the items one after another: some with errors, some late, some after it has returned, but all of them in the end.
func (w *world) send(route string, items []*Item[*parcel, int]) {
	s := &send{began: time.Now(), items: items}
	var sources []string
	size := 0 // the size of all batches but the last
	for _, i := range items[:len(items)-1] {
		size += i.Batch.things
	}
	for _, i := range items {
		from := i.source.(*shop)
		sources = append(sources, from.name)
		if from.route != route {
			w.t.Errorf("%s is on the way to %s", from.name, route)
		}
	}
	slices.Sort(sources)
	if len(sources) > w.trips.Max || len(slices.Compact(sources)) < len(items) {
		w.t.Errorf("a trip of %d items at most, and one a source, has %v", w.trips.Max, sources)
	}
	if w.trips.Size != nil && size >= w.trips.MaxSize {
		w.t.Errorf("a trip that is full with a size of %d has one of %d before its last batch", w.trips.MaxSize, size)
	}
	w.depart(w.routes[route], s)
	hangs := w.draw(10) == 0
	for _, i := range items {
		if w.sleep(2 * time.Millisecond); hangs {
			w.sleep(100 * time.Millisecond)
		}
		answer := func() {
			if w.draw(8) == 0 {
				i.Answer(0, errBackend)
			} else {
				i.Answer(i.Batch.id, nil)
			}
		}
		if w.draw(6) > 0 {
			answer()
			continue
		}
		go func() {
			w.sleep(60 * time.Millisecond)
			answer()
			i.Answer(-1, nil) // a second answer, which has no effect
		}()
	}
	w.mu.Lock()
	s.over = true
	w.mu.Unlock()
}

// depart checks that not too many trips are in flight.
func (w *world) depart(r *road, s *send) {
	w.mu.Lock()
	defer w.mu.Unlock()
	under := 1
	for _, other := range r.sends {
		awaited := slices.ContainsFunc(other.items, func(i *Item[*parcel, int]) bool { return i.Batch.away.Load() })
		stalled := w.trips.Stall > 0 && s.began.Sub(other.began) >= w.trips.Stall
		if awaited && !other.over && !stalled {
			under++
		}
	}
	if under > w.trips.Parallel {
		w.t.Errorf("%d trips are under way", under)
	}
	r.sends = append(r.sends, s)
}

// alone checks that no other method of the source is called until the function that it returns is called.
func (s *shop) alone() func() {
	if s.busy.Swap(true) {
		s.world.t.Errorf("%s is called twice at once", s.name)
	}
	return func() { s.busy.Store(false) }
}

func (s *shop) add(n int, take bool) {
	s.mu.Lock()
	s.added += n
	s.things += n
	if k := len(s.parcels); k == 0 || s.parcels[k-1].landed != nil {
		s.wait()
	}
	if !take {
		s.world.trips.Ready(s.route, s)
	}
	s.mu.Unlock()
	if take {
		s.world.trips.Take(context.Background(), s.route, s)
	}
}

// wait records when the source began to wait. mu must be held.
func (s *shop) wait() {
	if s.waits < 0 {
		s.world.mu.Lock()
		defer s.world.mu.Unlock()
		s.waits = len(s.world.routes[s.route].departed)
	}
}

func (s *shop) Depart() (*parcel, time.Time, bool) {
	defer s.alone()()
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := len(s.parcels); k > 0 && s.parcels[k-1].landed == nil {
		s.world.t.Errorf("%s departs while its last batch is under way", s.name)
	}
	if s.things == 0 {
		return nil, time.Time{}, false
	}
	s.passed()
	p := &parcel{id: len(s.parcels), things: min(s.things, s.most), deadline: time.Now().Add(time.Duration(1+s.world.draw(50)) * time.Millisecond)}
	p.away.Store(true)
	s.parcels = append(s.parcels, p)
	if s.things -= p.things; s.things > 0 {
		s.world.trips.Ready(s.route, s)
	}
	return p, p.deadline, true
}

// passed checks that no other source has departed repeatedly since this one began to wait: once ahead of it in the list, and then as often as
// goroutines may overtake each other between a lock and a call.
func (s *shop) passed() {
	s.world.mu.Lock()
	defer s.world.mu.Unlock()
	r := s.world.routes[s.route]
	if s.waits >= 0 {
		before := map[string]int{}
		for _, name := range r.departed[s.waits:] {
			if before[name]++; before[name] > 1+s.world.trips.Parallel {
				s.world.t.Errorf("%s waits, and %s departs %d times", s.name, name, before[name])
			}
		}
	}
	s.waits = -1
	r.departed = append(r.departed, s.name)
}

func (s *shop) Land(p *parcel, answer int, err error, late bool) {
	word, now := "answer", time.Now()
	switch {
	case late:
		word = "late"
	case errors.Is(err, ErrLate):
		word = "ErrLate"
	case err != nil:
		word = "error"
	}
	if word == "answer" || word == "error" {
		defer s.alone()()
		if now.After(p.deadline) {
			s.world.t.Errorf("%s is answered %v after the deadline", s.name, now.Sub(p.deadline))
		}
	}
	if word == "ErrLate" && !now.Equal(p.deadline) {
		s.world.t.Errorf("%s is told %v after the deadline", s.name, now.Sub(p.deadline))
	}
	if err == nil && answer != p.id {
		s.world.t.Errorf("%s has the answer to batch %d for batch %d", s.name, answer, p.id)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p.away.Store(false)
	if p.landed = append(p.landed, word); word == "ErrLate" || word == "error" { // its things are sent again
		s.things += p.things
	}
	if s.things > 0 && !late {
		s.wait()
		s.world.trips.Ready(s.route, s)
	}
}

// check checks that everything was sent, and that no trip is left.
func (w *world) check() {
	for _, s := range w.shops {
		answered := 0
		for _, p := range s.parcels {
			switch got := fmt.Sprint(p.landed); got {
			case "[answer]":
				answered += p.things
			case "[error]", "[ErrLate late]":
			default:
				w.t.Errorf("batch %d of %s landed with %s", p.id, s.name, got)
			}
		}
		if s.things != 0 || answered != s.added || s.Place.state != idle || s.Place.again {
			w.t.Errorf("%s: %d of %d answered, %d left, %+v", s.name, answered, s.added, s.things, &s.Place)
		}
	}
	for name, r := range w.trips.routes {
		if len(r.waiting) != 0 || r.trips != 0 || r.looking != 0 || len(r.sent) != 0 || !r.at.IsZero() {
			w.t.Errorf("route %s: %d wait, %d trips, %d of them look, %d are watched at %v", name, len(r.waiting), r.trips, r.looking, len(r.sent), r.at)
		}
	}
}

// queue is a source of numbers, each of which is a batch.
type queue struct {
	Place
	timeout time.Duration
	mu      sync.Mutex
	numbers []int
	landed  chan string
}

func newQueue() *queue { return &queue{timeout: time.Second, landed: make(chan string, 100)} }

func (q *queue) put(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.numbers = append(q.numbers, n)
}

func (q *queue) Depart() ([]int, time.Time, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	b := q.numbers
	q.numbers = nil
	return b, time.Now().Add(q.timeout), len(b) > 0
}

func (q *queue) Land(b []int, answer int, err error, late bool) {
	q.landed <- fmt.Sprint(b, " ", answer, " ", err, " ", late)
}

// The batch of a Take has landed when Take returns, unless a trip is in flight or the last one was late.
func TestTake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		delay := time.Millisecond
		here := func() string { // the id of the goroutine
			buf := make([]byte, 40)
			return string(buf[:runtime.Stack(buf, false)])
		}
		var sender string
		trips := &Trips[[]int, int]{Max: 1, Parallel: 1, Timeout: time.Second, Send: func(_ string, items []*Item[[]int, int]) {
			sender = here()
			time.Sleep(delay)
			items[0].Answer(1, nil)
		}}
		trips.Direct = trips.Send
		q, other := newQueue(), newQueue()
		ctx := context.Background()
		ask := func(n int) (alone bool) {
			q.put(n)
			trips.Take(ctx, "", q)
			alone = len(q.landed) > 0
			require.Equal(t, fmt.Sprintf("[%d] 1 <nil> false", n), <-q.landed)
			require.Equal(t, alone, sender == here())
			synctest.Wait()
			return alone
		}
		require.False(t, ask(1), "no trip was in time yet")
		require.True(t, ask(2))
		trips.Take(ctx, "", q) // nothing to send
		require.True(t, ask(3))

		other.put(1)
		trips.Ready("", other)
		synctest.Wait()
		require.False(t, ask(4), "a trip is in flight")
		require.True(t, ask(5))

		delay = q.timeout + time.Millisecond
		q.put(6)
		trips.Take(ctx, "", q)
		require.Equal(t, fmt.Sprintf("[6] 0 %v false", ErrLate), <-q.landed)
		require.Equal(t, "[6] 1 <nil> true", <-q.landed)
		delay = time.Millisecond
		require.False(t, ask(7), "the last trip was late")
		require.True(t, ask(8))

		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, q.timeout)
		require.True(t, ask(9), "the context lasts for Timeout")
		require.False(t, ask(10), "the context ends a millisecond before Timeout")
		cancel()
		ctx, cancel = context.WithCancel(context.Background())
		require.True(t, ask(11), "the context lasts for more than Timeout")
		cancel()
		require.False(t, ask(12))
		ctx, trips.Direct = context.Background(), nil
		require.False(t, ask(13), "without Direct")
	})
}

// If a hook of the client panics or ends the goroutine, the batch has failed and lands, also in the goroutine of a caller.
func TestPanicInACallersTrip(t *testing.T) {
	for what, hook := range map[string]func(){"panic": func() { panic("hook") }, "exit": runtime.Goexit} {
		t.Run(what, func(t *testing.T) {
			wantPanic := ErrPanic.Error()
			if what == "panic" {
				wantPanic += ": hook"
			}
			synctest.Test(t, func(t *testing.T) {
				trips := &Trips[[]int, int]{Max: 1, Parallel: 1, Timeout: time.Second, Send: func(_ string, items []*Item[[]int, int]) {
					if items[0].Batch[0] == 2 {
						hook()
					}
					items[0].Answer(1, nil)
				}}
				trips.Direct = trips.Send
				q, other := newQueue(), newQueue()
				began := time.Now()
				for n, want := range []string{"[1] 1 <nil> false", "[2] 0 " + wantPanic + " false", "[3] 1 <nil> false"} {
					q.put(n + 1)
					var caller sync.WaitGroup
					caller.Add(1)
					go func() {
						defer caller.Done()
						defer func() { _ = recover() }()
						trips.Take(context.Background(), "", q)
					}()
					caller.Wait()
					require.Equal(t, want, <-q.landed)
					synctest.Wait()
				}
				other.put(4)
				trips.Ready("", other)
				require.Equal(t, "[4] 1 <nil> false", <-other.landed)
				require.Zero(t, time.Since(began))
				synctest.Wait()
				require.Empty(t, trips.route("").sent)
				require.Zero(t, trips.route("").trips)
				require.Zero(t, trips.route("").looking)
			})
		})
	}
}

// Sources with different routes do not wait for each other's backends.
func TestRoutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		trips := &Trips[[]int, int]{Max: 10, Parallel: 1, Send: func(route string, items []*Item[[]int, int]) {
			if route == "slow" {
				time.Sleep(time.Minute)
			}
			for _, i := range items {
				i.Answer(len(items), nil)
			}
		}}
		slow, fast := newQueue(), newQueue()
		slow.timeout = time.Hour
		slow.put(1)
		trips.Ready("slow", slow)
		synctest.Wait()
		fast.put(2)
		trips.Ready("fast", fast)
		require.Equal(t, "[2] 1 <nil> false", <-fast.landed)
		slow.put(3) // sent by another route after the first has landed
		trips.Ready("fast", slow)
		began := time.Now()
		require.Equal(t, "[1] 1 <nil> false", <-slow.landed)
		require.Equal(t, "[3] 1 <nil> false", <-slow.landed)
		require.Equal(t, time.Minute, time.Since(began))
	})
}

// The batches that do not fit into a full trip depart at once in another. After a stall, another trip departs before the deadline.
func TestNobodyWaitsForAFullOrStalledTrip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const stall = 20 * time.Millisecond
		departed := make(chan []int, 10)
		trips := &Trips[[]int, int]{Max: 10, Parallel: 2, Stall: stall, Size: func(b []int) int { return len(b) }, MaxSize: 3,
			Go: func(f func()) { time.AfterFunc(time.Microsecond, f) }, // after all sources are ready
			Send: func(_ string, items []*Item[[]int, int]) {
				var numbers []int
				for _, i := range items {
					numbers = append(numbers, i.Batch...)
				}
				departed <- numbers
				time.Sleep(time.Minute)
				for _, i := range items {
					i.Answer(0, nil)
				}
			}}
		began := time.Now()
		since := func() time.Duration { return time.Since(began).Truncate(time.Millisecond) }
		for n := range 9 { // two and one, and so on
			q := newQueue()
			q.timeout = time.Hour
			for range 2 - n%2 {
				q.put(n)
			}
			trips.Ready("", q)
		}
		require.Equal(t, []int{0, 0, 1}, <-departed)
		require.Equal(t, []int{2, 2, 3}, <-departed)
		require.Zero(t, since())
		require.Equal(t, []int{4, 4, 5}, <-departed)
		require.Equal(t, []int{6, 6, 7}, <-departed)
		require.Equal(t, stall, since())
		require.Equal(t, []int{8, 8}, <-departed)
		require.Equal(t, 2*stall, since())
		time.Sleep(time.Hour)
	})
}

// Callers that are answered and call again share the next batch, or the next trip.
func TestShared(t *testing.T) {
	const callers, rounds = 64, 100
	var trips int
	one := &Trips[[]int, int]{Max: callers, Parallel: 1, Send: func(_ string, items []*Item[[]int, int]) {
		trips++
		for _, i := range items {
			i.Answer(0, nil)
		}
	}}
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			q := newQueue()
			for n := range rounds {
				q.put(n)
				one.Ready("", q)
				<-q.landed
			}
		})
	}
	all.Wait()
	require.Less(t, trips, callers*rounds/4, "for %d batches", callers*rounds)
}

// BenchmarkTrips measures a trip of a lone caller, and of many sources, to a backend that replies at once.
func BenchmarkTrips(b *testing.B) {
	trips := func() *Trips[[]int, int] {
		send := func(_ string, items []*Item[[]int, int]) {
			for _, i := range items {
				i.Answer(0, nil)
			}
		}
		return &Trips[[]int, int]{Max: 128, Parallel: 2, Stall: time.Minute, Send: send, Direct: send}
	}
	for name, ask := range map[string]func(*Trips[[]int, int], *queue){
		"Ready": func(t *Trips[[]int, int], q *queue) { t.Ready("", q) },
		"Take":  func(t *Trips[[]int, int], q *queue) { t.Take(context.Background(), "", q) },
	} {
		b.Run("lone/"+name, func(b *testing.B) {
			b.ReportAllocs()
			t, q := trips(), newQueue()
			for b.Loop() {
				q.put(1)
				ask(t, q)
				<-q.landed
			}
		})
		b.Run("512 sources/"+name, func(b *testing.B) {
			b.ReportAllocs()
			t := trips()
			b.SetParallelism(512 / runtime.GOMAXPROCS(0))
			b.RunParallel(func(pb *testing.PB) {
				q := newQueue()
				for pb.Next() {
					q.put(1)
					ask(t, q)
					<-q.landed
				}
			})
		})
	}
}
