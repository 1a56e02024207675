package schedule

import "container/heap"

// Lead makes a waiter the head of the queue, because its owner serves waiters in turns. The head takes the place of the waiter. If both need
// equally many permits, each takes what the other would have got, and nothing changes for other waiters. Otherwise the waiters between them
// move by the difference.
//
// Lead does nothing and returns false in four cases. The head is a granted reservation. The waiter came after the next permits fell due, so
// it must not use them (T4). Or it does not need as many permits as the head, and some permits have been gathered, which it would use late;
// or it needs more, and would delay a granted reservation.
func (s *Schedule[V]) Lead(w *Waiter[V], now int64) bool {
	h := s.head
	switch {
	case w == h:
		return true
	case w.state == absent, h.firm, s.passed(w):
		return false
	case w.Permits == h.Permits:
		h.at, w.at = w.at, h.at
		h.round, w.round = w.round, h.round
		h.due, w.due = w.due, h.due
	case w.Permits > h.Permits && s.firm > 0, s.gathered(now):
		return false
	default:
		h.at, w.at = nil, nil
	}
	s.now = max(s.now, now)
	all := s.first == nil
	s.exchange(w)
	s.watch(h)
	s.watch(w)
	s.changes++
	for s.promised > s.owned {
		last := s.tail
		if s.first != nil {
			last = s.first.prev
		}
		s.demote(last)
	}
	if s.cover(); all && s.first != nil {
		s.askAt = 0
	}
	return true
}

// gathered reports whether permits have fallen due, and wait for those behind them. Permits due after the waiter that was just served do not
// wait yet.
func (s *Schedule[V]) gathered(now int64) bool {
	before := s.served
	if before == 0 {
		before = now + 1
	}
	for _, g := range s.segments {
		if g.left > 0 {
			return g.lapsing(g.reached(before)) > 0
		}
	}
	return false
}

// passed reports whether the next permits fell due before a waiter came.
func (s *Schedule[V]) passed(w *Waiter[V]) bool {
	for _, g := range s.segments {
		if g.left > 0 {
			return g.lapsing(g.came(w.Came)) > 0
		}
	}
	return false
}

// exchange makes w the head, and puts the head into the place of w. What belongs to a place stays there: whether it is covered, its rank,
// and whether the store has refused it.
func (q *queue[V]) exchange(w *Waiter[V]) {
	h := q.head
	more := w.Permits - h.Permits
	if h.state == covered {
		q.ranks.wants.add(h.rank, more)
	}
	if w.state == covered {
		q.ranks.wants.add(w.rank, -more)
	} else if h.state == covered {
		q.promised += more
		q.wanted -= more
	}
	h.state, w.state = w.state, h.state
	h.rank, w.rank = w.rank, h.rank
	h.refused, w.refused = w.refused, h.refused
	switch {
	case q.first == w:
		q.first = h
	case q.first == h:
		q.first = w
	}
	before, behind, second := w.prev, w.next, h.next
	h.next, w.prev = behind, nil
	if second == w {
		w.next, h.prev = h, w
	} else {
		w.next, second.prev = second, w
		h.prev, before.next = before, h
	}
	if behind == nil {
		q.tail = h
	} else {
		behind.prev = h
	}
	q.head = w
}

// watch lets a waiter of a queue in turns leave at the end of its timeout, from when it was first decided. Covered waiters are parked too,
// because a turn of another may delay them.
func (q *queue[V]) watch(w *Waiter[V]) {
	if q.InTurns && w.Until != Forever && w.place == 0 && (w.state == covered || w.refused) {
		heap.Push(&q.parked, w)
	}
}

// hopeless reports whether a waiter of a queue in turns would be too late even if it were the next. free is when the bucket's debt ends.
func (s *Schedule[V]) hopeless(w *Waiter[V], due int64) bool {
	if s.owned >= w.Permits {
		due = min(due, s.dueAt(s.owned, w.Permits))
	}
	return s.tooLate(w, due)
}

// Owned returns how many permits the process owns.
func (s *Schedule[V]) Owned() int64 { return s.owned }

// missed reports whether permits are too late for an uncovered waiter. In turns such a waiter stays until its timeout
// ends, and then must not take what was too late before.
func (s *Schedule[V]) missed(w *Waiter[V], due int64) bool {
	if s.InTurns {
		return w.Until != Forever && due > w.Until
	}
	return s.tooLate(w, due)
}

// DueBehind returns when permits are due that are served after ahead others, if the process owns enough of them.
func (s *Schedule[V]) DueBehind(ahead, permits int64) (at int64, owns bool) {
	if ahead+permits > s.owned {
		return 0, false
	}
	return s.dueAt(s.owned-ahead, permits), true
}

// divideParked moves the covered waiters that are parked to an older schedule.
func (s *Schedule[V]) divideParked(old *Schedule[V]) {
	all := s.parked
	s.parked = nil
	for _, w := range all {
		w.place = 0
		if w.state == covered {
			heap.Push(&old.parked, w)
		} else {
			heap.Push(&s.parked, w)
		}
	}
}
