package schedule

// cover finds the first waiter for whom the segments do not suffice, after there is more of them, or fewer wait.
func (s *Schedule[V]) cover() {
	for w := s.first; w != nil && s.owned-s.promised >= w.Permits; w = s.first {
		if s.large > 0 && len(s.segments) > 1 {
			s.recover()
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

// dueOf is when the first who is not covered would go, if there is one segment, or nobody in the line wants more than one permit.
func (s *Schedule[V]) dueOf(w *Waiter[V]) int64 {
	behind := s.promised
	for i, g := range s.segments {
		if g.left >= behind+w.Permits || i == len(s.segments)-1 {
			ahead := *g
			ahead.take(behind)
			return ahead.due(w.Permits)
		}
		behind = max(0, behind-g.left)
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

func (s *Schedule[V]) promote(w *Waiter[V]) {
	w.state = covered
	s.promised += w.Permits
	s.wanted -= w.Permits
	s.first = w.next
}

// recover finds anew who is covered, going through the line as the waiters will: each takes from the first segment that has
// enough. Whom that would serve too late leaves the line.
func (s *Schedule[V]) recover() {
	w := s.walk(func(w *Waiter[V], g *segment) bool {
		if due := g.due(w.Permits); s.tooLate(w, due) {
			s.expire(w, due)
			return false
		}
		if w.state == uncovered {
			s.promote(w)
		}
		return true
	})
	s.first = w
	for ; w != nil && w.state == covered; w = w.next {
		w.state = uncovered
		s.promised -= w.Permits
		s.wanted += w.Permits
		s.askAt = 0
	}
}

// walk goes through the line as the waiters will: each takes from the first segment that has enough for it, if take agrees. It
// returns the first for whom none has.
func (s *Schedule[V]) walk(take func(w *Waiter[V], g *segment) bool) *Waiter[V] {
	s.plan = s.plan[:0]
	for _, g := range s.segments {
		s.plan = append(s.plan, *g)
	}
	begin := 0
	for w := s.head; w != nil; {
		for begin < len(s.plan) && s.plan[begin].left == 0 {
			begin++
		}
		var g *segment
		for i := begin; i < len(s.plan) && g == nil; i++ {
			if p := &s.plan[i]; p.left >= w.Permits {
				if p.take(p.lapsing(max(p.from, p.came(w.Came)))); p.left >= w.Permits {
					g = p
				}
			}
		}
		if g == nil {
			return w
		}
		behind := w.next
		if take(w, g) {
			g.take(w.Permits)
		}
		w = behind
	}
	return nil
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
