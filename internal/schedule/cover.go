package schedule

// cover promotes uncovered waiters for which the segments suffice, after a grant or after waiters have left.
func (s *Schedule[V]) cover() {
	for w := s.first; w != nil && s.owned-s.promised >= w.Permits; w = s.first {
		if s.mixed() {
			if s.mayWalk() {
				s.recover()
			}
			return
		}
		if due := s.dueOf(w); s.tooLate(w, due) && !s.InTurns {
			s.expire(w, due)
		} else {
			s.promote(w)
			w.due = due
		}
	}
}

// dueOf returns the due time of the first uncovered waiter, unless requests are mixed. The waiter takes the first permits beyond those of
// the covered waiters, which are at the end.
func (s *Schedule[V]) dueOf(w *Waiter[V]) int64 { return s.dueAt(s.owned-s.promised, w.Permits) }

// dueAt returns the due time of the first permits among the last over owned ones.
func (s *Schedule[V]) dueAt(over, permits int64) int64 {
	for i := len(s.segments) - 1; i >= 0; i-- {
		g := s.segments[i]
		if g.left >= over || i == 0 {
			ahead := *g
			ahead.take(g.left - over)
			return ahead.due(permits)
		}
		over -= g.left
	}
	return 0
}

// tooLate reports whether permits are due after the timeout of a waiter. Permits that are due already are never too late, because a timeout
// counts from the decision.
func (s *Schedule[V]) tooLate(w *Waiter[V], due int64) bool {
	return w.Until != Forever && due > max(w.Until, s.now)
}

// expire removes a waiter whose permits would be too late. The permits that it was gathering lapse as in Leave.
func (s *Schedule[V]) expire(w *Waiter[V], due int64) {
	w.due = due
	if g := w.at; g != nil {
		g.from = max(g.from, g.reached(s.now))
		s.lapse(g, g.from)
	}
	s.unlink(w)
	s.expired = append(s.expired, w)
}

// Hopeless removes the uncovered waiters whose permits cannot be due in time. free is when the bucket's debt ends, by the local clock, and
// cost returns the time that permits take.
func (s *Schedule[V]) Hopeless(now, free int64, payLater bool, cost func(permits int64) int64) {
	if s.now = now; s.limited == 0 {
		return
	}
	ahead := int64(0)
	for w := s.first; w != nil; {
		behind := w.next
		permits := ahead + w.Permits
		if payLater {
			permits = ahead
		}
		switch due := max(now, free) + cost(permits); {
		case s.InTurns:
			if !s.gathers(w) && s.hopeless(w, due) {
				s.expire(w, due)
			}
		case s.tooLate(w, due) && !s.gathers(w):
			s.expire(w, due)
		default:
			ahead += w.Permits
		}
		w = behind
	}
}

// Expired returns the waiters that were removed since the last call because their permits would be too late.
func (s *Schedule[V]) Expired() []*Waiter[V] {
	w := s.expired
	if w != nil {
		s.expired = nil
	}
	return w
}
