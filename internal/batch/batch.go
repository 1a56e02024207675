// Package batch takes what many callers ask to the backend that decides it, and brings the answers back.
//
// What must hold:
//
//   - A source of questions (a bucket, a semaphore, a window) has at most one batch under way, so that it is answered in the order in
//     which it asked, unless that batch has outlived its deadline.
//   - Every batch is answered by its deadline, even if the client hangs. An answer that comes later still arrives: it may have taken
//     permits, which must be given back.
//   - Whoever has something to send departs soon, whatever the others do.
//
// The naive ways are a round trip for each caller, or a goroutine for each source, which sends what has come up since it sent last.
// The first costs a round trip a permit. The second costs a round trip a source, though one call could decide for a thousand
// sources of one server; and each batch passes through two goroutines, the source's and one that asks a client which may
// hang: to wake a goroutine takes as long as a fast network takes to answer.
//
// Here a trip takes the batches of all sources that wait when it departs, up to Max. Up to Parallel trips of a route are under way;
// what comes up meanwhile shares the next one. The goroutine of the trip asks the backend by itself. A timer watches the deadlines:
// it tells the sources that were not answered in time, and lets the next trip begin without the one that hangs. While nobody is under
// way, a caller may make the trip itself (Take), and no goroutine is woken at all. When a trip is back it lets other goroutines run
// before it looks who waits: those who were just answered ask again, and share the next batch. Otherwise the first of
// them would leave alone, and the rest would wait for it.
//
// What goes into a batch, and what an answer means, stays with the source: it differs too much.
package batch

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"
)

// ErrLate is the error of a batch that was not answered by its deadline. It wraps context.DeadlineExceeded.
var ErrLate = fmt.Errorf("no answer in time: %w", context.DeadlineExceeded)

// errPanic is the error of a batch whose Send or Direct did not return.
var errPanic = errors.New("the client of the backend panicked")

// Source has batches to send. Its implementations embed a Place.
//
// Trips calls Depart and Land without a lock, so both may lock the source and call Ready. They are called by one goroutine at a time,
// but for the Land of a batch that has outlived its deadline.
type Source[B, A any] interface {
	// Depart makes the next batch, and says until when it must be answered. It reports false if there is nothing to send. If it
	// leaves anything behind, it or the Land of the batch calls Ready.
	Depart() (b B, deadline time.Time, ok bool)
	// Land takes the answer to a batch, or why there is none: ErrLate, if it did not come by the deadline. If it comes later, Land
	// is called once more, with late set; other batches may have departed and landed in between.
	Land(b B, answer A, err error, late bool)

	place() *Place
}

// Place is where a source is on its way. It belongs to the Trips; a source only embeds it. The zero value is idle. It must not be
// copied.
type Place struct {
	state state
	again bool   // away, and Ready was called meanwhile
	route string // for which
}

func (p *Place) place() *Place { return p }

type state uint8

const (
	idle    state = iota
	waiting       // in the list of its route
	away          // asked to depart, and neither landed nor without a batch
)

// Trips takes the batches of sources to where they are decided. Its fields are set before it is used first. It is safe for concurrent
// use and must not be copied.
//
// No method of a source is called under mu. So mu is the last in the order of locks: a source may call Ready under its own.
type Trips[B, A any] struct {
	// Send takes items to the end of a route and calls Answer of each, from any goroutine. It should return by the last of their
	// deadlines. An item may be answered after Send has returned: only its own source waits for it.
	Send func(route string, items []*Item[B, A])
	// Max is how many batches a trip takes at most, Parallel how many trips of a route are under way at most.
	Max, Parallel int
	// Size is what a batch counts for, if trips may have several. One that has batches of MaxSize or more takes no others along. nil:
	// only Max counts.
	Size    func(B) int
	MaxSize int
	// Stall is how long a trip counts as under way; 0: until none of its batches has time left.
	Stall time.Duration
	// Direct is Send for a trip of the caller's own (Take), which nothing calls back: it must return by the deadline of its one item.
	// nil: nothing does, and Take is Ready.
	Direct func(route string, items []*Item[B, A])
	// Timeout is how long a batch may take at most: a context that ends sooner makes Take Ready.
	Timeout time.Duration
	// Go starts a goroutine; nil: the go statement does.
	Go func(func())

	mu     sync.Mutex
	routes map[string]*route[B, A]
}

// route is what Trips.mu guards of a way to a backend. If anybody waits, then trips is Parallel, or looking is not 0: so somebody will
// call start or next.
type route[B, A any] struct {
	name    string
	waiting []Source[B, A] // first come, first served
	trips   int            // that are under way
	looking int            // of these, the ones that have answers, or have not left: they are about to look who waits
	prompt  bool           // the trip that came back last was in time

	sent  []*trip[B, A] // whose deadlines are watched
	timer *time.Timer   // calls watch
	at    time.Time     // when: no later than anything in sent is too late, or stalls; zero: it is not set
}

// Ready makes sure that a Depart of the source begins after this call. It returns at once.
func (t *Trips[B, A]) Ready(route string, s Source[B, A]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ready(t.route(route), s)
}

// Take is Ready, but it makes the trip itself, and returns when that is over, if nobody is under way on the route, the last who was came
// back in time, and ctx lasts for as long as the trip may take. Nothing calls it back: if ctx is cancelled meanwhile, Take returns
// when Direct does. It must not be called with the source locked.
func (t *Trips[B, A]) Take(ctx context.Context, route string, s Source[B, A]) {
	until, ends := ctx.Deadline()
	lasts := t.Direct != nil && ctx.Err() == nil && (!ends || time.Until(until) >= t.Timeout)
	t.mu.Lock()
	r, p := t.route(route), s.place()
	if !lasts || r.trips > 0 || p.state != idle || !r.prompt {
		t.ready(r, s)
		t.mu.Unlock()
		return
	}
	r.trips++
	p.state = away
	t.mu.Unlock()
	if t.depart(r, []Source[B, A]{s}, t.Direct) {
		t.mu.Lock()
		r.looking--
		r.trips--
		t.start(r)
		t.mu.Unlock()
	}
}

// route returns the route of that name. mu is held.
func (t *Trips[B, A]) route(name string) *route[B, A] {
	r := t.routes[name]
	if r == nil {
		if t.routes == nil {
			t.routes = map[string]*route[B, A]{}
		}
		r = &route[B, A]{name: name}
		t.routes[name] = r
	}
	return r
}

// ready puts a source into the list of a route, now or when it has landed. mu is held.
func (t *Trips[B, A]) ready(r *route[B, A], s Source[B, A]) {
	switch p := s.place(); p.state {
	case idle:
		p.state = waiting
		r.waiting = append(r.waiting, s)
		t.start(r)
	case away:
		p.again, p.route = true, r.name
	}
}

// arrived notes that a source may depart again. mu is not held.
func (t *Trips[B, A]) arrived(s Source[B, A]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := s.place()
	p.state = idle
	if p.again {
		p.again = false
		t.ready(t.route(p.route), s)
	}
}

// start begins another trip for those who wait, if there may be one and none is about to look. mu is held.
func (t *Trips[B, A]) start(r *route[B, A]) {
	if len(r.waiting) == 0 || r.looking > 0 || r.trips >= t.Parallel {
		return
	}
	r.trips++
	r.looking++
	if t.Go == nil {
		go t.run(r)
	} else {
		t.Go(func() { t.run(r) })
	}
}

// run makes one trip after another, until nobody waits.
func (t *Trips[B, A]) run(r *route[B, A]) {
	var sources []Source[B, A]
	for {
		sources = t.next(r, sources)
		if len(sources) == 0 || !t.depart(r, sources, t.Send) {
			return
		}
		for range 2 { // the first lets those run who were answered, the second those whom they woke
			runtime.Gosched()
		}
	}
}

// next takes those whose turn it is off the list; if there are none, the trip is over. It uses a slice again.
func (t *Trips[B, A]) next(r *route[B, A], sources []Source[B, A]) []Source[B, A] {
	t.mu.Lock()
	defer t.mu.Unlock()
	r.looking--
	if len(r.waiting) == 0 {
		r.trips--
		return nil
	}
	n := min(t.Max, len(r.waiting))
	sources = append(sources[:0], r.waiting[:n]...)
	r.waiting = slices.Delete(r.waiting, 0, n)
	for _, s := range sources {
		s.place().state = away
	}
	t.start(r)
	return sources
}

// depart sends the batches of sources, and then is about to look who waits (route.looking). It reports false if the trip was given up:
// then it does not count any more.
func (t *Trips[B, A]) depart(r *route[B, A], sources []Source[B, A], send func(string, []*Item[B, A])) bool {
	c := &trip[B, A]{trips: t, route: r}
	items := c.room(len(sources))
	var first time.Time
	size := 0
	for n, s := range sources {
		if t.Size != nil && size >= t.MaxSize {
			t.putBack(r, sources[n:])
			break
		}
		b, deadline, ok := s.Depart()
		if !ok {
			t.arrived(s)
			continue
		}
		if t.Size != nil {
			size += t.Size(b)
		}
		i := &items[n]
		i.Batch, i.Deadline, i.source, i.trip = b, deadline, s, c
		c.items = append(c.items, i)
		first = earlier(first, deadline)
	}
	if len(c.items) > 0 {
		c.watched(first)
		c.send(send)
	}
	landed := c.landed()
	t.mu.Lock()
	defer t.mu.Unlock()
	c.look()
	c.over = true
	if len(c.items) > 0 {
		r.prompt = time.Now().Before(first)
	}
	if landed {
		r.forget(c)
	}
	return !c.givenUp
}

// putBack lets sources wait again that a trip has no room for: they are next.
func (t *Trips[B, A]) putBack(r *route[B, A], sources []Source[B, A]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range sources {
		s.place().state = waiting
	}
	r.waiting = slices.Insert(r.waiting, 0, sources...)
	t.start(r)
}

// earlier of two times, of which the zero time is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || b.Before(a) {
		return b
	}
	return a
}
