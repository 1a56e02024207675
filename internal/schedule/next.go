package schedule

// Next returns a waiter whose permits are due, and takes it out of the line. If nobody is due, it returns nil and when to look
// again; 0: there is nobody to look for.
func (s *Schedule[V]) Next(now int64) (w *Waiter[V], at int64) {
	if s.now = now; s.head == nil || s.owned == 0 && s.promised == 0 { // the store has to be asked first
		s.round++
		s.forget()
		return nil, 0
	}
	late := false
	for {
		w, at := s.earliest(now)
		if late && (w == nil || at >= now-Tolerated) {
			late = false
			s.recover()
			continue
		}
		switch h := s.head; {
		case h != nil && h.state == covered && (h.at == nil || h.at.left < h.Permits): // no segment has enough
			s.recover()
			continue
		case w == nil:
			return nil, 0
		case at > now:
			return nil, at
		case s.Strict && at < now-Tolerated:
			s.lapse(w.at, now-Tolerated-w.at.offset)
			late = true
			continue
		}
		s.owned -= w.Permits
		w.at.take(w.Permits)
		s.unlink(w)
		s.walks.earn()
		return w, at
	}
}

// earliest finds who goes next and when: the head, by the first segment that has enough for it, or somebody behind it, by
// permits of a segment before that. Permits that nobody gathers lapse at their time.
func (s *Schedule[V]) earliest(now int64) (next *Waiter[V], at int64) {
	s.forget()
	if s.head == nil {
		return nil, 0
	}
	looked := 0
	s.round++
	for _, g := range s.segments {
		if g.left == 0 {
			continue
		}
		s.lapse(g, max(g.from, g.came(s.head.Came)))
		taker := s.taker(g, &looked)
		if g.passed || taker == nil {
			g.from = max(g.from, g.reached(now))
		}
		if g.passed = taker == nil; g.passed {
			continue
		}
		if s.lapse(g, g.from); taker.Permits > g.left {
			continue
		}
		if old := taker.at; old != nil && old != g {
			old.from = max(old.from, old.reached(now))
		}
		taker.at, taker.round = g, s.round
		if due := g.due(taker.Permits); next == nil || due < at {
			next, at = taker, due
		}
		if taker == s.head {
			break
		}
	}
	return next, at
}

// taker is the first in the line for whom a segment has enough, and no segment before it.
func (s *Schedule[V]) taker(g *segment, looked *int) *Waiter[V] {
	for w := s.head; w != nil && (w == s.head || *looked < scan); w = w.next {
		if w != s.head {
			*looked++
		}
		if w.Permits > g.left || w.round == s.round {
			continue
		}
		s.lapse(g, g.came(w.Came))
		if w.Permits <= g.left && (w.state == covered || !s.tooLate(w, g.due(w.Permits))) {
			return w
		}
	}
	return nil
}

// forget drops segments at the front that are used up. The last one may still grow while somebody waits.
func (s *Schedule[V]) forget() {
	for len(s.segments) > 0 {
		g := s.segments[0]
		if g.left > 0 || s.refund != nil && s.refund.segment == g || len(s.segments) == 1 && s.head != nil && !g.settled {
			return
		}
		s.segments[0] = nil
		s.segments = s.segments[1:]
	}
}

// lapse drops the permits of a segment that are due before a time of the store's clock.
func (s *Schedule[V]) lapse(g *segment, before int64) {
	if n := g.lapsing(before); n > 0 {
		s.changes++
		g.take(n)
		s.owned -= n
	}
}

// lapseAll drops the permits that were due before somebody came.
func (s *Schedule[V]) lapseAll(came int64) {
	for _, g := range s.segments {
		s.lapse(g, g.came(came))
	}
}
