package slidingwindow

import (
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/waiting"
)

// verdict is the result of a request for permits.
type verdict struct {
	ok bool
	by Decider
	at int64 // when the permits were admitted; see receipt
}

// call is one call of the machine.
type call struct {
	waiting.Ticket
	kind      kind
	n         int64         // permits; 0 if it only needs a reply
	limit     int64         // to be set; 0 if none
	at        int64         // when the permits to be refunded were admitted; see receipt
	waits     bool          // until the permits are admitted: it is not refused
	since     time.Duration // when it joined the queue, by waiting.Moment.Mono
	recheck   bool          // Redis decides it although the view refuses it; it counts for no other request until it is granted
	lined     bool          // it is in machine.line
	stood     bool          // it has been there
	called    bool          // it counts in machine.called
	sent      bool          // or has its result: it is not queued
	cancelled bool          // its caller has its result or has left: what it is granted is refunded
	tries     int
	verdict   verdict
	err       error
}

// kind is what a call is for.
type kind uint8

const (
	allows  kind = iota // n permits
	knows               // the counts of this sub-interval
	asks                // a reply
	sets                // limit
	refunds             // n permits
)

// holds returns how many permits other requests cannot have while the call is pending.
func (c *call) holds() int64 {
	if c.recheck {
		return 0
	}
	return c.n
}

// queue holds the calls to be sent, first come, first served. It belongs to a machine.
type queue struct {
	calls     []*call
	cancelled int   // of calls
	pending   int64 // permits of calls without a result
}

// live returns how many calls are queued.
func (q *queue) live() int { return len(q.calls) - q.cancelled }

// push adds a call.
func (q *queue) push(c *call) {
	q.calls = append(q.calls, c)
	q.pending += c.holds()
}

// first returns the first call; nil if there is none.
func (q *queue) first() *call {
	for len(q.calls) > 0 {
		if c := q.calls[0]; !c.cancelled {
			return c
		}
		q.calls = q.calls[1:]
		q.cancelled--
	}
	q.calls = nil
	return nil
}

// next removes and returns the first call; nil if there is none.
func (q *queue) next() *call {
	c := q.first()
	if c != nil {
		q.calls = q.calls[1:]
	}
	return c
}

// cancel withdraws a call whose caller has given up. A call in flight stays pending. Cancelled calls are removed when they are most of the
// queue, so the cost of each removal is constant on average.
func (q *queue) cancel(c *call) {
	if c.cancelled = true; c.sent {
		return
	}
	q.pending -= c.holds()
	if q.cancelled++; 2*q.cancelled > len(q.calls) {
		q.calls = slices.DeleteFunc(q.calls, func(c *call) bool { return c.cancelled })
		q.cancelled = 0
	}
}

// putBack queues calls again, before all others.
func (q *queue) putBack(calls []*call) {
	for _, c := range calls {
		c.sent = false
	}
	if len(calls) > 0 {
		q.calls = append(calls, q.calls...)
	}
}

// settle marks calls as no longer pending.
func (q *queue) settle(calls ...*call) {
	for _, c := range calls {
		q.pending -= c.holds()
	}
}

// takeAll removes, settles and returns all calls.
func (q *queue) takeAll() (all []*call) {
	for c := q.next(); c != nil; c = q.next() {
		c.sent = true
		q.settle(c)
		all = append(all, c)
	}
	return all
}
