// Package schedule decides when the callers of one process who wait for permits of one bucket may go.
//
// The obvious way binds each caller to the place that the store granted it. Then a caller who leaves wastes its place, or all
// behind it must be booked again; and a process that was stopped for a moment finds all its callers late, and must ask for each
// of them anew. So here the process owns stretches of the bucket's time (segments), and its callers own positions in one line.
// When its time has come, the head of the line takes the next permits of the first segment that has enough of them. Leaving the
// line costs nothing, those behind move up by themselves, and a pause costs what fell due in it, and no more.
package schedule

const (
	// Tolerated, in microseconds, is how late a permit may be used on a machine that is merely busy. It adds at most
	// rate × lateness permits to a window at the upstream.
	Tolerated = 100_000

	// Jitter, in microseconds, is how far apart the store's clock may seem through answers that take different times.
	Jitter = 100_000

	// scan bounds how many waiters are looked at for permits that are too few for the head.
	scan = 32

	// A process asks again for those who wait beyond its reach after horizon/retryShare, or retryLeast if that is longer, times 0.5 to
	// 1.5; later if the refusal says so, but not after more than retryMost. In microseconds.
	retryShare = 20
	retryLeast = 50_000
	retryMost  = 500_000
)

// Schedule is the line of one bucket's waiters and the segments that are for them. The zero value is empty. It has no lock, no
// clock and no network: now is an argument, and what is to be done is returned.
//
// Invariants:
//   - T1: a segment is contiguous, and its tag is the bucket's tail as far as this process knows, unless it is settled.
//   - T2: at most one refund is under way.
//   - T3: nobody is delayed by somebody behind, unless the store's clock or the bucket's epoch has stepped.
//   - T4: a request is served from one segment, by permits that were not due before it came.
//   - T5: after a pause of the bucket all segments move by the same time, and what is left over of them lapses.
//   - T6: permits overdue by more than 100 ms lapse, and no others that somebody waits for.
//   - owned is the sum of what is left of the segments, and what the covered want is at most that.
type Schedule[V any] struct {
	// Strict: the clock is real, so a permit that is overdue by more than 100 ms is not used any more (T6).
	Strict bool

	queue[V]
	now      int64      // the latest time that it was told
	segments []*segment // in order of time
	owned    int64
	refund   *Refund // prepared or under way
	sent     bool    // it is under way
	stepped  bool    // a segment was put in front of others
	askAt    int64   // when to ask for those who are not covered; 0: at once
	expired  []*Waiter[V]
	round    uint64
	changes  uint64 // that let others move up, or back
	walks    walks
}

// Waiting tells whether anybody waits.
func (s *Schedule[V]) Waiting() bool { return s.head != nil }

// Head is the first in the line; nil: nobody waits.
func (s *Schedule[V]) Head() *Waiter[V] { return s.head }

// Owns tells whether anything is owned, or is on its way back.
func (s *Schedule[V]) Owns() bool { return s.owned > 0 || s.refund != nil }

// Spare tells whether more is owned than is wanted, or something is on its way back.
func (s *Schedule[V]) Spare() bool { return s.owned > s.promised || s.refund != nil }

// Last is when the last of what is owned falls due; 0: nothing is owned.
func (s *Schedule[V]) Last() int64 {
	if s.owned == 0 {
		return 0
	}
	g := s.segments[len(s.segments)-1]
	return g.end.Next + g.offset
}

// Split returns a schedule of what is owned and of those who are covered by it, and leaves behind the others: the bucket has begun
// anew, and what it grants now falls due before what it granted then.
func (s *Schedule[V]) Split() *Schedule[V] {
	old := &Schedule[V]{Strict: s.Strict}
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
	for ; w != nil; w = w.next {
		w.at, w.round, w.known = nil, 0, 0
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
	}
	for _, g := range old.segments {
		g.settled = true
	}
	return old
}

// Forget drops what a bucket has forgotten that begins another epoch. Those who wait keep their times.
func (s *Schedule[V]) Forget(epoch int64) {
	for i := len(s.segments) - 1; i >= 0; i-- {
		g := s.segments[i]
		if g.settled && s.head != nil {
			break // those before it are, too, or cannot be given back any more
		}
		if g.epoch != epoch {
			if g.settled = true; s.head == nil && (s.refund == nil || s.refund.segment != g) {
				s.owned -= g.left
				g.left = 0
			}
		}
	}
}

// DueOf is when a waiter would go if nothing changes; false: it is not in the line, or not covered.
func (s *Schedule[V]) DueOf(w *Waiter[V]) (at int64, ok bool) {
	if w.state != covered {
		return 0, false
	}
	if w.known != s.changes+1 { // all at once, for the next who ask
		s.walk(func(w *Waiter[V], g *segment) bool {
			w.due, w.known = g.due(w.Permits), s.changes+1
			return true
		})
	}
	return w.due, w.known == s.changes+1
}

// Idle tells that nobody waits and nothing is owned: a request may pass by the schedule.
func (s *Schedule[V]) Idle() bool { return s.head == nil && s.owned == 0 && s.refund == nil }

// Quiet tells that Next and Expired would return nothing, whenever it is.
func (s *Schedule[V]) Quiet() bool { return s.head == nil && s.expired == nil }

// Uncovered is the first waiter for whom the process owns no permits yet; nil: there is none.
func (s *Schedule[V]) Uncovered() *Waiter[V] { return s.first }

// Wanted is how many permits those who are not covered want altogether.
func (s *Schedule[V]) Wanted() int64 { return s.wanted }

// Join appends a waiter to the line.
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
	}
}

// begin makes way for a first waiter: what was due before it came is not for it. If that can go back, it does.
func (s *Schedule[V]) begin(came int64) {
	if n := len(s.segments); n > 0 {
		if g := s.segments[n-1]; g.lapsing(g.came(came)) > 0 {
			s.prepare()
		}
	}
	s.lapseAll(came)
}

// Leave takes a waiter who gives up out of the line. Those who are due must have gone before.
//
// The permits that it was gathering lapse as far as they are due, unless all of them go back: somebody else would use them later
// than at their time.
func (s *Schedule[V]) Leave(w *Waiter[V], now int64) {
	s.now = max(s.now, now)
	if w.state == absent {
		return
	}
	if g := w.at; g != nil && !(w == s.head && w == s.tail && s.returnable(g)) {
		g.from = max(g.from, g.reached(now))
		s.lapse(g, g.from)
	}
	s.unlink(w)
	s.walks.earn()
	s.changes++
	s.cover()
}

// Promise lets a waiter have its permits however late they come.
func (s *Schedule[V]) Promise(w *Waiter[V]) {
	if w.state != absent && w.Until != Forever {
		s.limited--
	}
	w.Until = Forever
}

// returnable tells whether the end of a segment can go back.
func (s *Schedule[V]) returnable(g *segment) bool {
	return (s.refund == nil || !s.sent && s.refund.segment == g) && g.left > 0 && !g.settled && g == s.segments[len(s.segments)-1]
}

// Serve takes the head of the line out of it, to be let go at once by what the store has granted: permits that are due. It does
// nothing and returns false if something is owned, or w is not the head: then the grant is to be added.
func (s *Schedule[V]) Serve(w *Waiter[V]) bool {
	if w != s.head || s.owned > 0 || s.refund != nil {
		return false
	}
	s.unlink(w)
	return true
}

// Grant adds what the store has granted for the request of a waiter, who may have left the line since.
func (s *Schedule[V]) Grant(w *Waiter[V], g *Grant, now int64) {
	s.now = now
	if w.state == uncovered {
		w.Until = max(w.Until, g.due()) // its timeout counts from the store's decision
	}
	s.walks.earn()
	if s.own(g); w == s.first {
		s.promote(w)
	}
	if s.stepped { // the head takes what is earlier: the others' permits may be too late for them now
		s.stepped = false
		s.recover()
	}
	s.cover()
}

// GrantTo adds what the store has granted for a request that was not in the line, and puts its waiter in: in front of those who
// are not covered, for their permits will be later ones.
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
		if g := other.at; g != nil { // it may gather no more there: w comes first
			g.from = max(g.from, g.reached(now))
		}
	}
	s.link(w, behind)
	if w.due, w.known = g.due(), s.changes+1; !s.mixed() { // of different sizes it is that or sooner
		w.due = s.dueOf(w)
	}
	w.state = covered
	if s.promised += w.Permits; s.stepped {
		s.stepped = false
		s.recover()
	}
}

// own adds a grant to the segments: to the last one, or as one more.
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
			last.end, last.tag = after, grant.Tag
			last.offset, last.widest = grant.Offset, max(last.widest, grant.Offset)
			last.left += grant.Permits
			return
		}
		last.settled = last.settled || last.tag != grant.Prev || last.epoch != grant.Epoch
	}
	s.segments = append(s.segments, &segment{
		terms: grant.Terms, cursor: grant.Before, end: after, left: grant.Permits, from: -1 << 62, paused: -1 << 62,
		offset: grant.Offset, widest: grant.Offset,
		epoch: grant.Epoch, tag: grant.Tag, prev: grant.Prev,
	})
	for i := n; i > 0 && s.segments[i].ends() < s.segments[i-1].ends(); i-- { // the clock or the epoch has stepped
		s.segments[i-1].settled = true
		s.segments[i], s.segments[i-1] = s.segments[i-1], s.segments[i]
		s.stepped = true
		s.changes++
	}
}

// adjust lets what was granted before fall due by a newer offset if that is smaller: an offset is never too small, so the smaller is the
// better. Otherwise what falls due later might seem to fall due sooner, and somebody might wait for the wrong permits. An offset that is
// smaller by more than answers may differ is of a clock that was set forward, and says nothing of what was granted before.
func (s *Schedule[V]) adjust(offset int64) {
	for i := len(s.segments) - 1; i >= 0; i-- {
		g := s.segments[i]
		if g.offset <= offset || g.offset > offset+Jitter {
			return // those before it are no larger, or of another time
		}
		g.offset = offset
		s.changes++
	}
}

// Refused notes that the store would not grant the next request of the line yet: it would have had to wait for longer than its
// reach, by beyond. It is asked for again when it may be granted, or after a pause: chance, from 0 to 1, keeps processes apart
// that would be granted at the same time. Otherwise the nearest would always be first.
func (s *Schedule[V]) Refused(now, horizon, beyond int64, chance float64) {
	pause := max(float64(horizon)/retryShare, retryLeast)
	beyond = beyond * 2 / 3 // what the process owns shrinks meanwhile, and its reach grows by half of that
	s.askAt = now + min(max(int64(pause*(0.5+chance)), beyond+int64(pause*chance)), retryMost)
}

// AskAt is when to ask the store for those who are not covered; false: there are none.
func (s *Schedule[V]) AskAt() (at int64, ok bool) { return s.askAt, s.first != nil }

// AskAfter lets nobody ask before a time.
func (s *Schedule[V]) AskAfter(at int64) { s.askAt = max(s.askAt, at) }

// AskNow lets the next batch ask for those who are not covered: the store has got room.
func (s *Schedule[V]) AskNow() { s.askAt = 0 }

// Ahead is how much of the bucket's time this process owns that lies ahead, in microseconds, or at least most.
func (s *Schedule[V]) Ahead(now, most int64) (micros int64) {
	for _, g := range s.segments {
		if micros += g.ahead(now); micros >= most {
			break
		}
	}
	return micros
}

// Pause moves all segments: the bucket was held back, until a time of the store's clock. Those for whom they are wait that much longer.
// What they had gathered until then moves, too, and falls due again before that time: nobody else may use it.
func (s *Schedule[V]) Pause(micros, until int64) {
	s.changes++
	for w := s.head; w != s.first; w = w.next {
		if w.Until != Forever {
			w.Until += micros
		}
	}
	for _, g := range s.segments {
		g.cursor.Next += micros
		g.end.Next += micros
		g.settled, g.paused = true, until
	}
	if s.refund != nil { // it will be refused
		s.refund.End.Next += micros
	}
}
