package schedule

// Next removes and returns a waiter whose permits are due. If there is none, it returns nil and when to call it again, or 0 if no waiter is
// covered.
func (s *Schedule[V]) Next(now int64) (w *Waiter[V], at int64) {
	if s.now = now; s.head == nil || s.owned == 0 && s.promised == 0 { // the store must grant permits first
		s.round++
		s.forget()
		s.served = 0
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
			s.served = 0
			return nil, 0
		case at > now:
			s.served = 0
			return nil, at
		case s.Strict && at < now-Tolerated:
			s.lapse(w.at, now-Tolerated-w.at.offset)
			late = true
			continue
		}
		s.owned -= w.Permits
		w.Origin = w.at.origin()
		w.at.take(w.Permits)
		s.unlink(w)
		s.walks.earn()
		s.served = at
		return w, at
	}
}

// earliest returns the waiter that is served next, and when its permits are due. That is the head, by the first segment that has enough
// permits for it, or a waiter behind it, by a segment before that. Permits that no waiter gathers lapse when they are due.
func (s *Schedule[V]) earliest(now int64) (next *Waiter[V], at int64) {
	s.forget()
	if s.head == nil {
		return nil, 0
	}
	scanned := 0
	s.round++
	for _, g := range s.segments {
		if g.left == 0 {
			continue
		}
		s.lapse(g, max(g.from, g.came(s.head.Came)))
		taker := s.taker(g, &scanned)
		if g.unclaimed || taker == nil {
			g.from = max(g.from, g.reached(now))
		}
		if g.unclaimed = taker == nil; g.unclaimed {
			continue
		}
		if s.lapse(g, g.from); taker.Permits > g.left { // what is left may suffice for another
			if taker = s.taker(g, &scanned); taker == nil {
				g.unclaimed = true
				continue
			}
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

// taker returns the first waiter for which g has enough permits and no earlier segment has. It adds the waiters behind the head that it
// examined to *scanned, which is bounded by scan.
func (s *Schedule[V]) taker(g *segment, scanned *int) *Waiter[V] {
	for w := s.head; w != nil && (w == s.head || *scanned < scan); w = w.next {
		if w != s.head {
			*scanned++
		}
		if w.Permits > g.left || w.round == s.round {
			continue
		}
		s.lapse(g, g.came(w.Came))
		if w.Permits <= g.left && (w.state == covered || !s.missed(w, g.due(w.Permits))) {
			return w
		}
	}
	return nil
}

// forget drops empty segments from the front. The last segment may still grow while there are waiters.
func (s *Schedule[V]) forget() {
	for len(s.segments) > 0 {
		g := s.segments[0]
		if g.left > 0 || s.refund != nil && s.refund.segment == g || len(s.segments) == 1 && s.head != nil && g.ending == open {
			return
		}
		s.segments[0] = nil
		s.segments = s.segments[1:]
	}
}

// lapse drops the permits of a segment that are due before a time by the store's clock, and returns their number.
func (s *Schedule[V]) lapse(g *segment, before int64) (n int64) {
	if n = g.lapsing(before); n > 0 {
		s.changes++
		g.take(n)
		s.owned -= n
	}
	return n
}

// lapseAll drops the permits that were due before a waiter arrived.
func (s *Schedule[V]) lapseAll(came int64) {
	for _, g := range s.segments {
		s.lapse(g, g.came(came))
	}
}
