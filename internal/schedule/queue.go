package schedule

// queue is the list of waiters. The covered waiters, for which the segments suffice, come first.
type queue[V any] struct {
	head, tail *Waiter[V]
	first      *Waiter[V] // the first uncovered waiter, or nil
	waiters    int
	promised   int64 // permits that the covered waiters need
	wanted     int64 // permits that the uncovered waiters need
	large      int   // waiters that need more than one permit
	limited    int   // waiters with a timeout
	firm       int   // granted reservations
	parked     parked[V]
	ranks      ranks

	// InTurns: the owner chooses the head by [Schedule.Lead]. So no waiter is too late before its timeout has ended, unless it would be
	// too late as the head. Covered waiters are parked as well.
	InTurns bool
}

// link inserts w behind another waiter, or at the front if that is nil.
func (q *queue[V]) link(w, behind *Waiter[V]) {
	w.prev = behind
	if behind == nil {
		w.next, q.head = q.head, w
	} else {
		w.next, behind.next = behind.next, w
	}
	if w.next == nil {
		q.tail = w
	} else {
		w.next.prev = w
	}
	q.waiters++
	if w.Permits > 1 {
		q.large++
	}
	if w.Until != Forever {
		q.limited++
	}
	if w.firm {
		q.firm++
	}
}

// unlink removes w from the queue.
func (q *queue[V]) unlink(w *Waiter[V]) {
	if q.first == w {
		q.first = w.next
	}
	if w.prev == nil {
		q.head = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		q.tail = w.prev
	} else {
		w.next.prev = w.prev
	}
	if w.state == covered {
		q.promised -= w.Permits
		q.unrank(w)
	} else {
		q.wanted -= w.Permits
	}
	q.waiters--
	if w.Permits > 1 {
		q.large--
	}
	if w.Until != Forever {
		q.limited--
	}
	if w.firm {
		q.firm--
	}
	q.unpark(w)
	w.next, w.prev, w.state, w.at = nil, nil, absent, nil
}

// promote marks w, the first uncovered waiter, as covered.
func (q *queue[V]) promote(w *Waiter[V]) {
	q.unpark(w)
	q.rank(w)
	w.state, w.decided = covered, true
	q.promised += w.Permits
	q.wanted -= w.Permits
	q.first = w.next
	q.watch(w)
}

// demote marks w and all covered waiters behind it as uncovered. Debts among them leave the queue, since the permits that lapsed have paid them.
func (q *queue[V]) demote(w *Waiter[V]) {
	q.first = w
	for w != nil && w.state == covered {
		behind := w.next
		w.state = uncovered
		q.promised -= w.Permits
		q.unrank(w)
		q.wanted += w.Permits
		if w.debt {
			q.unlink(w)
		}
		w = behind
	}
}
