package engine

import (
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/fair"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// Order is how a coordinator chooses the next of its waiters.
type Order uint8

// The orders. In turns, the tenants of the waiters are served by deficit round robin, and each tenant's waiters by arrival.
const (
	ByArrival Order = iota
	InTurns
)

// String returns arrival or turns.
func (o Order) String() string {
	if o == InTurns {
		return "turns"
	}
	return "arrival"
}

// For sets the tenant that the call is counted to, and the tenant's weight. It is for limiters of a coordinator whose Order is InTurns, and
// comes before Submit.
func (q *Call) For(tenant string, weight int64) {
	q.turn = &fair.Place[*Call]{Value: q, Tenant: tenant, Weight: weight, Permits: q.Permits}
}

// turns are the tenants of the waiters. The coordinator's mu must be held for all methods.
//
// The process owns permits, and waiters own positions in one queue. So whose turn it is need not be known before permits fall due: the head
// of the queue is chosen when the one before it was served, and changes places with the waiter whose turn it is (takeTurn). The store, the
// segments and the look-ahead know nothing of tenants.
//
// Invariants: all waiters of the queue with a tenant are in Turns, and no others. Granted reservations are not among them: they have no
// tenant, keep their due times and take no turns.
type turns struct {
	*fair.Turns[*Call] // nil if waiters are served by arrival
}

// on reports whether waiters are served in turns.
func (t *turns) on() bool { return t.Turns != nil }

// add adds a call that joins the queue.
func (t *turns) add(q *Call) {
	if t.on() && q.turn != nil && !q.reserves() {
		t.Add(q.turn)
	}
}

// served removes a call that was served, and charges its tenant for it.
func (t *turns) served(q *Call) {
	if t.on() && q.turn != nil {
		t.Served(q.turn)
	}
}

// left removes a call that was not served.
func (t *turns) left(q *Call) {
	if q.turn != nil {
		t.Remove(q.turn)
	}
}

// full reports whether the tenant of a call has more waiters, n, than there is room for. So one tenant takes at most half of the room, and
// always leaves some for others.
func (t *turns) full(q *Call, room int) (n int, full bool) {
	if q.turn == nil {
		return 0, false
	}
	n = t.Waiters(q.turn.Tenant)
	return n, n > room
}

// behind returns at least how many permits are served before a newcomer that the process does not own yet. It is negative if the owned
// permits suffice for a part of the newcomer's own.
func (t *turns) behind(q *Call, line *schedule.Schedule[*Call]) int64 {
	if q.turn == nil {
		return line.Wanted()
	}
	return max(-q.Permits, t.Ahead(q.turn)-line.Owned())
}

// serveInTurns lets the queue, which must be empty, serve its waiters in turns.
func (q *queue) serveInTurns() {
	q.turns.Turns = new(fair.Turns[*Call])
	q.line.InTurns, q.callers.turns = true, &q.turns
}

// takeTurn makes the waiter whose turn it is the head of the line. If that came after the next permits fell due, it must not use them. Then
// the first waiter of the head's tenant is the head.
func (q *queue) takeTurn(now int64) {
	if !q.turns.on() {
		return
	}
	head, next := q.line.Head(), q.turns.Next()
	if head == nil || next == nil || head.Value.turn == nil || head == &next.Value.Waiter {
		return
	}
	if q.lead(next.Value, head, now) {
		return
	}
	if first := q.turns.First(head.Value.turn); first != nil {
		q.lead(first.Value, head, now)
	}
}

// lead makes w the head of the line, if it may be.
func (q *queue) lead(w *Call, head *schedule.Waiter[*Call], now int64) bool {
	covered := head.Covered()
	if w.line != q.line || !q.line.Lead(&w.Waiter, now) {
		return false
	}
	if covered && !head.Covered() { // it waits for the store again
		head.Value.sent = clock.Mono()
	}
	return true
}

// turnInTime reports whether permits that the process owns may serve a waiter within its timeout, because its turn comes before those of
// other waiters.
func (q *queue) turnInTime(w *Call, now int64) bool {
	if !q.turns.on() || w.turn == nil {
		return false
	}
	at, owns := q.line.DueBehind(q.turns.Ahead(w.turn), w.Permits)
	return owns && max(at, now) <= w.Until
}

// final reports whether a refusal of the store within the timeout of a call is final. If waiters are served in turns, the call may get
// permits that the process owns, or gets for others that wait.
func (q *queue) final(w *Call, now int64) bool {
	if !q.turns.on() || w.turn == nil || q.turns.Tenants() <= 1 {
		return true
	}
	at, owns := q.line.DueBehind(0, w.Permits)
	return !owns || max(at, now) > w.Until
}

// serve ends the wait of a call whose permits are due already, unless another waiter may have its turn before.
func (q *queue) serve(w *Call) bool {
	return (!q.turns.on() || w.Following() == nil) && q.line.Serve(&w.Waiter)
}

// longest returns when the waiter came that has waited for longest.
func (q *queue) longest(head *Call) (came int64) {
	came = head.Came
	if q.turns.on() {
		q.turns.All(func(first *fair.Place[*Call]) { came = min(came, first.Value.Came) })
	}
	return came
}
