// Package batch sends batches of requests to a backend, several batches in one round trip, and delivers the replies.
//
// Guarantees:
//
//   - A source of requests (a bucket, a semaphore, a window) has at most one batch in flight, so its batches are decided in the order in
//     which it sent them. The exception is a batch whose deadline has passed: the next one does not wait for it.
//   - Every batch has a result by its deadline, even if the client hangs. A late reply is delivered too, because it may have granted
//     permits, which must be refunded.
//   - A source that has requests departs soon, whatever the other sources do.
//
// The naive designs are a round trip for each caller, or a goroutine for each source that sends the requests since its last batch. The first
// costs a round trip per permit. The second costs a round trip per source, though one call could decide the batches of a thousand sources.
// Besides, each batch then passes through two goroutines: that of the source, and one that calls the client, which may hang. Waking a
// goroutine takes as long as a round trip in a fast network.
//
// Here a trip takes the batches of all sources that are waiting when it departs, up to Max. Up to Parallel trips of a route are in flight;
// later requests share the next trip. The goroutine of the trip calls the backend itself. A timer watches the deadlines. When one passes, it
// reports ErrLate to the source, and the next trip begins without waiting for the one that hangs. If no trip is in flight, a caller may make
// the trip in its own goroutine (Take), so none is woken. After a trip, its goroutine yields before it looks for waiting sources, so that
// the callers just answered can share the next batch. Otherwise the first of them would depart alone, and the rest would wait for it.
//
// The sources build the batches and interpret the replies, because these differ too much between them.
package batch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"
)

// ErrLate is the error of a batch without a reply by its deadline. It wraps context.DeadlineExceeded.
var ErrLate = fmt.Errorf("no reply in time: %w", context.DeadlineExceeded)

// ErrPanic is wrapped by the error of a batch whose Send or Direct did not return, because a hook of the client panicked or ended the
// goroutine.
var ErrPanic = errors.New("the client of the backend panicked")

// Source sends batches. Implementations embed a Place.
//
// Trips calls Depart and Land without a lock, so both may lock the source and call Ready. At most one goroutine at a time calls them,
// except for the late Land of a batch whose deadline has passed.
type Source[B, A any] interface {
	// Depart returns the next batch and the deadline of its reply. It reports false if there is nothing to send. If it leaves requests for
	// a later batch, it or the Land of this batch must call Ready.
	Depart() (b B, deadline time.Time, ok bool)
	// Land delivers the reply to a batch, or an error. The error is ErrLate if there was no reply by the deadline. If the reply arrives
	// later, Land is called once more, with late set. Other batches may have departed and landed in between.
	Land(b B, answer A, err error, late bool)

	place() *Place
}

// Place is the state of a source, guarded by Trips.mu. Sources only embed it. The zero value is idle. A Place must not be copied.
type Place struct {
	state state
	again bool   // Ready was called while the source was away
	route string // the route of that Ready
}

func (p *Place) place() *Place { return p }

type state uint8

const (
	idle    state = iota
	waiting       // in the list of its route
	away          // departing or in flight
)

// Trips sends the batches of sources to backends. Its fields must be set before its first use. It is safe for concurrent use and must not
// be copied.
//
// No method of a source is called with mu held. So mu comes last in the lock order: a source may call Ready while it holds its own lock.
type Trips[B, A any] struct {
	// Send sends items by a route and calls Answer of each, from any goroutine. It should return by the last of their deadlines. An item
	// may be answered after Send has returned: only its own source waits for it.
	Send func(route string, items []*Item[B, A])
	// Max is the maximum number of batches in a trip. Parallel is the maximum number of trips of a route in flight.
	Max, Parallel int
	// Size returns the size of a batch. A trip whose batches reach MaxSize takes no further batches. If Size is nil, only Max applies.
	Size    func(B) int
	MaxSize int
	// Stall is how long a trip counts against Parallel. If it is 0, a trip counts until the deadlines of all its batches have passed.
	Stall time.Duration
	// Direct is Send for a trip in the goroutine of a caller (Take). It must return by the deadline of its only item. If Direct is nil,
	// Take is the same as Ready.
	Direct func(route string, items []*Item[B, A])
	// Timeout is the longest duration of a batch. With a context that ends sooner, Take is the same as Ready.
	Timeout time.Duration
	// Go starts a goroutine. If it is nil, the go statement is used.
	Go func(func())
	// Panicked is called with the panics of Send and Land in goroutines that no caller owns, where they would end the process. Panics in
	// the goroutine of Take propagate to its caller. If Panicked is nil, panics are logged by slog.Default.
	Panicked func(value any)

	mu     sync.Mutex
	routes map[string]*route[B, A]
}

// route is the state of the way to one backend. Trips.mu guards it.
//
// Invariant: if a source is waiting, then trips equals Parallel or looking is positive. So start or next will be called.
type route[B, A any] struct {
	name    string
	waiting []Source[B, A] // first come, first served
	trips   int            // trips in flight
	looking int            // trips that will look for waiting sources: they have replies, or have not departed
	prompt  bool           // the last trip to return was in time

	sent  []*trip[B, A] // trips whose deadlines are watched
	timer *time.Timer   // calls watch
	at    time.Time     // when the timer fires, not after the first deadline or stall in sent; zero if unset
}

// Ready makes sure that a Depart of the source begins after this call. It returns at once.
func (t *Trips[B, A]) Ready(route string, s Source[B, A]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ready(t.route(route), s)
}

// Take is Ready, except that it makes the trip in the goroutine of the caller and returns afterwards if three conditions hold: no trip of
// the route is in flight, the last one returned in time, and ctx lasts for at least Timeout. Take does not return early: if ctx is cancelled
// during the trip, Take returns when Direct does. The lock of the source must not be held.
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
	if t.depart(r, []Source[B, A]{s}, t.Direct, true) {
		t.mu.Lock()
		r.looking--
		r.trips--
		t.start(r)
		t.mu.Unlock()
	}
}

// route returns the route with a name, and creates it if needed. t.mu must be held.
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

// ready adds a source to the waiting ones of a route, now or when it has landed. t.mu must be held.
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

// arrived lets a source depart again. t.mu must not be held.
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

// start starts a trip for the waiting sources, if Parallel allows one and no trip is about to look for them. t.mu must be held.
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

// run makes trips until no source is waiting.
func (t *Trips[B, A]) run(r *route[B, A]) {
	var sources []Source[B, A]
	for {
		sources = t.next(r, sources)
		if len(sources) == 0 || !t.depart(r, sources, t.Send, false) {
			return
		}
		for range 2 { // the first lets the answered goroutines run, the second those that they woke
			runtime.Gosched()
		}
	}
}

// next removes and returns the sources of the next trip. If there are none, it returns nil and the goroutine of the trip ends. It reuses the
// slice.
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

// depart sends the batches of sources. Afterwards the trip counts in route.looking. It reports false if the trip was given up, and so no
// longer counts. own marks a trip in the goroutine of a caller, to which panics propagate.
func (t *Trips[B, A]) depart(r *route[B, A], sources []Source[B, A], send func(string, []*Item[B, A]), own bool) bool {
	c := &trip[B, A]{trips: t, route: r, own: own}
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

// putBack returns sources for which a trip has no room to the front of the waiting ones.
func (t *Trips[B, A]) putBack(r *route[B, A], sources []Source[B, A]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range sources {
		s.place().state = waiting
	}
	r.waiting = slices.Insert(r.waiting, 0, sources...)
	t.start(r)
}

// recovered recovers a panic in a goroutine that no caller owns. It must be deferred.
func (t *Trips[B, A]) recovered() {
	if value := recover(); value != nil {
		t.panicked(value)
	}
}

// panicked reports a recovered panic.
func (t *Trips[B, A]) panicked(value any) {
	if t.Panicked != nil {
		t.Panicked(value)
		return
	}
	LogPanic("a round trip", value)
}

// LogPanic logs a recovered panic of a client, a store or an observer by slog.Default. during names the activity that it ended.
func LogPanic(during string, value any) {
	slog.Default().Error("tokenbucket: recovered a panic during "+during, "panic", value, "stack", string(debug.Stack()))
}

// earlier returns the earlier of two times. A zero a is ignored.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || b.Before(a) {
		return b
	}
	return a
}
