package schedule

import (
	"sort"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Recut puts the bucket's time that the process owns under other terms, because another configuration is in force for its waiters. convert returns
// the terms of a segment from now on, and its cursor under them; now is by the store's clock. Equal terms change nothing. Each segment then has the
// permits that fit into its time, so none falls due outside it. What is too short for a permit goes back, or lapses. All waiters keep their places. The
// caller must have taken all waiters that are due by Next before.
func (s *Schedule[V]) Recut(now int64, convert func(t Terms, cursor permit.Balance, now int64) (Terms, permit.Balance)) {
	s.now = max(s.now, now)
	s.unprepare()
	for i, g := range s.segments {
		end, r := g.end, s.refund
		if r != nil && r.segment == g {
			end = r.End
		}
		terms, cursor := convert(g.terms, g.cursor, now-g.offset)
		if terms == g.terms || g.cursor.Next == end.Next { // stored permits take no time, and are due already
			continue
		}
		s.owned -= g.left
		g.terms, g.cursor, g.back = terms, cursor, unknown
		if g.ending == passed {
			g.pass()
		}
		g.left = g.fits(g.end)
		s.owned += g.left
		switch {
		case end != g.end: // the refund comes back if the store refuses it
			r.Permits = g.fits(end) - g.left
		case r == nil && i == len(s.segments)-1 && g.ending == open:
			if s.toRefund(g, 0); !s.refund.To.Before(end) { // the store would refuse it, and the segment would be settled
				s.unprepare()
			}
		}
	}
	s.changes++
	s.recover()
	s.AskNow()
}

// Firm reports whether reservations that were granted, or debts, wait for permits.
func (s *Schedule[V]) Firm() bool { return s.firm > 0 }

// mostFit bounds the permits that Recut finds in a segment.
const mostFit = 1 << 30

// fits returns how many permits fit between the cursor and a balance.
func (g *segment) fits(end permit.Balance) int64 {
	return int64(sort.Search(mostFit, func(i int) bool {
		after, ok := g.terms.After(g.cursor, int64(i)+1)
		return !ok || end.Before(after)
	}))
}
