package batch

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// trip is some batches that are sent together.
type trip[B, A any] struct {
	trips    *Trips[B, A]
	route    *route[B, A]
	items    []*Item[B, A]
	stalled  time.Time   // when it does not count any more; zero: see Trips.Stall
	answered atomic.Bool // some of its items, at least

	// Trips.mu guards these.
	looking bool // it is counted in route.looking
	over    bool // Send has returned
	givenUp bool // before that: it is counted in the route no more

	// Of a trip with a single batch: so it is one allocation.
	item [1]Item[B, A]
	list [1]*Item[B, A]
}

// room returns so many items to fill, and makes room for them in the list.
func (c *trip[B, A]) room(n int) []Item[B, A] {
	if n == 1 {
		c.items = c.list[:0]
		return c.item[:]
	}
	c.items = make([]*Item[B, A], 0, n)
	return make([]Item[B, A], n)
}

// send sends the items. If that does not return, for a hook of the client panics, nobody waits for them: a caller whose goroutine it is may
// recover.
func (c *trip[B, A]) send(send func(string, []*Item[B, A])) {
	returned := false
	defer func() {
		if !returned {
			c.failed()
		}
	}()
	send(c.route.name, c.items)
	returned = true
}

// failed answers the items that are not answered, and ends the trip.
func (c *trip[B, A]) failed() {
	for _, i := range c.items {
		var none A
		i.Answer(none, errPanic)
	}
	c.giveUp(true)
}

// watched begins the watch over the deadlines of the items, the first of which is given.
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

// watchAt makes sure that watch is called by a time. One timer serves many trips, and is hardly ever set: to set one for each trip costs
// as much as to wake a goroutine, for it wakes a thread that waits for the network. mu is held.
func (t *Trips[B, A]) watchAt(r *route[B, A], at time.Time) {
	switch {
	case !r.at.IsZero() && !at.Before(r.at):
		return
	case r.timer == nil:
		r.timer = time.AfterFunc(time.Until(at), func() { t.watch(r) })
	default:
		r.timer.Reset(time.Until(at))
	}
	r.at = at
}

// watch looks after all trips of a route.
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

// check tells those whose deadline has passed, and gives the trip up when all are told, or it has stalled. It returns when to check next;
// zero: never.
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

// look notes that the trip will look who waits: with its first answer, for those who are answered ask again while the others still
// are. Trips.mu is held.
func (c *trip[B, A]) look() {
	if !c.looking && !c.givenUp {
		c.looking = true
		c.route.looking++
	}
}

// giveUp lets others begin a trip in the place of this one, unless it is over. If all of it has landed, there is nothing to watch any more.
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

// landed tells that every item was answered, or has no time left.
func (c *trip[B, A]) landed() bool { return !slices.ContainsFunc(c.items, (*Item[B, A]).open) }

// forget ends the watch over a trip. Trips.mu is held.
func (r *route[B, A]) forget(c *trip[B, A]) {
	if i := slices.Index(r.sent, c); i >= 0 {
		r.sent = slices.Delete(r.sent, i, i+1)
	}
}

// Item is a batch on its way.
type Item[B, A any] struct {
	Batch    B
	Deadline time.Time

	source Source[B, A]
	trip   *trip[B, A]

	mu    sync.Mutex // held while the source is told: it hears ErrLate before the late answer
	stage stage
}

type stage uint8

const (
	sent    stage = iota
	overdue       // the source was told ErrLate
	done
)

// Answer brings the answer back, or the error why there is none. Only the first call counts.
func (i *Item[B, A]) Answer(answer A, err error) {
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
		i.source.Land(i.Batch, answer, err, false)
		i.trip.trips.arrived(i.source)
	case overdue:
		i.source.Land(i.Batch, answer, err, true)
	}
}

// expire lands the batch without an answer if its deadline has passed.
func (i *Item[B, A]) expire(now time.Time) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.stage == sent && !now.Before(i.Deadline) {
		i.stage = overdue
		var none A
		i.source.Land(i.Batch, none, ErrLate, false)
		i.trip.trips.arrived(i.source)
	}
}

// open tells that the batch has neither landed nor outlived its deadline.
func (i *Item[B, A]) open() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.stage == sent
}
