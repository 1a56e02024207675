package group

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// queue is the calls of a participant, and their grants. It decides which call gets which grant, when a call ends, and when the stores are asked. The
// participant's mu must be held for all methods.
//
// Invariants: a call that has not ended is in asking, in owned, or in a flight. Those in asking are in the order of their arrival; those in owned have
// grants that are not due, in the order of the grants. Each grant belongs to one call, is spare, or is on its way back.
type queue struct {
	callers
	asking  []*Call // that have no grant and are not in flight; among them those that have left, until there are too many
	gone    int     // calls in asking that have left
	wanted  int64   // permits that the others in asking want
	owned   []*Call // that have a grant which is not due
	spare   spare   // grants whose calls have left
	askAt   int64   // when to ask for the waiters, because they were refused, in limiter microseconds; 0 for at once
	at      int64   // when the last reply arrived, or the last error
	nextDue int64   // no later than the first due time of owned; 0 if there is none
	nextEnd int64   // no later than the first end of a timeout; 0 if there is none
	refuser int     // the member that refused the waiters last
	quotas  bool    // at least one member is a quota
	strict  bool    // permits that are overdue lapse: by the system's clock, not by that of a test

	config  *Config
	members []member
	view    *view
}

// join adds a newcomer. It reports false if the call has ended instead: too many wait, or it cannot be in time.
func (l *queue) join(q *Call, now int64, mono time.Duration) bool {
	l.count++
	if l.count > l.config.MaxWaiters && q.settles == nil {
		l.fail(q, fmt.Errorf("%w: group: %d wait already", permit.ErrTooManyWaiters, l.config.MaxWaiters))
		return false
	}
	q.arrive(now, mono)
	if q.settles == nil && l.giveSpare(q, now) {
		return true
	}
	if l.head() == nil {
		l.askAt = 0
	} else if q.acquires() && l.askAt > now {
		if l.hopeless(q, now) {
			return false
		}
		if now-l.at >= engine.SnapshotAge.Microseconds() && q.until != math.MaxInt64 {
			l.askAt = 0 // the next reply shows whether the call can be in time
		} else {
			q.decided = now // those ahead were refused, so it counts as refused
		}
	}
	l.wait(q)
	if q.until != math.MaxInt64 {
		l.nextEnd = sooner(l.nextEnd, q.until)
	}
	return true
}

// wait adds a call behind the others in asking.
func (l *queue) wait(q *Call) {
	l.asking = append(l.asking, q)
	l.wanted += q.permits
}

// drop removes a call that has left from asking: at both ends at once, so that those that look for a waiter find one there. Within, the others are moved
// up once half have left, because in a crowd each move costs more than a call.
func (l *queue) drop(q *Call) {
	l.wanted -= q.permits
	l.gone++
	for len(l.asking) > 0 && l.asking[0].state == left {
		l.asking[0] = nil
		l.asking = l.asking[1:]
		l.gone--
	}
	for n := len(l.asking); n > 0 && l.asking[n-1].state == left; n-- {
		l.asking[n-1] = nil
		l.asking = l.asking[:n-1]
		l.gone--
	}
	if l.gone > len(l.asking)/2 {
		l.keep(func(*Call) bool { return true })
	}
}

// keep removes the calls from asking for which it returns false.
func (l *queue) keep(keep func(*Call) bool) {
	l.asking = slices.DeleteFunc(l.asking, func(q *Call) bool {
		if q.state == left {
			return true
		}
		permits := q.permits
		if keep(q) {
			return false
		}
		l.wanted -= permits // keep may have ended the call, and its caller may reuse it
		return true
	})
	l.gone = 0
}

// hopeless refuses a waiter that cannot be in time by the last reply, behind those that wait already.
func (l *queue) hopeless(q *Call, now int64) bool {
	if q.until == math.MaxInt64 || now-l.at >= engine.SnapshotAge.Microseconds() {
		return false
	}
	ahead := int64(0)
	if l.config.Choice == permit.All { // of a choice another member may serve those ahead
		ahead = l.wanted
	}
	late, by := l.dueOf(q.permits, ahead, now)
	if late <= q.until {
		return false
	}
	q.blame(by, late-now, len(l.members))
	l.refuse(q, late-now)
	return true
}

// dueOf returns when a call's permits would be due by the last reply if those that are wanted ahead of it are granted first, and by which member.
func (l *queue) dueOf(permits, ahead, now int64) (due int64, by int) {
	by = -1
	for i := range l.members {
		if at := l.members[i].dueOf(permits, ahead+permits, now); by < 0 || tells(l.config.Choice, at, due) {
			due, by = at, i
		}
	}
	return due, by
}

// head returns the first waiter that is not in flight and has no grant; nil if there is none.
func (l *queue) head() *Call {
	if i := slices.IndexFunc(l.asking, func(q *Call) bool { return q.state != left && q.waiter() }); i >= 0 {
		return l.asking[i]
	}
	return nil
}

// sends reports whether the next batch would ask for a call.
func (l *queue) sends(now int64) bool {
	for _, q := range l.asking {
		if q.state == left {
			continue
		}
		if l.asks(q, now) {
			return true
		}
		if q.acquires() {
			break // so do the waiters behind it; reservations do not wait among them for long
		}
	}
	return l.asksAside(now)
}

// asksAside reports whether a reservation or a settlement is to be sent, though the waiters are not.
func (l *queue) asksAside(now int64) bool {
	if l.askAt <= now {
		return false
	}
	for i := len(l.asking) - 1; i >= 0; i-- {
		if q := l.asking[i]; q.state == left {
			continue
		} else if !q.waiter() {
			return true
		} else if q.decided != 0 {
			return false // all before it were refused together
		}
	}
	return false
}

// asks reports whether the next batch asks for a call.
func (l *queue) asks(q *Call, now int64) bool { return !q.waiter() || l.askAt <= now }

// listens reports whether a penalty would matter: there are waiters, or grants that are not due.
func (l *queue) listens() bool { return len(l.owned)+len(l.asking)-l.gone+len(l.spare) > 0 }

// stale reports whether a penalty would matter, and the last reply is too old to show it.
func (l *queue) stale(now int64) bool { return l.listens() && now-l.at >= engine.ListenMicros }

// next returns when the queue changes next, in limiter microseconds; 0 if it does not. With a batch in flight it does not ask.
func (l *queue) next(busy bool) int64 {
	next := sooner(l.nextDue, l.nextEnd)
	if !busy && len(l.spare) > 0 {
		next = sooner(next, l.spare[0].due)
	}
	if !busy && l.listens() {
		next = sooner(next, l.at+engine.ListenMicros)
		if len(l.asking) > l.gone && l.askAt != 0 {
			next = sooner(next, l.askAt)
		}
	}
	return next
}

// ahead returns how much of a member's future time this process owns, in microseconds.
func (l *queue) ahead(member int, now int64) (micros int64) {
	for _, q := range l.owned {
		if part := &q.grant.parts[member]; part.taken {
			micros += part.ahead(now)
		}
	}
	for _, g := range l.spare {
		if part := &g.parts[member]; part.taken {
			micros += part.ahead(now)
		}
	}
	return micros
}

// give gives a grant to a call.
func (l *queue) give(q *Call, g *grant, now int64) {
	q.decided = cmp.Or(q.decided, now)
	if q.members == nil && q.reserves {
		q.members = make([]Outcome, len(l.members))
		for m := range q.members {
			q.members[m].Wait, q.members[m].Seen = max(0, g.parts[m].due-now), l.members[m].seen(now)
		}
	}
	q.grant = g
	g.confirmed()
	l.noteDue(q)
	if q.reserves {
		q.promise()
	}
	if q.until != math.MaxInt64 {
		q.until = max(q.until, g.due) // the store has found it in time
	}
	if g.due <= now && !l.overdue(g, now) {
		if q.reserves && g.due <= q.decided {
			q.unused = g
		}
		l.end(q, done, nil)
		return
	}
	q.state = owned
	l.owned = append(l.owned, q)
}

// noteDue sets a call's due time and its outcomes by its grant.
func (l *queue) noteDue(q *Call) {
	q.due = q.grant.due
	l.nextDue = sooner(l.nextDue, q.due)
	if l.config.Choice == permit.Any {
		q.member = slices.IndexFunc(q.grant.parts, func(part part) bool { return part.taken })
	}
	for m := range q.members {
		if taken := q.grant.parts[m].taken; q.members[m].Taken != taken {
			q.members = slices.Clone(q.members) // the reservation reads the former ones without the lock
			q.members[m].Taken = taken
		}
	}
}

// free takes a grant that its call no longer needs. The calls behind it that want as many permits move up, and what is left is spare.
func (l *queue) free(g *grant, now int64) {
	if now-g.due > schedule.Tolerated {
		l.giveBack(g, inTurn, now)
		return
	}
	for _, q := range l.owned {
		if q.permits == g.permits && q.grant.due > g.due && l.movesUp(q) {
			later := q.grant
			later.confirm, g.confirm = g.confirm, nil
			q.grant, g = g, later
			l.noteDue(q)
		}
	}
	l.view.drop()
	l.spare.add(g)
	l.offer(now)
	l.keepSpare(now)
}

// keepSpare ends the wait for refunds of spare grants that are not sent back now, because permits were taken behind them.
func (l *queue) keepSpare(now int64) {
	for _, g := range l.spare {
		if !l.returnable(g, now) {
			g.confirmed()
		}
	}
}

// movesUp reports whether a granted call may have a grant that is due sooner. The member of a choice's reservation is fixed.
func (l *queue) movesUp(q *Call) bool { return l.config.Choice == permit.All || !q.reserves }

// offer gives spare grants to the waiters.
func (l *queue) offer(now int64) {
	for i := 0; i < len(l.asking) && len(l.spare) > 0; i++ {
		q := l.asking[i]
		if q.state == left || !q.waiter() {
			continue
		}
		if g := l.spare.take(q, math.MaxInt64); g != nil {
			l.asking = slices.Delete(l.asking, i, i+1)
			l.wanted -= q.permits
			l.give(q, g, now)
			i--
		}
	}
}

// giveSpare gives a spare grant to a newcomer, unless it would be due sooner without, by the last reply.
func (l *queue) giveSpare(q *Call, now int64) bool {
	if len(l.spare) == 0 {
		return false
	}
	due, _ := l.dueOf(q.permits, 0, now)
	g := l.spare.take(q, due)
	if g != nil {
		l.give(q, g, now)
	}
	return g != nil
}

// giveBack sends a grant back to its members with the next batch. In turn, the parts that are due follow once the members have taken back those that
// are not: they may refuse these, and then a call can still use the whole grant.
func (l *queue) giveBack(g *grant, how attempt, now int64) {
	l.view.drop()
	g.back, g.refused = how, 0
	first := how == inTurn && slices.ContainsFunc(g.parts, func(p part) bool { return p.taken && p.due > now })
	for m := range g.parts {
		if part := &g.parts[m]; part.taken && (!first || part.due > now) {
			g.open++
			to := &l.members[m]
			to.giveBack(&refund{grant: g, give: part.refund(g.permits*to.Weight, how)})
			if how == inTurn && part.due > now && part.place.After.Next >= to.tail {
				to.tail = part.place.Before.Next
			}
		}
	}
}

// returnSpare sends spare grants back that are due, or may be at the tail of their buckets, the last first.
func (l *queue) returnSpare(now int64) {
	for i := len(l.spare) - 1; i >= 0; i-- {
		if g := l.spare[i]; l.returnable(g, now) {
			l.spare = slices.Delete(l.spare, i, i+1)
			how := inTurn
			if g.back != none {
				how = outOfTurn
			}
			l.giveBack(g, how, now)
		}
	}
}

// returnable reports whether the members may accept a spare grant: it is due, or by the last reply no permits were taken behind it.
func (l *queue) returnable(g *grant, now int64) bool {
	if g.due <= now {
		return true
	}
	for m := range g.parts {
		if part := &g.parts[m]; part.taken && part.due > now && part.place.After.Next < l.members[m].tail {
			return false
		}
	}
	return g.back == none
}

// returns reports whether a spare grant is to be sent back.
func (l *queue) returns(now int64) bool {
	return slices.ContainsFunc(l.spare, func(g *grant) bool { return l.returnable(g, now) })
}

// refunded ends a refund of a member. A grant of which no member has accepted its part is spare until it is due, because another process has taken
// permits behind it. What is refused of others goes back out of turn. What that does not take either is lost; so is what has no reply, because it is not known
// whether it was accepted. missing is how many of the permits an accepted refund did not give back.
func (l *queue) refunded(m int, r *refund, accepted bool, missing int64, err error, now int64) {
	g := r.grant
	switch part := &g.parts[m]; {
	case accepted:
		part.taken = false
		l.members[m].lose(missing)
	case err != nil:
		part.taken = false
		l.members[m].lose(r.give.Permits)
	default:
		g.refused++
	}
	g.confirm.replied(err)
	if g.open--; g.open > 0 {
		return
	}
	switch some := slices.ContainsFunc(g.parts, func(p part) bool { return p.taken }); {
	case some && g.back == inTurn && g.refused > 0 && g.due > now && l.whole(g) && !l.outdated(g):
		g.confirmed()
		l.free(g, now)
	case some && g.back == inTurn && g.refused == 0: // those that are due
		l.giveBack(g, inTurn, max(now, g.due))
	case some && g.back == inTurn:
		l.giveBack(g, outOfTurn, now)
	default:
		g.confirmed()
		l.lose(g)
	}
}

// whole reports whether a call could use a grant.
func (l *queue) whole(g *grant) bool {
	n := 0
	for m := range g.parts {
		if g.parts[m].taken {
			n++
		}
	}
	return n == len(g.parts) || n == 1 && l.config.Choice == permit.Any
}

// lose counts the permits of a grant as lost.
func (l *queue) lose(g *grant) {
	for m := range g.parts {
		if g.parts[m].taken {
			l.members[m].lose(g.permits * l.members[m].Weight)
		}
	}
}

// abandon ends a call whose caller gives up.
func (l *queue) abandon(q *Call, c *confirm, now int64) {
	was := q.state
	l.leave(q)
	switch {
	case was == owned:
		l.owned = remove(l.owned, q)
		g := q.grant
		q.grant, g.confirm = nil, c.await()
		l.free(g, now)
	case q.flight == nil:
		l.drop(q)
	}
}

func remove(calls []*Call, q *Call) []*Call {
	if i := slices.Index(calls, q); i >= 0 {
		return slices.Delete(calls, i, i+1)
	}
	return calls
}

// askAgain puts calls in front of the others.
func (l *queue) askAgain(calls []*Call) {
	for _, q := range calls {
		l.wanted += q.permits
	}
	l.asking = append(calls, l.asking...)
}

// failOrRetry fails a call, unless it is a granted reservation, which asks again.
func (l *queue) failOrRetry(q *Call, err error, now int64) {
	if q.promised {
		q.flight = nil
		l.askAgain([]*Call{q})
		l.askAt = now + retryMicros
		return
	}
	l.fail(q, err)
}

// failDown fails the calls that the next batch would ask for, if it needs a store which is unavailable. Granted reservations ask again later.
func (l *queue) failDown(now int64) {
	if len(l.asking) == 0 {
		return
	}
	err := l.config.unavailable()
	if err == nil {
		return
	}
	retry := false
	l.keep(func(q *Call) bool {
		asks := l.asks(q, now)
		retry = retry || asks && q.promised
		if asks && !q.promised {
			l.fail(q, err)
			return false
		}
		return true
	})
	if retry {
		l.askAt = now + retryMicros
	}
}

// retryMicros is the pause before granted reservations whose permits have lapsed ask again after a failure.
const retryMicros = 100_000

// postpone makes the waiters, which were refused, ask again later. It refuses those that cannot be in time by the reply, so that newcomers do not count
// them as ahead.
func (l *queue) postpone(until, now int64) {
	l.askAt = until
	ahead := int64(0)
	l.keep(func(q *Call) bool {
		if q.acquires() {
			if q.decided = cmp.Or(q.decided, now); q.until != math.MaxInt64 {
				if due, by := l.dueOf(q.permits, ahead, now); due > max(q.until, now) && !l.refunds() {
					q.blame(by, due-q.came, len(l.members))
					l.refuse(q, due-q.came)
					return false
				}
				l.nextEnd = sooner(l.nextEnd, q.until)
			}
		}
		if l.config.Choice == permit.All { // see hopeless
			ahead += q.permits
		}
		return true
	})
}

// refunds reports whether permits go back to a member, so that waiters may be due sooner than the last reply shows.
func (l *queue) refunds() bool {
	for i := range l.members {
		if len(l.members[i].refunds) > 0 {
			return true
		}
	}
	return len(l.spare) > 0
}

// shift moves what this process owns of a member, because a penalty has begun or ended.
func (l *queue) shift(member int, s shift, now int64) {
	if s == (shift{}) {
		return
	}
	for _, q := range l.owned {
		part := &q.grant.parts[member]
		if !part.taken {
			continue
		}
		s.move(part, now)
		q.grant.settle()
		q.due = q.grant.due
		if q.until != math.MaxInt64 && q.due > q.until {
			l.nextEnd = 1 // a penalty has made it too late
		}
	}
	for _, g := range l.spare {
		if part := &g.parts[member]; part.taken {
			s.move(part, now)
			g.settle()
		}
	}
	l.nextDue = 0
	for _, q := range l.owned {
		l.nextDue = sooner(l.nextDue, q.due)
	}
}

// outdated reports whether permits of a grant were granted under a quota that was lowered since.
func (l *queue) outdated(g *grant) bool {
	for m := range g.parts {
		if part := &g.parts[m]; part.taken && l.members[m].outdates(part) {
			return true
		}
	}
	return false
}

// recall gives up grants that are outdated. Their calls ask again, granted reservations first.
func (l *queue) recall(now int64) {
	if !l.quotas {
		return
	}
	l.release(now) // what was due before is used
	l.spare = slices.DeleteFunc(l.spare, func(g *grant) bool {
		gone := l.outdated(g)
		if gone {
			l.giveBack(g, inTurn, now)
		}
		return gone
	})
	var first, behind []*Call
	l.owned = slices.DeleteFunc(l.owned, func(q *Call) bool {
		if !l.outdated(q.grant) {
			return false
		}
		l.giveBack(q.grant, inTurn, now)
		q.grant, q.state, q.recalled = nil, asking, true
		if q.promised {
			first = append(first, q)
		} else {
			behind = append(behind, q)
		}
		return true
	})
	if again := append(first, behind...); len(again) > 0 {
		l.askAgain(again)
		l.askAt = 0
	}
}

// overdue reports whether the permits of a grant lapse, because they were due more than 100 ms ago.
func (l *queue) overdue(g *grant, now int64) bool { return l.strict && now-g.due > schedule.Tolerated }

// release ends the calls that are due, and those whose timeouts have ended. Permits that are overdue by more than 100 ms lapse, because this process
// was stopped.
func (l *queue) release(now int64) {
	if l.nextDue != 0 && l.nextDue <= now {
		l.releaseDue(now)
	}
	if l.nextEnd != 0 && l.nextEnd <= now {
		l.expireTimeouts(now)
	}
}

// useless sends the spare grants back out of turn that the stores have refused in turn, and that are due after what a newcomer would get, by the last
// reply.
func (l *queue) useless(now int64) {
	l.spare = slices.DeleteFunc(l.spare, func(g *grant) bool {
		due, _ := l.dueOf(g.permits, 0, now)
		useless := g.back == inTurn && due < g.due
		if useless {
			l.giveBack(g, outOfTurn, now)
		}
		return useless
	})
}

// releaseDue ends the calls that are due. Those whose permits lapse ask again at once.
func (l *queue) releaseDue(now int64) {
	l.nextDue = 0
	var lapsed []*Call
	kept := l.owned[:0]
	for _, q := range l.owned {
		switch {
		case q.grant.due > now:
			kept = append(kept, q)
			l.nextDue = sooner(l.nextDue, q.grant.due)
		case l.overdue(q.grant, now):
			lapsed = append(lapsed, q)
		default:
			l.end(q, done, nil)
		}
	}
	clear(l.owned[len(kept):])
	l.owned = kept
	for _, q := range lapsed {
		g := q.grant
		q.grant, q.state = nil, asking
		l.giveBack(g, inTurn, now)
	}
	if len(lapsed) > 0 {
		l.askAgain(lapsed)
		l.askAt = 0
	}
}

// expireTimeouts refuses the waiters whose timeouts have ended.
func (l *queue) expireTimeouts(now int64) {
	l.nextEnd = 0
	l.keep(func(q *Call) bool {
		switch {
		case q.until == math.MaxInt64:
		case q.until <= now && q.decided != 0: // the store has refused it once; a newcomer with timeout 0 is asked for
			q.blame(l.refuser, now-q.came, len(l.members))
			l.refuse(q, now-q.came)
			return false
		case q.until > now:
			l.nextEnd = sooner(l.nextEnd, q.until)
		}
		return true
	})
	var late []*Call
	for _, q := range l.owned {
		if q.until != math.MaxInt64 && q.grant.due > q.until { // a penalty has moved its permits
			late = append(late, q)
		}
	}
	for _, q := range late {
		l.owned = remove(l.owned, q)
		g := q.grant
		q.member = slices.IndexFunc(g.parts, func(p part) bool { return p.taken && p.due == g.due })
		l.refuse(q, g.due-q.came) // its members still have the outcome of the grant
		l.free(g, now)
	}
}

// sooner returns the earlier of two times, where 0 stands for never.
func sooner(a, b int64) int64 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}
