package tokenbucket

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// waiters are those of a bucket who wait for permits in this process, and the stretches of the bucket's time that are for them.
//
// Usually all are in one line. When the bucket begins anew, by a Reset or since its store has lost it, what it grants from then on falls
// due before what it granted until then. Those who had been granted by then keep their times, in a line of their own.
type waiters struct {
	line    *schedule.Schedule[*call]
	old     []*schedule.Schedule[*call]
	due     int64                     // when the first of them all is due, or refused at its timeout; 0: never
	late    []*schedule.Waiter[*call] // of old lines: whose permits would come too late
	pace    schedule.Pace             // of the line, while some of it are beyond reach
	confirm *refund                   // the next of line's that is sent: somebody waits for its answer; nil: nobody does
}

// begin makes the line. Strict lets permits lapse that are overdue by more than 100 ms (T6). It is for the system's clock: a test's may
// jump by more.
func (w *waiters) begin(strict bool) {
	w.line = &schedule.Schedule[*call]{Strict: strict}
}

// quiet tells that nobody waits, and nobody has left a line too late.
func (w *waiters) quiet() bool { return w.line.Quiet() && len(w.old) == 0 && w.late == nil }

// asks tells whether it is time to ask for those who are not covered.
func (w *waiters) asks(now int64) bool {
	at, some := w.line.AskAt()
	return some && at <= now
}

// beyond tells whether somebody waits to whom the store has refused permits so far, since they lie beyond this process's reach.
func (w *waiters) beyond() bool {
	first := w.line.Uncovered()
	return first != nil && first.Value.decided != 0
}

// any is one who waits; nil: nobody does.
func (w *waiters) any() *call {
	if h := w.line.Head(); h != nil {
		return h.Value
	}
	for _, s := range w.old {
		if h := s.Head(); h != nil {
			return h.Value
		}
	}
	return nil
}

// last is when the last of what is owned falls due; 0: nothing is owned.
func (w *waiters) last() int64 {
	at := w.line.Last()
	for _, s := range w.old {
		at = max(at, s.Last())
	}
	return at
}

// next takes one who is due out of its line. If nobody is, it returns nil, takes those out whose timeouts have ended, and notes when the
// next is due, or its timeout ends.
func (w *waiters) next(now int64) (q *call, at int64) {
	w.due = 0
	for i := len(w.old); i >= 0; i-- {
		s := w.line
		if i < len(w.old) {
			s = w.old[i]
		}
		first, at := s.Next(now)
		if first == nil && s.Expire(now) { // what they were gathering may be enough for another
			first, at = s.Next(now)
		}
		if first != nil {
			return first.Value, at
		}
		w.lookAt(at)
		w.lookAt(s.Timeout())
	}
	if len(w.old) > 0 {
		some := w.rejoin()
		w.old = slices.DeleteFunc(w.old, func(s *schedule.Schedule[*call]) bool { return !s.Waiting() })
		if some { // the line may own permits for them, which may be due first
			return w.next(now)
		}
	}
	return nil, 0
}

// lookAt notes that next is to be called at a time; 0: never.
func (w *waiters) lookAt(at int64) {
	if at != 0 && (w.due == 0 || at < w.due) {
		w.due = at
	}
}

// split notes that the bucket has begun anew.
func (w *waiters) split() {
	old := w.line.Split()
	w.confirmFailed(nil) // nothing goes back to a bucket that is no more
	for first := w.line.Head(); first != nil; first = first.Following() {
		first.Value.line = w.line
	}
	for first := old.Head(); first != nil; first = first.Following() {
		first.Value.line = old
	}
	if old.Waiting() {
		w.old = append(w.old, old)
	}
}

// rejoin moves the waiters of old lines whose permits have lapsed to the line. It reports whether there were any.
func (w *waiters) rejoin() (some bool) {
	for _, s := range w.old {
		for first := s.Uncovered(); first != nil; first = s.Uncovered() {
			s.Leave(first, 0)
			w.line.Join(first)
			first.Value.line = w.line
			some = true
		}
		w.late = append(w.late, s.Expired()...)
	}
	return some
}

// expired returns those of all lines whose permits would come too late: they have left.
func (w *waiters) expired() []*schedule.Waiter[*call] {
	late := w.line.Expired()
	if w.late != nil {
		late, w.late = append(late, w.late...), nil
	}
	return late
}

// pause moves what every line owns: the bucket was held back (Penalize), until a time.
func (w *waiters) pause(micros, until, now int64) {
	w.line.Pause(micros, until, now)
	for _, s := range w.old {
		s.Pause(micros, until, now)
	}
}

// resume ends a pause early, by micros: a Reset, or a lost state, has ended the penalty.
func (w *waiters) resume(micros, now int64) {
	w.line.Resume(micros, now)
	for _, s := range w.old {
		s.Resume(micros, now)
	}
}

// confirmation is the next refund of the line, for one who waits for its answer.
func (w *waiters) confirmation() *refund {
	if w.confirm == nil {
		w.confirm = &refund{done: make(chan struct{})}
	}
	return w.confirm
}

// confirmFailed tells whoever waits for the answer to a refund that it was not sent.
func (w *waiters) confirmFailed(err error) {
	if r := w.confirm; r != nil {
		w.confirm, r.err = nil, err
		close(r.done)
	}
}

// terms are a configuration in force, as a schedule wants to know it, and the limiter for which it was granted.
type terms struct {
	*setting
	limiter *limiter
}

// PayLater implements schedule.Terms.
func (t *terms) PayLater() bool { return t.Payment == PayLater }

// costFromCold is what n permits take of a bucket that is as cold as can be, in microseconds.
func (s *setting) costFromCold(n int64) int64 {
	m := permit.Balance{}
	if s.Kind == warmingUp {
		m.Stored = s.max
	}
	m, ok := s.after(s.Kind, m, n)
	if !ok {
		return maxExact
	}
	return m.Next
}

// horizon is how far ahead a process may own a bucket's time, in microseconds: a second, or four permits' time if that is longer. It is
// the same for all processes of a fleet, since a process that could reach further would starve the others.
func (s *setting) horizon() int64 {
	return max(1_000_000, int64(min(math.Ceil(4*s.interval), maxExact)))
}

// reach is the longest wait with which a process may ask for n permits: the horizon less one permit's time, less half of the time that
// the process owns ahead. It is the same for large and small requests. Who pays now waits for its own cost on top. So processes own equal
// time, and equal time is equal rate, whatever their distance from the store.
func (s *setting) reach(n, ahead int64) int64 {
	most := max(0, s.horizon()-int64(s.interval)) - ahead/2
	if s.Payment == PayNow {
		most += s.costFromCold(n)
	}
	return max(0, min(most, maxExact))
}

// join puts a call into the line of waiters, or ends it if it cannot be in time.
func (c *coordinator) join(q *call, now int64) {
	c.release(now)
	line := c.waiters.line
	q.Value, q.Until = q, schedule.Forever
	if wait := q.remaining(now); wait < maxExact && (q.verb != acquire || q.deadline != 0) {
		q.Until = now + wait
	}
	stale := false
	if at, some := line.AskAt(); some && at > now && q.verb != reserve { // those before it were refused
		q.decided = now
		if due := c.paced(q, line.Wanted(), now); due > q.Until {
			c.refuse(q, due-now)
			return
		}
		if due := c.estimate(q, line.Wanted(), now); due > q.Until {
			if stale = now-c.heard.told > snapshotAge.Microseconds(); !stale {
				c.refuse(q, due-now)
				return
			}
		}
	}
	line.Join(&q.Waiter)
	if q.line = line; stale { // the next answer tells whether it can be in time
		line.AskNow()
	}
	c.refuseExpired(now)
	if q.state == pending && q.verb == reserve { // of permits that nobody wants
		if _, covered := line.DueOf(&q.Waiter); covered {
			offset := c.heard.offset.Micros()
			q.level = c.heard.terms.level(permit.Balance{Next: max(c.heard.free, line.Last()) - offset}, now-offset)
			c.confirm(q, now)
		} else {
			line.Leave(&q.Waiter, now)
			q.line = nil
		}
	}
}

// estimate is when a call could be due behind others who want so many permits, if no other process asks.
func (c *coordinator) estimate(q *call, wanted, now int64) int64 {
	s := q.limiter.effective()
	if s.Payment == PayNow {
		wanted += q.Permits
	}
	return max(now, c.heard.free) + int64(min(float64(wanted)*s.interval, maxExact))
}

// paced is when a call could be due behind so many permits, at the pace at which the line moved of late: other processes ask, too. 0: the
// pace is not known.
//
// Of two processes at 20/s that were asked for three times as much, 53 % of the refused were told later than after a second when their
// timeout was 4 s, and 59 % at 15 s; with it 7 % and 6 %. As many are granted, and the whole rate is used: of the refused, 2.5 % and
// none would have been in time with a tenth of it to spare, instead of somebody behind (TestMostAreRefusedEarly).
func (c *coordinator) paced(q *call, wanted, now int64) int64 {
	s := q.limiter.effective()
	if s.Payment == PayNow {
		wanted += q.Permits
	}
	cost, known := c.waiters.pace.Cost(wanted, s.horizon())
	if !known {
		return 0
	}
	return max(now, c.waiters.line.Last()) + int64(min(paceMargin*cost, maxExact))
}

// confirm notes that permits are there for a reservation.
func (c *coordinator) confirm(q *call, now int64) {
	q.due, _ = q.line.DueOf(&q.Waiter)
	q.decided, q.state = now, waiting
	q.line.Promise(&q.Waiter)
	q.timeout, q.deadline = maxExact, 0 // it is promised, whatever becomes of the context
	q.tellDecided()
}

// refuseExpired ends the calls for whom permits would come too late.
func (c *coordinator) refuseExpired(now int64) {
	for _, w := range c.waiters.expired() {
		if q := w.Value; q.verb == reserve {
			q.line = nil // it asks by itself
		} else {
			c.refuse(q, max(0, w.Due()-q.Came))
		}
	}
}

// release lets everybody go whose permits are due, in order.
func (c *coordinator) release(now int64) {
	if c.waiters.quiet() {
		c.waiters.due = 0
		c.waiters.pace.Forget()
		return
	}
	for q, at := c.waiters.next(now); q != nil; q, at = c.waiters.next(now) {
		q.due = at
		if q.decided == 0 {
			q.decided = q.Came
		}
		c.served(q, now, at)
		c.end(q, done, nil)
	}
	if !c.waiters.beyond() {
		c.waiters.pace.Forget()
	}
	c.refuseExpired(now)
}

// served notes, for the pace of the line, that a call leaves it: it was let go with permits due at that time, or its caller gives up.
func (c *coordinator) served(q *call, now, due int64) {
	if !c.waiters.beyond() || now-due > schedule.Tolerated { // this process was stopped
		c.waiters.pace.Forget()
		return
	}
	c.waiters.pace.Serve(now, q.Permits, paceMemory*q.limiter.effective().horizon())
}

// The pace is measured over so many horizons, and believed after one. Those who might just be in time are let in, as it is no surer.
const (
	paceMemory = 4
	paceMargin = 0.95
)

// refusedFor notes that the store does not grant a call yet, nor those behind it: its wait is longer than its reach, by beyond.
func (c *coordinator) refusedFor(q *call, beyond, received, now int64) {
	s := q.limiter.effective()
	c.waiters.line.Refused(received, s.horizon(), beyond, rand.Float64())
	if q.promised() {
		c.waiters.line.AskAfter(received + retryMicros)
	}
	c.dropHopeless(s, now)
	c.refuseExpired(now)
}

// dropHopeless takes the waiters out of the line that the process owns no permits for, and that cannot be in time by the last reply.
func (c *coordinator) dropHopeless(s *setting, now int64) {
	c.waiters.line.Hopeless(now, c.heard.free, s.Payment == PayLater, func(n int64) int64 {
		return int64(min(float64(n)*s.interval, maxExact))
	})
}

// asker is the first who is to be asked for; nil: nobody.
func (w *waiters) asker(now int64) *schedule.Waiter[*call] {
	if !w.asks(now) {
		return nil
	}
	return w.line.Uncovered()
}
