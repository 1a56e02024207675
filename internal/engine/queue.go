package engine

import (
	"math/rand/v2"
	"slices"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// queue has the waiters of a bucket in this process, and the stretches of the bucket's time that the process owns for them. The
// coordinator's mu must be held for all methods.
//
// Usually all waiters are in line. When the bucket begins a new epoch, by a Reset or because its store has lost it, later grants may fall
// due before earlier ones. Waiters with earlier grants then keep their due times in a schedule of their own, in old.
//
// Invariants:
//   - Waiters are served first come, first served, except reservations, which do not wait behind uncovered waiters. In turns, those of one
//     tenant are served so, except that a smaller request may take permits that are too few for the one before it.
//   - The line of each waiter is in q.line or q.old.
//   - While mu is free, due is no later than the earliest due time and the earliest timeout of any waiter. So before due, release has nothing
//     to do.
type queue struct {
	line    *schedule.Schedule[*Call]
	old     []*schedule.Schedule[*Call]
	due     int64                     // when the first waiter is due, or its timeout ends; 0 if there is no such time
	yields  int64                     // when permits of line that no waiter needs go back, see [schedule.Schedule.Yield]; 0 if there is no such time
	late    []*schedule.Waiter[*Call] // waiters of old whose permits would be due too late
	pace    schedule.Pace             // of line, while it has waiters beyond the look-ahead
	confirm *refund                   // the next refund of line, which a caller waits for; nil if none does

	class   Class
	floor   Floor // of a class below the highest
	turns   turns // of the tenants; off unless the Order is InTurns
	callers *callers
	view    *View
}

// init creates the line. With strict, permits that are overdue by more than 100 ms lapse (T6). That is for the system's clock, since the
// clock of a test may jump by more.
func (q *queue) init(strict bool, class Class, callers *callers, view *View) {
	q.line, q.class, q.callers, q.view = &schedule.Schedule[*Call]{Strict: strict}, class, callers, view
}

// quiet reports whether there are no waiters, and none that became too late has still to be refused.
func (q *queue) quiet() bool { return q.line.Quiet() && len(q.old) == 0 && q.late == nil }

// asks reports whether it is time to ask the store for the uncovered waiters.
func (q *queue) asks(now int64) bool {
	at, some := q.line.AskAt()
	return some && at <= now
}

// asker returns the first waiter that the next batch asks for, or nil.
func (q *queue) asker(now int64) *schedule.Waiter[*Call] {
	if !q.asks(now) {
		return nil
	}
	return q.line.Uncovered()
}

// beyond reports whether there are waiters that the store has refused so far, because their permits lie beyond the look-ahead.
func (q *queue) beyond() bool {
	first := q.line.Uncovered()
	return first != nil && first.Value.decided != 0
}

// head returns a waiter at the head of a schedule, or nil if there are no waiters.
func (q *queue) head() *Call {
	if h := q.line.Head(); h != nil {
		return h.Value
	}
	for _, s := range q.old {
		if h := s.Head(); h != nil {
			return h.Value
		}
	}
	return nil
}

// last returns when the last owned permit is due; 0 if the process owns none.
func (q *queue) last() int64 {
	at := q.line.Last()
	for _, s := range q.old {
		at = max(at, s.Last())
	}
	return at
}

// join appends a call to the queue. It refuses the call if it cannot be in time. A reservation joins only if permits are left over for it;
// otherwise its line stays nil.
func (q *queue) join(w *Call, now int64) {
	if q.due != 0 && q.due <= now { // with 512 callers, calling release each time would cost 2 % of the processor
		q.release(now)
	}
	w.Value, w.Until = w, schedule.Forever
	if wait := w.remaining(now); wait < permit.MaxExact {
		w.Until = now + wait
	}
	stale := false
	if at, some := q.line.AskAt(); some && at > now && !w.reserves() { // the waiters ahead were refused
		w.decided = now
		if q.turnInTime(w, now) {
			// the estimates are of those behind the owned permits
		} else if due := q.paced(w, now); due > w.Until {
			q.callers.refuse(w, due-now)
			return
		} else if due := q.estimate(w, now); due > w.Until {
			if stale = !q.view.heardLately(now); !stale {
				q.callers.refuse(w, due-now)
				return
			}
		}
	}
	q.turns.add(w)
	q.line.Join(&w.Waiter)
	if w.line = q.line; stale { // the next reply shows whether the call can be in time
		q.line.AskNow()
	}
	q.refuseExpired(now)
	if w.state == pending && w.reserves() {
		q.giveSpare(w, now)
	}
}

// giveSpare grants permits that no waiter wants to a reservation that has joined, or removes the reservation again.
func (q *queue) giveSpare(w *Call, now int64) {
	if _, covered := q.line.DueOf(&w.Waiter); !covered {
		q.line.Leave(&w.Waiter, now)
		w.line = nil
		return
	}
	offset := q.view.offset.Micros()
	w.promise.seen = Seen{q.view.terms.Terms, permit.Balance{Next: max(q.view.free, q.line.Last()) - offset}, now - offset}
	q.promise(w, now)
}

// offers reports whether there are spare permits for reservations. Those that were granted to a limiter which is no longer in force go back, or lapse.
func (q *queue) offers() bool {
	g, _ := q.line.SpareTerms().(*granted)
	return q.line.Spare() && (g == nil || g.limiter.successor == nil && g.limiter.recalled == nil)
}

// promise marks a reservation as granted. It keeps its place, whatever happens to its context. A charge is done with that: its permits were used
// before, and only their time is still to pass.
func (q *queue) promise(w *Call, now int64) {
	w.due, _ = w.line.DueOf(&w.Waiter)
	w.decided, w.state = now, waiting
	if w.charges() {
		w.line.Owe(&w.Waiter)
		q.callers.end(w, done, nil)
		return
	}
	w.line.Promise(&w.Waiter)
	w.timeout, w.deadline = permit.MaxExact, 0
	w.answer()
}

// ahead returns how many permits must fall due before a newcomer is served: those of the uncovered waiters and, under PayNow, its own.
func (q *queue) ahead(w *Call, t *permit.Terms) int64 {
	wanted := q.line.Wanted()
	if q.turns.on() {
		wanted = q.turns.behind(w, q.line)
	}
	if !t.PayLater {
		wanted += w.Permits
	}
	return max(0, wanted)
}

// estimate returns when a newcomer's permits are due if no other process asks for any.
func (q *queue) estimate(w *Call, now int64) int64 {
	t := w.limiter.Effective()
	return max(now, q.view.free) + span(t, q.ahead(w, t))
}

// paced returns when a newcomer's permits are due at the pace at which the queue moved of late, which includes the demand of other
// processes. It returns 0 if the pace is not known.
//
// Measured with two processes at 20/s and three times that demand: without the pace, 53 % of the refusals took longer than a second with
// timeouts of 4 s, and 59 % with 15 s; with it, 7 % and 6 %. As many calls are granted, and the whole rate is used (TestMostAreRefusedEarly).
func (q *queue) paced(w *Call, now int64) int64 {
	t := w.limiter.Effective()
	cost, known := q.pace.Cost(q.ahead(w, t), Horizon(t))
	if !known {
		return 0
	}
	return max(now, q.line.Last()) + int64(min(paceMargin*cost, permit.MaxExact))
}

// paceMemory is the averaging window of the pace, in horizons. The pace is used once it covers one horizon. The pace is
// only about as exact as paceMargin, so a call is refused only if it would miss its timeout by more than that.
const (
	paceMemory = 4
	paceMargin = 0.95
)

// release ends the calls whose permits are due, in order, and those whose timeouts have ended.
func (q *queue) release(now int64) {
	if q.quiet() {
		q.due = 0
		q.pace.Forget()
		return
	}
	for w, at := q.next(now); w != nil; w, at = q.next(now) {
		q.turns.served(w)
		w.due = at
		if w.decided == 0 {
			w.decided = w.Came
		}
		q.moved(w, now, at)
		q.callers.end(w, done, nil)
	}
	if !q.beyond() {
		q.pace.Forget()
	}
	q.refuseExpired(now)
}

// next removes a waiter whose permits are due and returns it, with their due time. If there is none, it removes the waiters whose timeouts
// have ended, updates due, and returns nil.
func (q *queue) next(now int64) (w *Call, at int64) {
	q.due = 0
	q.takeTurn(now)
	for i := len(q.old); i >= 0; i-- {
		s := q.line
		if i < len(q.old) {
			s = q.old[i]
		}
		first, at := s.Next(now)
		if first == nil && s.Expire(now) { // the permits that they were gathering may suffice for another waiter
			q.takeTurn(now)
			first, at = s.Next(now)
		}
		if first != nil {
			return first.Value, at
		}
		q.due = sooner(q.due, at)
		q.due = sooner(q.due, s.Timeout())
	}
	if len(q.old) > 0 {
		some := q.rejoin()
		q.old = slices.DeleteFunc(q.old, func(s *schedule.Schedule[*Call]) bool { return !s.Waiting() })
		if some { // the line may own permits for them that are due first
			return q.next(now)
		}
	}
	return nil, 0
}

// sooner returns the earlier of two times, where 0 stands for never.
func sooner(a, b int64) int64 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// moved records for the pace that a call leaves the queue: its permits were due at due, or its caller gives up.
func (q *queue) moved(w *Call, now, due int64) {
	if !q.beyond() || now-due > schedule.Tolerated { // this process was stopped
		q.pace.Forget()
		return
	}
	q.pace.Serve(now, w.Permits, paceMemory*Horizon(w.limiter.Effective()))
}

// refuseExpired refuses the calls that have left the schedules because their permits would be due too late.
func (q *queue) refuseExpired(now int64) {
	expired := q.line.Expired()
	if q.late != nil {
		expired, q.late = append(expired, q.late...), nil
	}
	for _, e := range expired {
		if w := e.Value; w.reserves() {
			w.line = nil // it asks by itself
		} else {
			q.callers.refuse(w, max(0, e.Due()-w.Came))
		}
	}
}

// abandon ends a call whose caller gives up. Waiters behind it move up, and the next caller asks the store. It returns how many of its permits have
// lapsed, because it was gathering them.
func (q *queue) abandon(w *Call, now int64) (lapsed int64) {
	q.callers.abandon(w)
	q.view.drop()
	if w.line == nil {
		return 0
	}
	if w.Waits() && !w.Covered() {
		q.moved(w, now, now) // the waiters behind it are served sooner
	}
	return w.line.Leave(&w.Waiter, now)
}

// grant adds the permits of a call to those that the process owns. The call may have left.
func (q *queue) grant(w *Call, g *schedule.Grant, now int64) {
	q.follow(g, now)
	q.line.Grant(&w.Waiter, g, now)
}

// keep adds permits to those that the process owns, for a call that no longer waits for them.
func (q *queue) keep(permits int64, g *schedule.Grant, now int64) {
	q.follow(g, now)
	q.line.Grant(&schedule.Waiter[*Call]{Permits: permits}, g, now)
}

// follow prepares for a grant of this moment. If it lies before the end of the permits that the process owns, another process has settled, and they
// move up. If they cannot, they are kept apart, so that each permit keeps its due time.
func (q *queue) follow(g *schedule.Grant, now int64) {
	if !q.line.Follow(g, now) {
		q.split()
	}
}

// shrink lowers the number of permits of a reservation that is not due. It returns how many of its permits have lapsed, because it was gathering
// them.
func (q *queue) shrink(w *Call, permits, now int64) (lapsed int64) {
	if permits == 0 {
		return q.abandon(w, now)
	}
	q.view.drop()
	r := w.line.Shrink(&w.Waiter, permits, now)
	if r.Served {
		w.due = r.Due
		q.callers.end(w, done, nil)
	}
	return r.Lapsed
}

// owned returns how much of the bucket's time in the future the process owns, up to about most.
func (q *queue) owned(now, most int64) int64 {
	micros := q.line.Ahead(now, most)
	for _, s := range q.old {
		if micros >= most {
			break
		}
		micros += s.Ahead(now, most)
	}
	return micros
}

// grantReserved adds a reservation that was granted. It arrived at came.
func (q *queue) grantReserved(w *Call, g *schedule.Grant, came int64) {
	q.follow(g, came)
	if !q.line.Behind(g) {
		q.split()
	}
	w.Value, w.Came, w.line, w.Until = w, came, q.line, schedule.Forever
	q.line.GrantTo(&w.Waiter, g, came)
	q.promise(w, w.decided)
}

// refused records that the store refused the first asker, whose wait exceeds the look-ahead by beyond. The waiters behind it count as
// refused, too.
func (q *queue) refused(w *Call, beyond, received, now int64) {
	t := w.limiter.Effective()
	if w.bounded { // it was asked for within its timeout, and waits for its turn
		beyond = max(0, beyond+w.remaining(now)-LookAhead(t, q.class, w.Permits, q.owned(now, 4*Horizon(t)), q.view.offset.Trip()))
	}
	q.line.Refused(received, Horizon(t), beyond, rand.Float64())
	if free := q.view.free; free > received { // the next grants arrive before the bucket runs dry
		q.line.AskBy(free - q.view.offset.Trip())
	}
	q.floor.Earn(t, q.class, w.limiter.Floor, q.view.free-received, w.Permits, now)
	if w.promised() {
		q.line.AskAfter(received + retryMicros)
	}
	q.dropHopeless(t, now)
	q.refuseExpired(now)
}

// fail ends a call after an error of the store, unless the process owns permits for it. A granted reservation asks again instead.
func (q *queue) fail(w *Call, err error, now int64) {
	if w.promised() {
		q.retry(w, q.callers.config.unasked(err), now)
		return
	}
	if w.state.over() || w.covered() {
		return
	}
	if w.line != nil {
		w.line.Leave(&w.Waiter, now)
	}
	q.callers.fail(w, err)
}

// failAskers fails the waiters that the next batch would ask for.
func (q *queue) failAskers(err error, now int64) {
	for w := q.asker(now); w != nil; {
		call := w.Value
		if w = w.Following(); call.flight == nil {
			q.fail(call, err, now)
		}
	}
}

// retryMicros is the pause before reservations whose permits have lapsed ask again after a refusal or a failure.
const retryMicros = 100_000

// retry lets a reservation whose permits have lapsed ask again after a failure. If the failure is not one of the whole store, it moves
// behind the other waiters, which need not wait for permits that may never be granted.
func (q *queue) retry(w *Call, whole bool, now int64) {
	if !whole && !w.covered() {
		w.line.Leave(&w.Waiter, now)
		w.line.Join(&w.Waiter)
	}
	q.line.AskAfter(now + retryMicros)
}

// dropHopeless removes the uncovered waiters that cannot be in time by the last reply.
func (q *queue) dropHopeless(t *permit.Terms, now int64) {
	q.line.Hopeless(now, q.view.free, t.PayLater, func(n int64) int64 { return span(t, n) })
}

// askSooner makes the first uncovered waiter ask at once if a reply shows that it could be granted now: the bucket has a new epoch, a higher
// rate, or refunded permits.
func (q *queue) askSooner(out *permit.Outcome, now int64) {
	w := q.line.Uncovered()
	if at, some := q.line.AskAt(); !some || at <= now {
		return
	}
	t := q.view.terms.Terms
	wait, ok := Wait(t, out.Bucket.Balance, out.NowMicros, w.Permits)
	if ok && wait <= LookAhead(t, q.class, w.Permits, q.owned(now, 4*Horizon(t)), q.view.offset.Trip()) {
		q.line.AskNow()
	}
}

// begunAnew separates the grants of a new epoch from earlier ones, unless the bucket knows these: see follow. begins is the balance from which the
// bucket now grants.
func (q *queue) begunAnew(epoch, begins int64) {
	offset := q.view.offset.Micros()
	if begins+offset < q.line.Last()-schedule.Jitter && !q.line.Known(epoch, offset) {
		q.split()
	} else {
		q.line.Forget(epoch)
	}
}

// split moves the covered waiters to a schedule of their own.
func (q *queue) split() {
	old := q.line.Split()
	q.confirmFailed(nil) // nothing is refunded to an earlier epoch
	for first := q.line.Head(); first != nil; first = first.Following() {
		first.Value.line = q.line
	}
	for first := old.Head(); first != nil; first = first.Following() {
		first.Value.line = old
	}
	if old.Waiting() {
		q.old = append(q.old, old)
	}
}

// rejoin moves the waiters of old whose permits have lapsed to the line. It reports whether there were any.
func (q *queue) rejoin() (some bool) {
	for _, s := range q.old {
		for first := s.Uncovered(); first != nil; first = s.Uncovered() {
			s.Leave(first, 0)
			q.line.Join(first)
			first.Value.line = q.line
			some = true
		}
		q.late = append(q.late, s.Expired()...)
	}
	return some
}

// recall gives up what was granted under a quota that was lowered since, and does nothing else. The waiters ask again: granted reservations first,
// at once and however far ahead the new quota moves them.
func (q *queue) recall(now int64) {
	v := q.view
	if v.terms == nil || !q.line.Owns() && len(q.old) == 0 {
		return
	}
	outdated := func(t schedule.Terms, epoch int64) bool {
		g := t.(*granted)
		return g.limiter.Outdates(g.Terms, epoch, v.terms.Terms, v.epoch) || v.terms.limiter.Outdates(g.Terms, epoch, v.terms.Terms, v.epoch)
	}
	q.release(now) // what was due before is used
	some := q.line.Recall(now, outdated)
	for _, s := range q.old {
		some = s.Recall(now, outdated) || some
	}
	if !some {
		return
	}
	v.drop()
	q.rejoin()
	for w := q.line.Uncovered(); w != nil; w = w.Following() {
		w.Value.recalled = w.Value.promised()
	}
}

// pause moves all that the process owns by micros, for a bucket that Penalize holds back until a time.
func (q *queue) pause(micros, until, now int64) {
	q.line.Pause(micros, until, now)
	for _, s := range q.old {
		s.Pause(micros, until, now)
	}
}

// resume ends a pause early, by micros: a Reset or the loss of the state has ended the penalty.
func (q *queue) resume(micros, now int64) {
	q.line.Resume(micros, now)
	for _, s := range q.old {
		s.Resume(micros, now)
	}
}

// confirmation returns the next refund of the line, for a caller that waits for its result.
func (q *queue) confirmation() *refund {
	if q.confirm == nil {
		q.confirm = &refund{done: make(chan struct{})}
	}
	return q.confirm
}

// confirmFailed ends a confirmation whose refund was not sent.
func (q *queue) confirmFailed(err error) {
	if r := q.confirm; r != nil {
		q.confirm, r.err = nil, err
		close(r.done)
	}
}

// refundFailed drops the refund of the line, because the store is unavailable.
func (q *queue) refundFailed(err error, now int64) {
	if q.line.Refund() != nil {
		q.line.Refunded(false, false, now)
		q.confirmFailed(err)
	}
}

// refund removes the refund of the line, to be sent.
func (q *queue) refund() *refund {
	r := q.confirm
	if q.confirm = nil; r == nil {
		r = new(refund)
	}
	back := q.line.Refund()
	g := back.Terms.(*granted)
	r.line, r.limiter = q.line, g.limiter
	r.give = back.Permit(g.Version)
	return r
}

// refunder returns the limiter whose refund the line has to send; nil if there is none.
func (q *queue) refunder() *Limiter {
	if r := q.line.Refundable(); r != nil {
		return r.Terms.(*granted).limiter
	}
	return nil
}
