package schedule

import "container/heap"

// parked is a heap of the uncovered waiters with a timeout that the store has refused, ordered by the end of the timeout. They leave the
// queue at that time, whether or not the process asks the store again before. The first decision about a waiter may come after its timeout.
// So a waiter is parked only once the store has refused it, or a waiter ahead of it.
type parked[V any] []*Waiter[V]

func (p parked[V]) Len() int           { return len(p) }
func (p parked[V]) Less(i, j int) bool { return p[i].Until < p[j].Until }

func (p parked[V]) Swap(i, j int) {
	p[i], p[j] = p[j], p[i]
	p[i].place, p[j].place = i+1, j+1
}

// Push implements heap.Interface.
func (p *parked[V]) Push(x any) {
	w := x.(*Waiter[V])
	*p = append(*p, w)
	w.place = len(*p)
}

// Pop implements heap.Interface.
func (p *parked[V]) Pop() any {
	last := len(*p) - 1
	w := (*p)[last]
	(*p)[last] = nil
	*p = (*p)[:last]
	w.place = 0
	return w
}

// park records that the store has refused an uncovered waiter, or a waiter ahead of it.
func (q *queue[V]) park(w *Waiter[V]) {
	w.refused, w.decided = true, true
	if w.Until != Forever && w.place == 0 {
		heap.Push(&q.parked, w)
	}
}

// unpark removes a waiter that leaves the queue, becomes covered, or loses its timeout.
func (q *queue[V]) unpark(w *Waiter[V]) {
	if w.refused = false; w.place != 0 {
		heap.Remove(&q.parked, w.place-1)
	}
}

// Timeout returns when the first parked waiter leaves the queue, or 0 if there is none.
func (s *Schedule[V]) Timeout() int64 {
	if len(s.parked) == 0 {
		return 0
	}
	return s.parked[0].Until
}

// Expire removes the parked waiters whose timeouts have ended, and reports whether there were any. The caller must have taken all waiters
// that are due by Next before.
func (s *Schedule[V]) Expire(now int64) (some bool) {
	s.now = now
	for len(s.parked) > 0 && s.parked[0].Until <= now {
		w := s.parked[0]
		s.expire(w, max(now, w.Until+1)) // the earliest possible due time
		some = true
	}
	if some {
		s.changes++
		s.cover()
	}
	return some
}
