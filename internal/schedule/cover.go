package schedule

// cover finds the first waiter for whom the segments do not suffice, after there is more of them, or fewer wait.
func (s *Schedule[V]) cover() {
	for w := s.first; w != nil && s.owned-s.promised >= w.Permits; w = s.first {
		if s.mixed() {
			if s.mayWalk() {
				s.recover()
			}
			return
		}
		if due := s.dueOf(w); s.tooLate(w, due) {
			s.expire(w, due)
		} else {
			s.promote(w)
			w.due, w.known = due, s.changes+1
		}
	}
}

// dueOf is when the first who is not covered would go, if there is one segment, or nobody in the line wants more than one permit: it
// takes the first of what is left over, which is at the end.
func (s *Schedule[V]) dueOf(w *Waiter[V]) int64 {
	over := s.owned - s.promised
	for i := len(s.segments) - 1; i >= 0; i-- {
		g := s.segments[i]
		if g.left >= over || i == 0 {
			ahead := *g
			ahead.take(g.left - over)
			return ahead.due(w.Permits)
		}
		over -= g.left
	}
	return 0
}

// tooLate tells that permits are of no use to a waiter. Those that are due by now are: a timeout counts from the decision.
func (s *Schedule[V]) tooLate(w *Waiter[V], due int64) bool {
	return w.Until != Forever && due > max(w.Until, s.now)
}

// expire takes a waiter out of the line whose permits would come too late.
func (s *Schedule[V]) expire(w *Waiter[V], due int64) {
	w.due = due
	s.unlink(w)
	s.expired = append(s.expired, w)
}

// Hopeless takes those out of the line who are not covered, and will not be in time by what is known: the bucket owes nothing any
// more at free, by this process's clock, and cost is what so many permits take.
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
		gathers := w.at != nil && w.round == s.round
		if due := max(now, free) + cost(permits); s.tooLate(w, due) && !gathers {
			s.expire(w, due)
		} else {
			ahead += w.Permits
		}
		w = behind
	}
}

// Expired returns those who have left the line since their permits would come too late.
func (s *Schedule[V]) Expired() []*Waiter[V] {
	w := s.expired
	if w != nil {
		s.expired = nil
	}
	return w
}
