package slidingwindow

import "slices"

// verdict is the result of a request for permits.
type verdict struct {
	ok bool
	by Decider
	at int64 // when the permits were admitted; see receipt
}

// call is one request to be sent.
type call struct {
	n         int64 // permits; 0 if it only needs a reply
	limit     int64 // to be set; 0 if none
	recheck   bool  // Redis decides it although the view refuses it; it counts for no other request until it is granted
	sent      bool  // or has its result: it is not queued
	settled   bool  // its result is known, and ready is closed soon
	cancelled bool  // its caller has given up: what it is granted is refunded
	tries     int
	verdict   verdict
	err       error
	ready     chan struct{}
}

// holds returns how many permits other requests cannot have while the call is pending.
func (c *call) holds() int64 {
	if c.recheck {
		return 0
	}
	return c.n
}

// queue holds the calls to be sent, first come, first served. The coordinator's mu guards it.
type queue struct {
	calls     []*call
	cancelled int   // of calls
	pending   int64 // permits of calls without a result
	most      int   // calls that may be queued
}

// full reports whether no further call may be queued.
func (q *queue) full() bool { return len(q.calls)-q.cancelled >= q.most }

// push adds a call.
func (q *queue) push(c *call) {
	q.calls = append(q.calls, c)
	q.pending += c.holds()
}

// next removes and returns the first call; nil if there is none.
func (q *queue) next() *call {
	for len(q.calls) > 0 {
		c := q.calls[0]
		q.calls = q.calls[1:]
		if !c.cancelled {
			return c
		}
		q.cancelled--
	}
	q.calls = nil
	return nil
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
	q.calls = append(calls, q.calls...)
}

// settle marks calls as no longer pending.
func (q *queue) settle(calls ...*call) {
	for _, c := range calls {
		c.settled = true
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
