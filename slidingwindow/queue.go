package slidingwindow

import "slices"

// verdict is the answer to a request for permits.
type verdict struct {
	ok bool
	by Decider
	at int64 // when they were admitted; see receipt
}

// call is one request on its way.
type call struct {
	n         int64 // permits; 0: it only wants an answer
	limit     int64 // to be set; 0: none
	asks      bool  // the server decides; else it was admitted and is only told
	sent      bool  // or settled: it is in the queue no more
	cancelled bool  // its caller has given up
	tries     int
	verdict   verdict
	err       error
	ready     chan struct{}
}

// queue is the calls that wait to be sent, first come, first served. It has no lock of its own.
type queue struct {
	calls     []*call
	cancelled int   // of these
	pending   int64 // permits of the calls that were pushed and not settled
	most      int   // how many may wait
}

func (q *queue) full() bool { return len(q.calls)-q.cancelled >= q.most }

func (q *queue) push(c *call) {
	q.calls = append(q.calls, c)
	q.pending += c.n
}

// next takes the first call off; nil: there is none.
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

// cancel notes that the caller of a call has given up. What is under way stays pending. The cancelled are dropped when they are most of
// the queue: so for each that is moved another one has gone.
func (q *queue) cancel(c *call) {
	if c.cancelled = true; c.sent {
		return
	}
	q.pending -= c.n
	if q.cancelled++; 2*q.cancelled > len(q.calls) {
		q.calls = slices.DeleteFunc(q.calls, func(c *call) bool { return c.cancelled })
		q.cancelled = 0
	}
}

// putBack queues calls that were sent in vain, before all others.
func (q *queue) putBack(calls []*call) {
	for _, c := range calls {
		c.sent = false
	}
	q.calls = append(calls, q.calls...)
}

// settle notes that calls are pending no more.
func (q *queue) settle(calls ...*call) {
	for _, c := range calls {
		q.pending -= c.n
	}
}

// takeAll takes and settles all calls.
func (q *queue) takeAll() (all []*call) {
	for c := q.next(); c != nil; c = q.next() {
		c.sent = true
		q.settle(c)
		all = append(all, c)
	}
	return all
}
