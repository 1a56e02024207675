package batch

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"weak"
)

// trip is a group of batches that are sent together.
type trip[B, A any] struct {
	trips    *Trips[B, A]
	route    *route[B, A]
	items    []*Item[B, A]
	own      bool        // made in the goroutine of a caller
	stalled  time.Time   // when it stops counting, see Trips.Stall; zero without Stall
	answered atomic.Bool // at least one item has a reply

	// Trips.mu guards these.
	looking bool // counted in route.looking
	over    bool // Send has returned
	givenUp bool // no longer counted in the route, although Send has not returned

	// Storage for a trip with a single batch, to make it one allocation.
	item [1]Item[B, A]
	list [1]*Item[B, A]
}

// room returns n items to fill, and reserves space for them in c.items.
func (c *trip[B, A]) room(n int) []Item[B, A] {
	if n == 1 {
		c.items = c.list[:0]
		return c.item[:]
	}
	c.items = make([]*Item[B, A], 0, n)
	return make([]Item[B, A], n)
}

// send sends the items. If a hook of the client panics or ends the goroutine, the items are answered with an error. In the goroutine of a
// caller the panic then propagates, since the caller may recover it.
func (c *trip[B, A]) send(send func(string, []*Item[B, A])) {
	returned := false
	defer func() {
		if returned {
			return
		}
		value := recover() // nil if the goroutine ends
		c.failed(PanicError(value))
		switch {
		case value == nil:
		case c.own:
			panic(value)
		default:
			c.trips.panicked(value)
		}
	}()
	send(c.route.name, c.items)
	returned = true
}

// PanicError returns the error of a call whose client panicked, or ended the goroutine if the value is nil. It wraps ErrPanic.
func PanicError(value any) error {
	if value == nil {
		return ErrPanic
	}
	return fmt.Errorf("%w: %v", ErrPanic, value)
}

// failed answers the remaining items with an error and ends the trip. It answers every item, even if the Land of another panics.
func (c *trip[B, A]) failed(err error) {
	defer c.giveUp(true)
	for _, i := range c.items {
		var none A
		defer i.Answer(none, err)
	}
}

// watched starts watching the deadlines of the items. first is the earliest of them.
func (c *trip[B, A]) watched(first time.Time) {
	if c.trips.Stall > 0 {
		c.stalled = time.Now().Add(c.trips.Stall)
		first = earlier(first, c.stalled)
	}
	c.trips.mu.Lock()
	defer c.trips.mu.Unlock()
	c.route.sent = append(c.route.sent, c)
	c.trips.watchAt(c.route, first)
}

// watchAt makes sure that watch is called by a time. t.mu must be held.
//
// One timer serves many trips and is rarely reset. Setting a timer for each trip would cost as much as waking a goroutine, because it wakes
// a thread that waits for the network. So the timer is not stopped when trips return, and must not keep the Trips reachable.
func (t *Trips[B, A]) watchAt(r *route[B, A], at time.Time) {
	switch {
	case !r.at.IsZero() && !at.Before(r.at):
		return
	case r.timer == nil:
		held := weak.Make(t)
		r.timer = time.AfterFunc(time.Until(at), func() {
			if t := held.Value(); t != nil {
				t.watch(r)
			}
		})
	default:
		r.timer.Reset(time.Until(at))
	}
	r.at = at
}

// watch checks the deadlines of all trips of a route.
func (t *Trips[B, A]) watch(r *route[B, A]) {
	t.mu.Lock()
	r.at = time.Time{}
	sent := slices.Clone(r.sent)
	t.mu.Unlock()
	now := time.Now()
	var next time.Time
	for _, c := range sent {
		if at := c.check(now); !at.IsZero() {
			next = earlier(next, at)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !next.IsZero() {
		t.watchAt(r, next)
	}
}

// check expires the items whose deadline has passed. It gives the trip up if no item is open, or if the trip has stalled. It returns when to
// check next, or zero for never.
func (c *trip[B, A]) check(now time.Time) (next time.Time) {
	for _, i := range c.items {
		if i.expire(now); i.open() {
			next = earlier(next, i.Deadline)
		}
	}
	switch {
	case next.IsZero():
		c.giveUp(true)
	case now.Before(c.stalled):
		return earlier(next, c.stalled)
	case !c.stalled.IsZero():
		c.giveUp(false)
	}
	return next
}

// look marks the trip as one that will look for waiting sources. It runs at the first reply, because the callers answered by it send again
// while other items are being answered. Trips.mu must be held.
func (c *trip[B, A]) look() {
	if !c.looking && !c.givenUp {
		c.looking = true
		c.route.looking++
	}
}

// giveUp stops counting the trip, so that another one may start, unless it is over. With landed, it also stops watching its deadlines.
func (c *trip[B, A]) giveUp(landed bool) {
	t, r := c.trips, c.route
	t.mu.Lock()
	defer t.mu.Unlock()
	if landed {
		r.forget(c)
	}
	if c.over || c.givenUp {
		return
	}
	if c.looking {
		c.looking = false
		r.looking--
	}
	c.givenUp = true
	r.trips--
	r.prompt = false
	t.start(r)
}

// landed reports whether every item has a reply or has passed its deadline.
func (c *trip[B, A]) landed() bool { return !slices.ContainsFunc(c.items, (*Item[B, A]).open) }

// forget stops watching the deadlines of a trip. Trips.mu must be held.
func (r *route[B, A]) forget(c *trip[B, A]) {
	if i := slices.Index(r.sent, c); i >= 0 {
		r.sent = slices.Delete(r.sent, i, i+1)
	}
}

// Item is a batch in flight.
type Item[B, A any] struct {
	Batch    B
	Deadline time.Time

	source Source[B, A]
	trip   *trip[B, A]

	mu    sync.Mutex // held during Land, so that ErrLate is delivered before the late reply
	stage stage      // guarded by mu
}

type stage uint8

const (
	sent    stage = iota
	overdue       // landed with ErrLate
	done
)

// Answer delivers the reply, or an error. Only the first call has an effect.
func (i *Item[B, A]) Answer(answer A, err error) { i.answer(answer, err, i.trip.own) }

// answer is Answer. own is true in the goroutine of a caller.
func (i *Item[B, A]) answer(answer A, err error, own bool) {
	if c := i.trip; !c.answered.Swap(true) {
		c.trips.mu.Lock()
		c.look()
		c.trips.mu.Unlock()
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	was := i.stage
	i.stage = done
	switch was {
	case sent:
		defer i.trip.trips.arrived(i.source)
		i.land(answer, err, false, own)
	case overdue:
		i.land(answer, err, true, own)
	}
}

// land calls the Land of the source. A panic propagates only in the goroutine of a caller. In another it would end the process, and the
// other items would not be answered.
func (i *Item[B, A]) land(answer A, err error, late, own bool) {
	if !own {
		defer i.trip.trips.recovered()
	}
	i.source.Land(i.Batch, answer, err, late)
}

// AnswerBy answers with the result of decide, which runs in a new goroutine. If decide panics, the answer is an error.
func (i *Item[B, A]) AnswerBy(decide func() (A, error)) {
	go func() {
		var answer A
		err := ErrPanic // if decide ends the goroutine
		defer func() {
			if value := recover(); value != nil {
				err = PanicError(value)
				i.trip.trips.panicked(value)
			}
			i.answer(answer, err, false)
		}()
		answer, err = decide()
	}()
}

// expire lands the batch with ErrLate if its deadline has passed.
func (i *Item[B, A]) expire(now time.Time) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.stage == sent && !now.Before(i.Deadline) {
		i.stage = overdue
		defer i.trip.trips.arrived(i.source)
		var none A
		i.land(none, ErrLate, false, false) // in the goroutine of a timer
	}
}

// open reports whether the batch has neither a reply nor passed its deadline.
func (i *Item[B, A]) open() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.stage == sent
}
