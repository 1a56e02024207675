package group

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// reply is a reply in hand, and what it does to the parts of the participant. The participant's mu must be held for all methods.
//
// Invariant: the members are updated first, so what the calls get is converted by the clock offsets of this reply, and moved by its penalties. A late
// reply leaves the members as they are: its grants go back.
type reply struct {
	*flight
	now  int64         // of the arrival, in limiter microseconds
	mono time.Duration // of the arrival

	config  *Config
	members []member
	queue   *queue
	view    *view
}

// settle hands out the decisions of the stores.
func (r *reply) settle() {
	for k := range r.parts {
		for _, m := range r.parts[k].members {
			r.settleMember(&r.parts[k], m)
		}
	}
	var again []*Call
	first := -1
	for i, q := range r.rows {
		if r.settleRow(i, q) {
			if again = append(again, q); first < 0 {
				first = i
			}
		}
	}
	if len(again) > 0 {
		r.queue.askAgain(again)
		r.refused(first)
	} else if !r.late {
		r.askSooner()
	}
	r.queue.recall(r.now)
	r.queue.offer(r.now)
	r.queue.useless(r.now)
	if r.view.show(r.flight, r.members); len(r.queue.spare) > 0 {
		r.view.drop()
	}
	r.queue.keepSpare(r.now)
	r.queue.release(r.now)
}

// settleMember records what a leg shows of a member, and ends the requests of that member alone.
func (r *reply) settleMember(leg *leg, m int) {
	b, to := &r.batch[m], &r.members[m]
	to.keepSession(b, r.late)
	switch {
	case leg.decided:
		if !r.late {
			r.observe(m)
		}
		r.settleOwn(m, b.Requests, nil)
	case leg.err != nil:
		to.report(leg.err)
		r.settleOwn(m, nil, r.config.Failure(m, leg.err))
	default: // it was not asked, because an earlier part has failed
		r.requeueOwn(m)
	}
}

// observe records what the reply shows of a member, and moves the grants if that is a penalty.
func (r *reply) observe(m int) {
	to, out := &r.members[m], &r.batch[m].Outcome
	if !r.config.Immediate {
		to.heard(out, r.began, r.mono)
	}
	r.queue.shift(m, to.observe(out, r.received(m), r.now-r.local), r.now)
}

// received returns when a member's store has decided, by the limiter's clock, or later.
func (r *reply) received(m int) int64 { return cmp.Or(r.batch[m].Outcome.Local, r.now) }

// settleOwn ends the requests of a member alone. err is nil if there is a reply.
func (r *reply) settleOwn(m int, requests []permit.Request, err error) {
	for i, o := range r.own[m] {
		ok := err == nil && requests[i].Grant.OK
		switch {
		case o.refund != nil:
			missing := int64(0)
			if ok {
				missing = requests[i].Grant.Permits
			}
			r.queue.refunded(m, o.refund, ok, missing, err, r.now)
		case o.call == nil:
		case err != nil:
			r.queue.fail(o.call, err)
		case !ok && o.call.settles[m] > 0:
			r.queue.fail(o.call, r.config.Failure(m, r.members[m].Limiter.Overflow(o.call.settles[m])))
		default:
			if o.call.settles[m] = 0; !slices.ContainsFunc(o.call.settles, func(n int64) bool { return n != 0 }) {
				r.queue.end(o.call, done, nil)
			}
		}
	}
}

// requeueOwn keeps the requests of a member alone for the next batch.
func (r *reply) requeueOwn(m int) {
	for _, o := range r.own[m] {
		if o.refund != nil {
			r.members[m].giveBack(o.refund)
		} else if o.call != nil && o.call.state == asking && !slices.Contains(r.queue.asking, o.call) {
			r.queue.wait(o.call)
		}
	}
}

// settleRow hands out the decision about a joint request. q is nil if its call does not wait for the flight any more. It reports whether the call asks
// again.
func (r *reply) settleRow(i int, q *Call) (again bool) {
	if q != nil {
		q.flight = nil
	}
	live := q != nil && q.state == asking
	if live && !q.reserves && !r.late && r.dueAtOnce(i, q) {
		r.serve(q)
		return false
	}
	g := r.granted(i)
	switch failed := r.failed(i); {
	case g != nil && live && !r.late:
		r.noteOutcome(q, i)
		q.decided = cmp.Or(q.decided, r.received(r.parts[0].members[0]))
		if r.queue.movesUp(q) {
			if sooner := r.queue.spare.take(q, g.due-1); sooner != nil {
				g.confirm, sooner.confirm = sooner.confirm, nil
				r.queue.spare.add(g)
				g = sooner
			}
		}
		r.queue.give(q, g, r.now)
	case g != nil && r.late:
		r.queue.giveBack(g, inTurn, r.now)
	case g != nil:
		r.queue.free(g, r.now)
	case !live:
	case failed != nil:
		r.queue.failOrRetry(q, failed, r.now)
	default:
		r.noteOutcome(q, i)
		return r.refuseOrKeep(q, i)
	}
	return false
}

// dueAtOnce reports whether a joint request was granted by one part, and is due. For permit.Any it sets the member.
func (r *reply) dueAtOnce(i int, q *Call) bool {
	if len(r.parts) > 1 {
		return false
	}
	granted := false
	for m, request := range r.decided(i) {
		g := &request.Grant
		if !g.OK {
			continue
		}
		if g.WaitMicros > 0 {
			return false
		}
		if granted = true; r.config.Choice == permit.Any {
			q.member = m
		}
	}
	return granted
}

// serve ends a call whose permits are due.
func (r *reply) serve(q *Call) {
	q.decided = cmp.Or(q.decided, r.now)
	q.due = q.decided
	for m := range r.members {
		if r.config.Choice == permit.All || m == q.member {
			r.members[m].floor.Spend(q.permits * r.members[m].Weight)
		}
	}
	r.queue.end(q, done, nil)
}

// granted returns the grant of a joint request; nil if it was refused or has failed. What parts have granted to such a request goes back.
func (r *reply) granted(i int) (g *grant) {
	taken, best := 0, -1
	for m, request := range r.decided(i) {
		if !request.Grant.OK {
			continue
		}
		if g == nil {
			g = newGrant(request.Permits/r.members[m].Weight, len(r.members))
		}
		if best >= 0 && r.config.Choice == permit.Any { // a later part is due sooner
			r.queue.giveBack(g.split(best), inTurn, r.now)
			taken--
		}
		taken++
		best = m
		if q := r.rows[i]; q != nil && !q.reserves {
			r.members[m].floor.Spend(request.Permits)
		}
		g.parts[m] = r.part(m, &request.Grant)
	}
	if g == nil {
		return nil
	}
	g.settle()
	if r.config.Choice == permit.All && taken < len(r.members) {
		r.queue.giveBack(g, inTurn, r.now)
		return nil
	}
	return g
}

// part returns a member's part of a grant.
func (r *reply) part(m int, g *permit.Grant) part {
	out, due := &r.batch[m].Outcome, r.received(m)
	if g.WaitMicros > 0 {
		due = out.NowMicros + g.WaitMicros + r.members[m].offset.Micros()
	}
	return part{true, g.Place, out.Bucket.Terms, out.NowMicros, due, g.Place.After.Next - g.Place.Before.Next}
}

// failed returns the error because of which a joint request was not decided; nil if there is none.
func (r *reply) failed(i int) (err error) {
	for k := range r.parts {
		switch leg := &r.parts[k]; {
		case leg.decided && r.config.Choice == permit.Any:
			return nil // the others count
		case leg.err != nil && err == nil && (leg.rows == nil || len(r.parts) == 1 || slices.Contains(leg.rows, i)):
			err = r.config.Failure(leg.blamed(), leg.err)
		}
	}
	return err
}

// unasked returns the error of the first part that was not decided because of a failure; nil if there is none.
func (r *reply) unasked() error {
	for k := range r.parts {
		if leg := &r.parts[k]; leg.err != nil {
			return r.config.Failure(leg.blamed(), leg.err)
		}
	}
	return nil
}

// noteOutcome keeps what was decided about the members' parts of a reservation.
func (r *reply) noteOutcome(q *Call, i int) {
	if q.promised || !q.reserves {
		return
	}
	q.members = make([]Outcome, len(r.members))
	for k := range r.parts {
		if !r.parts[k].decided {
			continue
		}
		for _, m := range r.parts[k].members {
			out := &r.batch[m].Outcome
			q.members[m].Seen = engine.Seen{Terms: out.Bucket.Terms, Balance: out.Bucket.Balance, Now: out.NowMicros}
		}
	}
	for m, request := range r.decided(i) {
		o := &q.members[m]
		o.Wait, o.Taken, o.Refused = request.Grant.WaitMicros, request.Grant.OK, refuses(request)
	}
}

// refuses reports whether a member could not grant its part of a joint request in time.
func refuses(r *permit.Request) bool {
	return !r.Grant.OK && (r.Grant.Overflow || r.Grant.WaitMicros > r.MaxWaitMicros)
}

// refuseOrKeep ends a call that was refused. It reports whether the call waits instead, because its permits lie beyond the look-ahead.
func (r *reply) refuseOrKeep(q *Call, i int) (waits bool) {
	final, some, wait, over, by := false, true, int64(-1), int64(-1), -1
	all, overflows := r.config.Choice == permit.All, 0
	for m, request := range r.decided(i) {
		if !refuses(request) {
			continue
		}
		if q.reserves && !q.promised { // not a waiter, see refused
			r.members[m].heldBack(request.Permits, r.now)
		}
		w := request.Grant.WaitMicros
		late := w > r.most[i] && len(r.members[m].refunds) == 0 // it cannot be in time, however often it asks
		ends := late || r.ends[i]&(1<<m) != 0
		if request.Grant.Overflow { // no state of the member grants it
			overflows++
			if all || overflows == len(r.members) {
				r.queue.fail(q, r.config.Failure(m, r.members[m].Limiter.Overflow(request.Permits)))
				return false
			}
			ends, w = true, permit.MaxExact
		}
		final, some = final || ends, some && ends
		if by < 0 || tells(r.config.Choice, w, wait) {
			wait, by = w, m
		}
		if beyond := w - request.MaxWaitMicros; over < 0 || tells(r.config.Choice, beyond, over) {
			over = beyond
		}
	}
	if !all {
		final = some
	}
	if q.member = by; !final || q.promised {
		q.decided = cmp.Or(q.decided, r.now)
		return true
	}
	if !all {
		if err := r.unasked(); err != nil { // a member that was not asked might grant it: its failure policy decides
			r.queue.fail(q, err)
			return false
		}
	}
	if q.decided != 0 {
		wait += r.now - q.came
	}
	if q.decided = r.now; q.reserves {
		q.over = over
	}
	r.queue.refuse(q, max(0, wait))
	return false
}

// refused plans the next attempt for the waiters. first is the row of the first that was refused.
func (r *reply) refused(first int) {
	pause, beyond, least, by := 0.0, int64(0), int64(math.MaxInt64), int64(math.MaxInt64)
	for m, request := range r.decided(first) {
		over := request.Grant.WaitMicros - request.MaxWaitMicros
		if request.Grant.OK || over <= 0 {
			continue
		}
		r.members[m].heldBack(request.Permits, r.now)
		if to := &r.members[m]; to.free > r.now { // see engine's queue.refused
			by = min(by, to.free-to.offset.Trip())
		}
		if pause = max(pause, float64(engine.Horizon(r.members[m].effective()))/20); over > beyond {
			r.queue.refuser = m
		}
		beyond, least = max(beyond, over), min(least, over)
	}
	if r.config.Choice == permit.Any {
		beyond = least
	}
	chance := rand.Float64()
	pause = max(pause, 50_000)
	beyond = beyond * 2 / 3
	r.queue.postpone(min(by, r.now+min(max(int64(pause*(0.5+chance)), beyond+int64(pause*chance)), retryMost)), r.now)
}

// retryMost is the longest pause before waiters ask again.
const retryMost = 500_000

// askSooner makes the waiters ask at once if the reply shows that the first could be granted now.
func (r *reply) askSooner() {
	if r.queue.askAt == 0 {
		return
	}
	head := r.queue.head()
	if head == nil {
		r.queue.askAt = 0
		return
	}
	fits := 0
	for k := range r.parts {
		if !r.parts[k].decided {
			return
		}
		for _, m := range r.parts[k].members {
			if r.fits(m, head.permits) {
				fits++
			}
		}
	}
	if fits == len(r.members) || fits > 0 && r.config.Choice == permit.Any {
		r.queue.askAt = 0
	}
}

// fits reports whether a member could grant permits to a waiter within the look-ahead.
func (r *reply) fits(m int, permits int64) bool {
	out, to := &r.batch[m].Outcome, &r.members[m]
	t, n := to.effective(), permits*to.Weight
	wait, ok := engine.Wait(t, out.Bucket.Balance, out.NowMicros, n)
	return ok && wait <= engine.LookAhead(t, to.Limiter.Coordinator.Class, n, r.queue.ahead(m, r.now), to.offset.Trip())
}
