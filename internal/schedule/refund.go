package schedule

import "github.com/go-tokenbucket/tokenbucket/internal/permit"

// Refund is a stretch of permits that returns to the bucket, from the balance To to the balance End.
type Refund struct {
	Terms            Terms
	To, End          permit.Balance
	Epoch, Tag, Tail int64 // Tag is the bucket's tail before the refund, Tail the one after it
	Permits          int64
	segment          *segment
}

// Refundable returns the refund that Refund would return, or a part of it, or nil. Its permits are no longer owned.
func (s *Schedule[V]) Refundable() *Refund {
	if s.sent {
		return nil
	}
	if s.refund == nil {
		s.prepare()
	}
	return s.refund
}

// Refund takes spare permits from the end of the last segment, to be sent to the store. It returns nil if there are none, if another
// process has taken permits behind them, or if a refund is in flight.
func (s *Schedule[V]) Refund() *Refund {
	if s.sent {
		return nil
	}
	s.prepare()
	s.sent = s.refund != nil
	return s.refund
}

// prepare creates a refund, or enlarges one that was not sent yet.
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
		if m == s.walks.futile || !s.mayWalk() {
			return
		}
		s.recover()
		if spare = s.walks.plan[n-1].left; spare == 0 {
			s.walks.futile = m
			return
		}
	}
	s.toRefund(g, spare)
}

// toRefund moves the last n permits of the last segment to the refund that is not sent yet.
func (s *Schedule[V]) toRefund(g *segment, n int64) {
	if s.refund == nil {
		s.refund = &Refund{Terms: g.terms, End: g.end, Epoch: g.epoch, Tag: g.tag, Tail: g.tag, segment: g}
	}
	r := s.refund
	r.Permits += n
	if r.To = g.cursor; n < g.left {
		r.To, _ = g.terms.After(g.cursor, g.left-n)
	} else if !g.used {
		r.Tail = g.prev
	}
	g.end, g.left = r.To, g.left-n
	s.owned -= n
}

// unprepare takes back a refund that was not sent.
func (s *Schedule[V]) unprepare() {
	r := s.refund
	if r == nil || s.sent {
		return
	}
	s.refund = nil
	r.segment.end = r.End
	r.segment.left += r.Permits
	s.owned += r.Permits
}

// Refunded settles the refund in flight. If its result is not known, because the reply was lost, the permits are lost too.
func (s *Schedule[V]) Refunded(accepted, known bool, now int64) {
	s.now = now
	r := s.refund
	if r == nil {
		return // it belonged to a bucket that was reset
	}
	g := r.segment
	s.refund, s.sent = nil, false
	switch {
	case accepted:
		s.AskNow()
		if n := len(s.segments); r.Tail != r.Tag && s.segments[n-1] == g {
			s.segments = s.segments[:n-1]
		}
	case known: // another process took permits behind it: keep it for the next waiters, except for permits that are due already
		g.end, g.settled = r.End, true
		g.left += r.Permits
		s.owned += r.Permits
		s.changes++
		if g.left == r.Permits {
			s.lapse(g, g.reached(now))
		}
		s.cover()
	default:
		g.settled = true
	}
}
