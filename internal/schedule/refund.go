package schedule

// Refund is what goes back to the bucket: all from To to End.
type Refund struct {
	Terms            Terms
	To, End          Balance
	Epoch, Tag, Tail int64 // Tail is what the bucket's tail is afterwards
	Permits          int64
	segment          *segment
}

// Refundable is what Refund would return, or a part of it; nil: nothing. It will be given back, and not be used.
func (s *Schedule[V]) Refundable() *Refund {
	if s.sent {
		return nil
	}
	if s.refund == nil {
		s.prepare()
	}
	return s.refund
}

// Refund takes what is owned beyond what is wanted from the end of the last segment, to be sent to the store. It is nil if there
// is nothing, if others have taken behind it, or if another is under way.
func (s *Schedule[V]) Refund() *Refund {
	if s.sent {
		return nil
	}
	s.prepare()
	s.sent = s.refund != nil
	return s.refund
}

// prepare makes a refund, or one that has not been sent yet larger.
func (s *Schedule[V]) prepare() {
	n := len(s.segments)
	spare := s.owned - s.promised
	if n == 0 || spare <= 0 || s.first != nil || !s.returnable(s.segments[n-1]) {
		return
	}
	g := s.segments[n-1]
	spare = min(spare, g.left)
	if s.mixed() {
		m := mark{s.changes, s.owned - s.promised, g, g.end}
		if m == s.walks.vain || !s.mayWalk() {
			return
		}
		s.recover()
		if spare = s.walks.plan[n-1].left; spare == 0 {
			s.walks.vain = m
			return
		}
	}
	if s.refund == nil {
		s.refund = &Refund{Terms: g.terms, End: g.end, Epoch: g.epoch, Tag: g.tag, Tail: g.tag, segment: g}
	}
	r := s.refund
	r.Permits += spare
	if r.To = g.cursor; spare < g.left {
		r.To, _ = g.terms.After(g.cursor, g.left-spare)
	} else if !g.used {
		r.Tail = g.prev
	}
	g.end, g.left = r.To, g.left-spare
	s.owned -= spare
}

// Refunded settles a refund: the store has accepted it or refused it, or nobody knows (then it is lost).
func (s *Schedule[V]) Refunded(accepted, known bool, now int64) {
	s.now = now
	r := s.refund
	if r == nil {
		return // of a bucket that is no more
	}
	g := r.segment
	s.refund, s.sent = nil, false
	switch {
	case accepted:
		s.AskNow()
		if n := len(s.segments); r.Tail != r.Tag && s.segments[n-1] == g {
			s.segments = s.segments[:n-1]
		}
	case known: // somebody has taken behind it: it stays for the next who come, but for what is due already
		g.end, g.settled = r.End, true
		g.left += r.Permits
		s.owned += r.Permits
		s.changes++
		if g.left == r.Permits {
			s.lapse(g, now-g.offset)
		}
		s.cover()
	default:
		g.settled = true
	}
}
