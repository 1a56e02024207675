package schedule

// Recall gives up the permits that are outdated by their terms and epoch, because their quota was lowered. Those at the end of the last segment are
// refunded if possible, and the others lapse. All waiters keep their places, but granted reservations go before the others. Waiters that the
// remaining permits do not suffice for ask the store again. The caller must have taken all waiters that are due by Next before.
//
// Recall reports whether there were any such permits.
func (s *Schedule[V]) Recall(now int64, outdated func(Terms, int64) bool) (some bool) {
	s.now = max(s.now, now)
	for _, g := range s.segments {
		if g.left == 0 || !outdated(g.terms, g.epoch) {
			continue
		}
		some = true
		if s.returnable(g) {
			if s.lapse(g, g.reached(now)); g.left > 0 {
				s.toRefund(g, g.left)
			}
			continue
		}
		s.owned -= g.left
		g.take(g.left)
		g.ending = settled
	}
	if !some || s.head == nil {
		return some
	}
	s.changes++
	if s.head.state == covered {
		s.demote(s.head)
	}
	s.firmFirst()
	s.recover()
	s.AskNow()
	return true
}

// firmFirst moves the granted reservations to the front of the queue. All waiters must be uncovered.
func (q *queue[V]) firmFirst() {
	var last *Waiter[V] // of those moved
	for w := q.head; w != nil; {
		behind := w.next
		if w.firm {
			q.move(w, last)
			last = w
		}
		w = behind
	}
	q.first = q.head
}

// move puts w behind another waiter, or at the front if that is nil.
func (q *queue[V]) move(w, behind *Waiter[V]) {
	if w.prev == behind {
		return
	}
	if w.prev.next = w.next; w.next == nil {
		q.tail = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.prev = behind
	if behind == nil {
		w.next, q.head = q.head, w
	} else {
		w.next, behind.next = behind.next, w
	}
	w.next.prev = w
}
