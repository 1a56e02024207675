// Package schedule decides when the waiters of one process receive their permits of one bucket.
//
// The obvious design binds each waiter to the permits that the store granted for it. Then a waiter that leaves wastes its permits, or all
// waiters behind it must be granted again. And a process that was stopped for a moment finds all its waiters late, and must request permits
// for each of them again. Here the process owns segments, which are stretches of the bucket's time, and waiters own positions in one
// queue. The head of the queue takes the next permits of the first segment that has enough of them, when they are due. So leaving the
// queue costs nothing, the waiters behind move up, and a pause costs only the permits that fell due during it.
package schedule

import (
	"container/heap"
	"slices"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

const (
	// Tolerated, in microseconds, is how late a permit may be used, to allow for a busy machine. It adds at most rate × lateness permits
	// to a window at the upstream.
	Tolerated = 100_000

	// Jitter, in microseconds, bounds the difference between clock offsets that is due to the varying duration of round trips.
	Jitter = 100_000

	// scan bounds how many waiters are examined for permits that are too few for the head.
	scan = 32

	// For waiters beyond its look-ahead, a process asks the store again after horizon/retryShare or retryLeast, whichever is longer, times
	// 0.5 to 1.5. A refusal may require a longer pause, of at most retryMost. In microseconds.
	retryShare = 20
	retryLeast = 50_000
	retryMost  = 500_000
)

// Schedule is the queue of one bucket's waiters, with the segments that the process owns for them. The zero value is empty. It has no
// lock, no clock and no network: the time is an argument, and actions are returned to the caller. The owner's lock must be held.
//
// Waiters are covered or uncovered: the segments suffice for the covered waiters, which come first in the queue. Permits that are too few
// for the head are gathered: they fall due before they suffice for a request, and are kept for the waiter that takes them later. Permits
// that fall due unused lapse.
//
// Invariants:
//   - T1: a segment is contiguous. While it is open, its tag is the tail of the bucket as far as this process has learned.
//   - T2: at most one refund is in flight.
//   - T3: no waiter is delayed by one behind it, unless the store's clock or the bucket's epoch has stepped.
//   - T4: a request is served from one segment, by permits that were not due before it joined the queue.
//   - T5: after a pause of the bucket all segments move by the same time, and the permits that are left over lapse. No permit that was not
//     due before the pause falls due before its end.
//   - T6: permits overdue by more than 100 ms lapse. No other permits lapse while a waiter needs them.
//   - owned is the sum of the permits left in all segments. The covered waiters need at most that.
type Schedule[V any] struct {
	// Strict enforces T6. It requires a real clock.
	Strict bool

	queue[V]
	now      int64      // the latest time passed to a method
	segments []*segment // in order of time
	owned    int64      // permits left in all segments
	refund   *Refund    // prepared or in flight; nil if there is none
	sent     bool       // refund is in flight
	stepped  bool       // a segment was inserted before others
	askAt    int64      // when to ask the store for the uncovered waiters; 0 means at once
	expired  []*Waiter[V]
	served   int64  // due time of the last waiter that Next returned; 0 after it found none
	round    uint64 // number of the current search by earliest
	changes  uint64 // counts changes that move other waiters up or back
	walks    walks
}

// Waiting reports whether the queue has waiters.
func (s *Schedule[V]) Waiting() bool { return s.head != nil }

// Head returns the first waiter of the queue, or nil if it is empty.
func (s *Schedule[V]) Head() *Waiter[V] { return s.head }

// Owns reports whether the process owns permits or has a refund.
func (s *Schedule[V]) Owns() bool { return s.owned > 0 || s.refund != nil }

// Spare reports whether the process owns more permits than the covered waiters need, or has a refund.
func (s *Schedule[V]) Spare() bool { return s.owned > s.promised || s.refund != nil }

// SpareTerms returns the terms of the permits at the end of those that the process owns, or of the refund; nil if there are neither.
func (s *Schedule[V]) SpareTerms() Terms {
	switch n := len(s.segments); {
	case n > 0:
		return s.segments[n-1].terms
	case s.refund != nil:
		return s.refund.Terms
	}
	return nil
}

// Last returns when the last owned permit is due, or 0 if none is owned.
func (s *Schedule[V]) Last() int64 {
	if s.owned == 0 {
		return 0
	}
	g := s.segments[len(s.segments)-1]
	return g.end.Next + g.offset
}

// Split returns a schedule with the segments and the covered waiters, and keeps the uncovered waiters. It is for a bucket that was reset, or whose
// permits were given back by a settlement: its new grants are due before its old ones.
func (s *Schedule[V]) Split() *Schedule[V] {
	old := &Schedule[V]{Strict: s.Strict}
	old.InTurns = s.InTurns
	*old, *s = *s, *old
	old.refund, old.sent = nil, false
	s.expired, old.expired = old.expired, nil
	w := old.first
	if w == nil {
		return old
	}
	if old.tail, s.tail = w.prev, old.tail; w.prev == nil {
		old.head = nil
	} else {
		w.prev.next, w.prev = nil, nil
	}
	s.head, s.first, old.first = w, w, nil
	s.wanted, old.wanted = old.wanted, 0
	s.parked, old.parked = old.parked, nil
	if s.InTurns {
		s.divideParked(old)
	}
	for ; w != nil; w = w.next {
		w.at, w.round = nil, 0
		s.waiters++
		old.waiters--
		if w.Permits > 1 {
			s.large++
			old.large--
		}
		if w.Until != Forever {
			s.limited++
			old.limited--
		}
		if w.firm {
			s.firm++
			old.firm--
		}
	}
	for _, g := range old.segments {
		g.ending = settled
	}
	return old
}

// Forget settles the segments of other epochs, because a bucket in a new epoch accepts no refunds of them. If the queue is empty it drops
// their permits; otherwise the waiters keep their due times.
func (s *Schedule[V]) Forget(epoch int64) {
	for i := len(s.segments) - 1; i >= 0; i-- {
		g := s.segments[i]
		if g.ending == settled && s.head != nil {
			break // the segments before it are settled too, or not refundable
		}
		if g.epoch != epoch {
			if g.ending = settled; s.head == nil && (s.refund == nil || s.refund.segment != g) {
				s.owned -= g.left
				g.left = 0
			}
		}
	}
}

// maxExactWalk bounds the waiters and segments that DueOf walks through.
const maxExactWalk = 64

// DueOf returns the due time of a covered waiter, and false if the waiter is not covered. It changes nothing, and its cost hardly grows
// with the queue. For requests of mixed sizes over several segments only a walk finds the exact time. If there are too many of them, DueOf
// returns the time of the last walk or grant.
func (s *Schedule[V]) DueOf(w *Waiter[V]) (at int64, ok bool) {
	switch {
	case w.state != covered:
		return 0, false
	case !s.mixed():
		return s.dueAt(s.owned-s.ranks.wants.until(w.rank)+w.Permits, w.Permits), true
	case s.waiters+len(s.segments) > maxExactWalk:
		return w.due, true
	}
	at = w.due
	s.walk(func(other *Waiter[V], g *segment) bool {
		if other == w {
			at = g.due(w.Permits)
		}
		return true
	})
	return at, true
}

// Follow prepares for a grant. It may lie before the end of permits that were granted earlier, if another process has given permits back, which this
// process has not learned otherwise. All that is owned moves up then, see advance. Follow returns false if it cannot. A grant of an earlier batch whose
// reply was late lies before owned permits, too, but these were granted later.
func (s *Schedule[V]) Follow(grant *Grant, now int64) bool {
	for _, g := range slices.Backward(s.segments) {
		switch {
		case !g.known(grant.Epoch, grant.Offset) || grant.Before.Next >= g.end.Next: // it lies behind this one, and those before it
			return true
		case g.left > 0 && grant.ID > g.id:
			back, last := grant.Returned, s.segments[len(s.segments)-1]
			if last.epoch == grant.Epoch {
				back -= last.back
			}
			if last.back == unknown {
				back = 0
			}
			micros := g.end.Next - grant.Before.Next
			return s.advance(micros, min(back, float64(micros)/spacing(grant.Terms)), grant.Terms, now)
		}
	}
	return true
}

// Known reports whether a bucket in an epoch has forgotten nothing of the permits that are owned, and reckons by the same clock.
func (s *Schedule[V]) Known(epoch, offset int64) bool {
	n := len(s.segments)
	return n > 0 && s.segments[n-1].known(epoch, offset)
}

// Behind reports whether a grant lies behind all permits that are owned. It does not after a settlement has filled the bucket, which begins an
// epoch. A reservation whose grant lies before others' needs a schedule of its own, because the head would take its permits, and what is left
// may be too little for it.
func (s *Schedule[V]) Behind(grant *Grant) bool {
	for _, g := range slices.Backward(s.segments) {
		begins, ends := grant.Before.Next, g.end.Next
		if d := grant.Offset - g.offset; g.epoch != grant.Epoch && (d > Jitter || d < -Jitter) { // the store's clock has stepped in between
			begins, ends = begins+grant.Offset, g.ends()
		}
		if begins >= ends {
			return true
		}
		if g.left > 0 {
			return false
		}
	}
	return true
}

// Idle reports whether the queue is empty and nothing is owned. Then a request may bypass the schedule.
func (s *Schedule[V]) Idle() bool { return s.head == nil && s.owned == 0 && s.refund == nil }

// Quiet reports whether Next and Expired would return nothing at any time.
func (s *Schedule[V]) Quiet() bool { return s.head == nil && s.expired == nil }

// Uncovered returns the first uncovered waiter, or nil if there is none.
func (s *Schedule[V]) Uncovered() *Waiter[V] { return s.first }

// Wanted returns the number of permits that the uncovered waiters need.
func (s *Schedule[V]) Wanted() int64 { return s.wanted }

// Join appends a waiter to the queue.
func (s *Schedule[V]) Join(w *Waiter[V]) {
	s.now = max(s.now, w.Came)
	if s.head == nil {
		s.begin(w.Came)
	}
	s.link(w, s.tail)
	s.walks.earn()
	w.state = uncovered
	s.wanted += w.Permits
	if s.first == nil {
		s.first, s.askAt = w, 0
		s.cover()
	} else if s.askAt > w.Came && w.prev.refused {
		s.park(w)
	}
}

// begin runs before a waiter joins an empty queue. Permits due before the waiter arrived are refunded if possible; otherwise they lapse.
func (s *Schedule[V]) begin(came int64) {
	if n := len(s.segments); n > 0 {
		if g := s.segments[n-1]; g.lapsing(g.came(came)) > 0 {
			s.prepare()
		}
	}
	s.lapseAll(came)
}

// Leave removes a waiter that gives up. The caller must have taken all waiters that are due by Next before.
//
// The permits that the waiter was gathering lapse as far as they are due, because another waiter would use them late. They are kept only
// if the queue becomes empty and they can be refunded. Leave returns the number of those that lapse.
func (s *Schedule[V]) Leave(w *Waiter[V], now int64) (lapsed int64) {
	s.now = max(s.now, now)
	if w.state == absent {
		return 0
	}
	if g := w.at; g != nil && !(w == s.head && w == s.tail && s.returnable(g)) {
		g.from = max(g.from, g.reached(now))
		w.Origin = g.origin()
		lapsed = s.lapse(g, g.from)
	}
	s.unlink(w)
	s.walks.earn()
	s.changes++
	s.cover()
	return lapsed
}

// Shrink lowers the number of permits that a waiter needs to n, at least 1. The others are spare. If n permits are due already, the waiter leaves
// the queue with them, and those that it was gathering beyond them lapse as in Leave. The caller must have taken all waiters that are due by Next
// before.
func (s *Schedule[V]) Shrink(w *Waiter[V], n, now int64) (r Shrunk) {
	s.now = max(s.now, now)
	less := w.Permits - n
	switch w.state {
	case absent:
		return r
	case covered:
		s.promised -= less
		s.ranks.wants.add(w.rank, -less)
	default:
		s.wanted -= less
	}
	if n == 1 && w.Permits > 1 {
		s.large--
	}
	w.Permits = n
	s.walks.earn()
	s.changes++
	if g := w.at; s.gathers(w) && w.state == covered && g.left >= n && g.due(n) <= now {
		r.Served, r.Due, w.Origin = true, g.due(n), g.origin()
		s.owned -= n
		g.take(n)
		s.unlink(w)
		g.from = max(g.from, g.reached(now))
		r.Lapsed = s.lapse(g, g.from)
	}
	s.cover()
	return r
}

// gathers reports whether permits are kept for a waiter that are too few for it yet, as far as the last search by earliest has shown. Those of an
// earlier search may have been taken since.
func (s *Schedule[V]) gathers(w *Waiter[V]) bool { return w.at != nil && w.round == s.round }

// Shrunk is the result of Shrink.
type Shrunk struct {
	Served bool  // the waiter has left the queue
	Due    int64 // when the permits of a served waiter were due
	Lapsed int64 // permits beyond them that have lapsed
}

// Owe records that a waiter is a debt: its permits were used before they were taken. So they need no waiter when they are due, and if they
// lapse they are paid. It accepts them however late they are due, as in Promise.
func (s *Schedule[V]) Owe(w *Waiter[V]) {
	s.Promise(w)
	w.debt = true
}

// Promise records that a waiter is a granted reservation. It has no timeout: it accepts its permits however late they are due.
func (s *Schedule[V]) Promise(w *Waiter[V]) {
	if w.state != absent && w.Until != Forever {
		s.limited--
		s.unpark(w)
	}
	if w.state != absent && !w.firm {
		s.firm++
	}
	w.Until, w.firm = Forever, true
	if n := len(s.segments); n > 0 {
		w.Origin = s.segments[n-1].origin()
	}
}

// returnable reports whether the end of a segment can be refunded.
func (s *Schedule[V]) returnable(g *segment) bool {
	return (s.refund == nil || !s.sent && s.refund.segment == g) && g.left > 0 && g.ending == open && g == s.segments[len(s.segments)-1]
}

// Serve removes the head of the queue, for which the store has granted permits that are due. It does nothing and returns false if w is not
// the head or the process owns permits or has a refund. Then the caller must add the grant by Grant.
func (s *Schedule[V]) Serve(w *Waiter[V]) bool {
	if w != s.head || s.owned > 0 || s.refund != nil {
		return false
	}
	s.unlink(w)
	return true
}

// Grant adds the permits granted for the request of a waiter, which may have left the queue since.
func (s *Schedule[V]) Grant(w *Waiter[V], g *Grant, now int64) {
	s.now = now
	if w.state == uncovered {
		w.due = g.due()
		w.Until = max(w.Until, w.due) // its timeout counts from the store's decision
		if w.place != 0 {
			heap.Fix(&s.parked, w.place-1)
		}
	}
	s.walks.earn()
	if s.own(g); w == s.first {
		s.promote(w)
	}
	if s.stepped { // the head takes the earlier permits, so those of other waiters may be too late now
		s.stepped = false
		s.recover()
	}
	s.cover()
}

// GrantTo adds the permits granted for a request that was not in the queue, and inserts its waiter. The waiter goes before the uncovered
// waiters, because their permits will be due later.
func (s *Schedule[V]) GrantTo(w *Waiter[V], g *Grant, now int64) {
	if s.head == nil {
		s.begin(now)
	}
	s.walks.earn()
	s.own(g)
	behind := s.tail
	if s.first != nil {
		behind = s.first.prev
	}
	for i, other := 0, s.first; other != nil && i <= scan; i, other = i+1, other.next {
		if g := other.at; g != nil { // it stops gathering, because w goes before it
			g.from = max(g.from, g.reached(now))
		}
	}
	s.link(w, behind)
	if w.due = g.due(); !s.mixed() { // with mixed sizes this is an upper bound
		w.due = s.dueOf(w)
	}
	s.rank(w)
	w.state = covered
	if s.promised += w.Permits; s.stepped {
		s.stepped = false
		s.recover()
	}
}

// own adds a grant to the last segment if it continues that, and otherwise as a new segment.
func (s *Schedule[V]) own(grant *Grant) {
	after, _ := grant.Terms.After(grant.Before, grant.Permits)
	s.owned += grant.Permits
	s.adjust(grant.Offset)
	n := len(s.segments)
	if n > 0 {
		last := s.segments[n-1]
		if last.continues(grant) {
			if last.left == 0 {
				last.cursor = grant.Before
			}
			last.end, last.id, last.tag, last.back = after, grant.ID, grant.Tag, grant.Returned
			last.offset, last.widest = grant.Offset, max(last.widest, grant.Offset)
			last.left += grant.Permits
			return
		}
		if last.epoch != grant.Epoch {
			last.ending = settled
		} else if last.tag != grant.Prev {
			last.pass()
		}
	}
	s.segments = append(s.segments, &segment{
		terms: grant.Terms, cursor: grant.Before, end: after, left: grant.Permits, from: -1 << 62, paused: -1 << 62,
		offset: grant.Offset, widest: grant.Offset,
		epoch: grant.Epoch, id: grant.ID, tag: grant.Tag, prev: grant.Prev, back: grant.Returned,
	})
	for i := n; i > 0 && s.segments[i].ends() < s.segments[i-1].ends(); i-- { // the clock or the epoch has stepped
		s.segments[i-1].ending = settled
		s.segments[i], s.segments[i-1] = s.segments[i-1], s.segments[i]
		s.stepped = true
		s.changes++
	}
}

// adjust applies a newer clock offset to earlier segments if it is smaller than theirs. An offset is never too small, so the smaller one is
// better. With different offsets, later permits might seem to be due before earlier ones, and a waiter might wait for the wrong ones. An
// offset that is smaller by more than Jitter comes from a clock that was set forward. It does not apply to earlier segments.
func (s *Schedule[V]) adjust(offset int64) {
	for i := len(s.segments) - 1; i >= 0; i-- {
		g := s.segments[i]
		if g.offset <= offset || g.offset > offset+Jitter {
			return // the offsets before it are no larger, or from before the clock was set
		}
		g.offset = offset
		s.changes++
	}
}

// Refused records that the store refused the next request of the queue, because its permits would be due after the look-ahead, by beyond.
// The process asks again when the request may be granted, or after a pause. chance, from 0 to 1, spreads processes whose requests may be
// granted at the same time. Otherwise the process nearest to the store would always be first.
func (s *Schedule[V]) Refused(now, horizon, beyond int64, chance float64) {
	pause := max(float64(horizon)/retryShare, retryLeast)
	beyond = beyond * 2 / 3 // meanwhile the owned time shrinks, and the look-ahead grows by half of that
	s.askAt = now + min(max(int64(pause*(0.5+chance)), beyond+int64(pause*chance)), retryMost)
	for w := s.first; w != nil && !w.refused; w = w.next { // waiters that were covered before
		s.park(w)
	}
	for w := s.tail; w != nil && w.state == uncovered && !w.refused; w = w.prev { // waiters that have joined since
		s.park(w)
	}
}

// AskAt returns when to ask the store for the uncovered waiters, and false if there are none.
func (s *Schedule[V]) AskAt() (at int64, ok bool) { return s.askAt, s.first != nil }

// AskAfter postpones the next request for uncovered waiters until a time.
func (s *Schedule[V]) AskAfter(at int64) { s.askAt = max(s.askAt, at) }

// AskBy lets the process ask the store for the uncovered waiters at a time, unless it does so before. The pause after a refusal is long beside
// a short look-ahead: all that is owned may fall due during it, and without other processes the bucket would be idle then.
func (s *Schedule[V]) AskBy(at int64) { s.askAt = min(s.askAt, at) }

// AskNow lets the next batch ask for the uncovered waiters, because the bucket has room again.
func (s *Schedule[V]) AskNow() { s.askAt = 0 }

// Ahead returns how much of the bucket's future time this process owns, in microseconds. It stops counting at most.
func (s *Schedule[V]) Ahead(now, most int64) (micros int64) {
	for _, g := range s.segments {
		if micros += g.ahead(now); micros >= most {
			break
		}
	}
	return micros
}

// Pause moves all segments by micros, for a bucket that is paused until a time. It moves them by more if a permit that is not due yet would
// otherwise fall due before until. Waiters whose permits are then too late leave the queue.
//
// Permits that were gathered before the pause move too, and fall due again before until. No other waiter may use them.
func (s *Schedule[V]) Pause(micros, until, now int64) {
	s.now = now
	for _, g := range s.segments {
		if n := g.lapsing(g.reached(now)); n < g.left {
			micros = max(micros, until-g.offset-g.permit(n+1))
		}
	}
	s.move(micros, until)
}

// Resume ends a pause early: permits fall due as if it had been shorter by micros.
func (s *Schedule[V]) Resume(micros, now int64) {
	s.now = now
	s.move(-micros, now)
}

// advance moves all segments up by micros, because as much of the bucket's debt was given back: a number of permits, under terms. The permits of
// which that makes the due time earlier than now are due now. It does nothing and returns false if these could be more than were given back, because
// permits of other terms are owned that lie closer together.
func (s *Schedule[V]) advance(micros int64, permits float64, terms Terms, now int64) bool {
	for _, g := range s.segments {
		if g.left > 0 && g.terms != terms && float64(micros-1) > permits*spacing(g.terms) {
			return false
		}
	}
	s.now = now
	s.changes++
	for _, g := range s.segments {
		g.shift(-micros)
		g.moved = max(g.moved, now-g.offset)
	}
	s.shifted(-micros)
	return true
}

// Settled records a settlement of this process under terms, which has moved the bucket's balance from p.Before to p.After and replaced its tail.
// If the last segment was the tail, it still is, unless permits were stored because no debt was left.
func (s *Schedule[V]) Settled(p *permit.Place, terms Terms, now int64) {
	n := len(s.segments)
	if n == 0 || !permit.Succeeds(p.Epoch, s.segments[n-1].epoch) {
		return
	}
	s.unprepare()
	last := s.segments[n-1]
	// What is stored lies between the segment and the next grant, so they must not become one: costs would not be additive.
	tail := last.ending == open && last.tag == p.Prev && last.end == p.Before && p.After.Stored == p.Before.Stored
	micros := p.Before.Next - p.After.Next
	permits := (float64(micros) + p.After.Carry - p.Before.Carry) / spacing(terms)
	if !s.advance(micros, permits, terms, now) {
		last.ending = settled
		return
	}
	switch {
	case last.terms != terms || last.epoch != p.Epoch:
		last.back = unknown
	case last.back != unknown:
		last.back += permits // the segment has moved by them
	}
	if !tail {
		last.pass()
		return
	}
	last.tag, last.end = p.Tag, p.After
	for _, g := range s.segments {
		g.carry(p.After.Carry - p.Before.Carry)
	}
}

// move delays all segments of a bucket that is paused until a time by micros, or advances them if micros is negative.
func (s *Schedule[V]) move(micros, until int64) {
	s.changes++
	for _, g := range s.segments {
		g.shift(micros)
		g.ending, g.paused = settled, until-g.offset
	}
	s.shifted(micros)
	if before := s.waiters; s.limited > 0 {
		if s.recover(); s.waiters < before { // the permits that the leaving waiters gathered have lapsed
			s.recover()
		}
	}
}

// shifted moves what depends on the time of the segments by micros.
func (s *Schedule[V]) shifted(micros int64) {
	if s.refund != nil { // the store will refuse it
		s.refund.End.Next += micros
	}
	for w := s.head; w != s.first; w = w.next {
		w.due += micros
	}
}
