package schedule

// queue is the line itself. It begins with the covered: those for whom the segments suffice.
type queue[V any] struct {
	head, tail *Waiter[V]
	first      *Waiter[V] // the first who is not covered; nil: all are
	waiters    int
	promised   int64 // what the covered want
	wanted     int64 // what the others want
	large      int   // waiters who want more than one permit
	limited    int   // waiters for whom permits may come too late
}

// link puts a waiter into the line, behind another (nil: in front).
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
}

// unlink takes a waiter out of the line.
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
	w.next, w.prev, w.state, w.at = nil, nil, absent, nil
}

// promote notes that the first who is not covered is.
func (q *queue[V]) promote(w *Waiter[V]) {
	w.state, w.known = covered, 0
	q.promised += w.Permits
	q.wanted -= w.Permits
	q.first = w.next
}

// demote notes that a waiter is not covered any more, nor those behind it.
func (q *queue[V]) demote(w *Waiter[V]) {
	for q.first = w; w != nil && w.state == covered; w = w.next {
		w.state = uncovered
		q.promised -= w.Permits
		q.wanted += w.Permits
	}
}
