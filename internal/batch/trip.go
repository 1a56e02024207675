package batch

import (
	"context"
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
}

// send takes the items to where they are decided, while a timer watches the deadlines. The first and the last of them are given.
func (c *trip[B, A]) send(send func(context.Context, string, []*Item[B, A]), first, last time.Time) {
	ctx, cancel := context.WithDeadline(context.Background(), last)
	defer cancel()
	next := first
	if c.trips.Stall > 0 {
		c.stalled = time.Now().Add(c.trips.Stall)
		next = earlier(first, c.stalled)
	}
	timer := time.AfterFunc(time.Until(next), c.watch)
	send(ctx, c.route.name, c.items)
	if !slices.ContainsFunc(c.items, (*Item[B, A]).open) {
		timer.Stop()
	}
}

// watch tells those whose deadline has passed, and gives the trip up when all are told, or it has stalled.
func (c *trip[B, A]) watch() {
	now := time.Now()
	var next time.Time
	for _, i := range c.items {
		if i.expire(now); i.open() {
			next = earlier(next, i.Deadline)
		}
	}
	stalls := !c.stalled.IsZero() && now.Before(c.stalled)
	if next.IsZero() || !c.stalled.IsZero() && !stalls {
		c.giveUp()
	}
	if next.IsZero() {
		return
	}
	if stalls {
		next = earlier(next, c.stalled)
	}
	time.AfterFunc(next.Sub(now), c.watch)
}

// look notes that the trip will look who waits: with its first answer, for those who are answered ask again while the others still
// are. Trips.mu is held.
func (c *trip[B, A]) look() {
	if !c.looking && !c.givenUp {
		c.looking = true
		c.route.looking++
	}
}

// giveUp lets others begin a trip in the place of this one.
func (c *trip[B, A]) giveUp() {
	c.trips.mu.Lock()
	defer c.trips.mu.Unlock()
	if c.over || c.givenUp {
		return
	}
	if c.looking {
		c.looking = false
		c.route.looking--
	}
	c.givenUp = true
	c.route.trips--
	c.route.prompt = false
	c.trips.start(c.route)
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

// Answer brings the answer home, or the error why there is none. Only the first call counts.
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
