package schedule

import (
	"slices"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Refund is a stretch of permits that returns to the bucket, from the balance To to the balance End.
type Refund struct {
	Terms            Terms
	To, End          permit.Balance
	Epoch, Tag, Tail int64 // Tag is the bucket's tail before the refund, Tail the one after it; Tag is 0 if it goes back out of turn
	Permits          int64
	segment          *segment
}

// Permit returns the refund for a store.
func (r *Refund) Permit(version int64) permit.Refund {
	if r.Tag == 0 {
		return permit.OutOfTurn(r.Epoch, version, r.segment.id, r.Permits, r.End, r.segment.back)
	}
	return permit.Refund{Epoch: r.Epoch, Tag: r.Tag, Tail: r.Tail, Version: version, To: r.To, End: r.End.Next}
}

// leaves returns what may become of the end of a segment after a refund of its end.
func (r *Refund) leaves(g *segment, accepted, known bool) ending {
	switch {
	case !known || r.Tag == 0:
		return settled
	case accepted:
		return g.ending
	}
	g.pass()
	return g.ending
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

// Yield prepares a refund out of turn. Permits that other processes have taken permits behind serve the waiters of this one until their time
// begins. What no waiter gathers then goes back, and all permits behind move up. They could not before: those in front of it would, too. Yield returns
// when to call it again, or 0 if nothing goes back by the passing of time. Next must have been called before.
func (s *Schedule[V]) Yield(now int64) (at int64) {
	i := slices.IndexFunc(s.segments, func(g *segment) bool { return g.left > 0 })
	if i < 0 || s.refund != nil {
		return 0
	}
	g := s.segments[i]
	if g.ending != passed || s.head != nil && !g.unclaimed {
		return 0
	}
	if at = g.cursor.Next + g.offset; at > now {
		return at
	}
	s.toRefund(g, g.left)
	return 0
}

// toRefund moves the last n permits of a segment to the refund that is not sent yet.
func (s *Schedule[V]) toRefund(g *segment, n int64) {
	if s.refund == nil {
		s.refund = &Refund{Terms: g.terms, End: g.end, Epoch: g.epoch, segment: g}
		if g.ending == open {
			s.refund.Tag, s.refund.Tail = g.tag, g.tag
		}
	}
	r := s.refund
	r.Permits += n
	if r.To = g.cursor; n < g.left {
		r.To, _ = g.terms.After(g.cursor, g.left-n)
	} else if !g.used && r.Tag != 0 {
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
	g.ending = r.leaves(g, accepted, known)
	switch {
	case accepted:
		s.AskNow()
		if n := len(s.segments); (r.Tail != r.Tag || r.Tag == 0 && g.left == 0) && s.segments[n-1] == g {
			s.segments = s.segments[:n-1]
		}
	case known: // another process took permits behind it: keep it for the next waiters, or for Yield. A waiter needs no permits that are due already
		g.end = r.End
		g.left += r.Permits
		s.owned += r.Permits
		s.changes++
		if g.left == r.Permits && (s.head != nil || g.ending != passed) {
			s.lapse(g, g.reached(now))
		}
		s.cover()
	}
}
