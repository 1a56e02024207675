// Package group takes the calls of one process to several buckets at once, and the replies back to their callers.
//
// A Participant is one more process in each of its buckets: the coordinators of their limiters do not know of it. It has a queue of its own, first come
// first served, and at most one batch in flight. A batch has joint requests (permit.Group): each of them is decided in one atomic step for all buckets
// of a part, which is the members that one store decides together. What is granted belongs to the caller whose request it was, from the grant until
// the last of its permits is due. How much of each bucket's time a participant may own follows from the same look-ahead as everybody's. Callers beyond
// it wait in the queue and ask again.
//
// With several parts a batch asks one after the other. What a part has granted goes back if a later one refuses.
package group

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jonboulle/clockwork"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// Member is one bucket of a participant. A request for n permits takes n times Weight permits from it.
type Member struct {
	Limiter *engine.Limiter
	Weight  int64
}

// Config describes the buckets of a participant. It is never changed.
type Config struct {
	Members []Member
	Choice  permit.Choice
	// Parts are the members that one store decides in one step, by their indexes. They are asked in this order.
	Parts [][]int
	// Decide decides the batches of a part, until a time.
	Decide func(until time.Time, part int, g *permit.Group) error
	// Direct: Decide returns by that time, so a caller that cannot give up may call it in its own goroutine.
	Direct bool
	// Immediate: all parts decide at once, in this process and without a failure.
	Immediate bool
	// Timeout is how long the stores may take to reply to a batch.
	Timeout    time.Duration
	Clock      clockwork.Clock
	MaxWaiters int
	// Failure returns an error of a member's store as callers get it.
	Failure func(member int, err error) error
	// NewSession returns a session for the batches of a member.
	NewSession func() permit.Session
}

// trips carry one batch at a time.
type trips = transport.Trips[*flight, struct{}]

// Participant is this process's side of several buckets. It is safe for concurrent use.
//
// Invariants: at most one batch is in flight, besides those whose deadline has passed. A call is counted once when it arrives, and once when it ends.
// The calls in asking are in the order of their arrival; those in owned have grants that are not due. Each grant belongs to one call, or is on its way
// back.
type Participant struct {
	Config
	local  clock.Local
	micros func() int64 // see permit.Batch.LocalMicros
	transport.Place
	trips *trips

	snapshot atomic.Pointer[snapshot]
	lost     atomic.Int64

	mu       sync.Mutex // guards the fields below
	members  []member
	asking   []*Call // that have no grant and are not in flight
	owned    []*Call // that have a grant which is not due, in the order of the grants
	count    int     // calls that have not ended
	askAt    int64   // when to ask for the waiters, because they were refused; 0 for at once
	at       int64   // when the last reply arrived, or the last error
	nextDue  int64   // no later than the first due time of owned; 0 if there is none
	nextEnd  int64   // no later than the first end of a timeout; 0 if there is none
	busy     bool    // a batch is about to be built, or in flight
	spare    *flight // for reuse
	flight   *flight // nil while it is not built
	since    time.Duration
	refuser  int // the member that refused the waiters last
	alarm    clockwork.Timer
	alarmAt  int64
	deadline *time.Timer // while a batch is in flight
	ticking  bool        // the deadline's timer runs
}

// member is what a participant knows of one of its buckets. The participant's mu guards it.
type member struct {
	Member
	offset  clock.Offset
	server  clock.Remote
	penalty schedule.Penalty
	terms   *permit.Terms // in force as of the last reply; nil before
	known   *permit.Terms // the newest with a version; nil if there is none
	free    int64         // when the bucket's debt ends, by the limiter's clock
	stored  int64         // stored permits, which take no time
	refunds []*refund
	session permit.Session
	floor   engine.Floor // of a class below the highest
}

// effective returns the configuration in force, as far as this process knows.
func (m *member) effective() *permit.Terms {
	t := m.Limiter.Effective()
	if m.known != nil && m.known.Version >= t.Version {
		t = m.known
	}
	if t == m.Limiter.Own && m.terms != nil && m.terms.Version > t.Version {
		return m.terms
	}
	return t
}

// state is the progress of a call.
type state uint8

const (
	asking  state = iota // in the queue, or in flight
	owned                // granted, and not due
	done                 // due, or carried out
	refused              // nothing was taken
	failed
	left // its caller has gone
)

// Call is the request of one caller. The participant's mu guards it.
type Call struct {
	permits  int64
	timeout  int64         // the longest wait that is of use, in microseconds
	deadline time.Duration // of the context, by clock.Mono; 0 if it has none
	reserves bool
	settles  []int64 // for a settlement: what each member is charged, or gets back if negative

	state    state
	flight   *flight
	promised bool // a granted reservation: it keeps asking if its permits lapse
	decided  int64
	came     int64
	until    int64
	due      int64
	sent     time.Duration
	grant    *grant
	unused   *grant // of a reservation that was due at once, for Return
	wait     int64
	member   int       // that refused the call; for permit.Any the one that it has permits of; -1 if there is none
	members  []Outcome // of a reservation
	err      error
	answer   chan struct{} // of a reservation: closed when it is decided
	ready    chan struct{}
}

// Outcome is what was decided about a member's part of a call.
type Outcome struct {
	Seen    engine.Seen
	Wait    int64 // until its permits are due, or how long they would have taken, in microseconds
	Taken   bool  // the call has permits of this member
	Refused bool  // the member could not grant its part in time
}

// Result is the outcome of a call.
type Result struct {
	Granted bool
	Wait    int64 // as in engine.Result
	// Member refused the call, or for permit.Any has granted it; -1 if it is unknown.
	Member  int
	Members []Outcome // of a reservation
	Err     error
}

// grant is the permits of one call.
type grant struct {
	permits int64
	due     int64 // when the last part is due, by the limiter's clock
	parts   []part
}

// part is a member's part of a grant.
type part struct {
	taken bool
	place permit.Place
	terms *permit.Terms
	at    int64 // of the decision, by the store's clock
	due   int64 // by the limiter's clock
	spent int64 // the time of the bucket that it takes
}

// refund is permits of one member on their way back.
type refund struct {
	give    permit.Refund
	permits int64
	confirm *confirm
}

// confirm lets a caller wait for the replies to its refunds.
type confirm struct {
	open int
	err  error
	done chan struct{}
}

func (c *confirm) settled(err error) {
	if c == nil {
		return
	}
	if c.open--; err != nil {
		c.err = err
	}
	if c.open == 0 {
		close(c.done)
	}
}

// own is a request of one member alone.
type own struct {
	refund *refund
	call   *Call // a settlement
}

// flight is a batch from its departure to its reply.
type flight struct {
	began time.Duration
	local int64
	until time.Duration
	late  bool
	heeds bool // grants wait for their due times, so a penalty of any member matters
	rows  []*Call
	ends  []uint64 // of each row: the members whose refusal is final
	own   [][]own
	batch []permit.Batch // of each member: its own requests, then the joint ones
	looks []look
	all   []int // the numbers of all rows
	parts []leg
	asked atomic.Int32 // the part that is asked
}

// request returns a member's request of the j-th row that its leg was asked for.
func (f *flight) request(member, j int) *permit.Request {
	return &f.batch[member].Requests[len(f.own[member])+j]
}

// find returns the position of a row in a leg. It reports false if the leg has not decided the row.
func (f *flight) find(k, row int) (j int, ok bool) {
	leg := &f.parts[k]
	if !leg.decided || len(leg.rows) == len(f.rows) {
		return row, leg.decided
	}
	return slices.BinarySearch(leg.rows, row)
}

// reset empties a flight for reuse.
func (f *flight) reset() {
	clear(f.rows)
	f.rows, f.ends, f.all = f.rows[:0], f.ends[:0], f.all[:0]
	f.asked.Store(0)
	for m := range f.own {
		clear(f.own[m])
		f.own[m] = f.own[m][:0]
	}
	for k := range f.parts {
		f.parts[k].rows, f.parts[k].decided, f.parts[k].err = nil, false, nil
	}
}

// leg is the part of a flight that one store decides.
type leg struct {
	group   permit.Group
	rows    []int // the joint requests, by their numbers
	decided bool
	err     error
}

// New returns a participant.
func New(config Config) *Participant {
	p := &Participant{Config: config, local: clock.New(config.Clock), members: make([]member, len(config.Members))}
	for i := range p.members {
		p.members[i].Member = config.Members[i]
		p.members[i].stored = permit.MaxBatch
	}
	p.micros = p.local.Micros
	p.trips = &trips{Send: p.send, Max: 1, Parallel: 1, Timeout: config.Timeout}
	if config.Direct {
		p.trips.Direct = p.send
	}
	return p
}

// Lost returns how many permits could not be given back, of all members together. They lapse.
func (p *Participant) Lost() int64 { return p.lost.Load() }

// NewCall returns a call for permits that fall due within a timeout, in microseconds. deadline is that of its context, by clock.Mono.
func NewCall(permits, timeout int64, deadline time.Duration, reserves bool) *Call {
	q := calls.Get().(*Call)
	*q = Call{permits: permits, timeout: timeout, deadline: deadline, reserves: reserves, member: -1, ready: make(chan struct{})}
	if reserves {
		q.answer = make(chan struct{})
	}
	return q
}

// calls are reused. Their channels are not: a channel made in a bubble of testing/synctest must not leave it.
var calls = sync.Pool{New: func() any { return new(Call) }}

// Recycle lets a call be reused whose caller has received the result. Reservations are not reused.
func (p *Participant) Recycle(q *Call) {
	p.mu.Lock()
	reusable := !q.reserves && q.err == nil && q.flight == nil
	p.mu.Unlock()
	if reusable {
		*q = Call{}
		calls.Put(q)
	}
}

// NewSettlement returns a call that charges the members of a granted reservation n permits more, each times its weight, or gives -n back.
func (p *Participant) NewSettlement(reservation *Call, n int64, deadline time.Duration) *Call {
	q := &Call{timeout: permit.MaxExact, deadline: deadline, settles: make([]int64, len(p.Members)), member: -1, ready: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	for m, o := range reservation.members {
		if o.Taken {
			q.settles[m] = n * p.Members[m].Weight
		}
	}
	return q
}

// Submit queues a call. The returned channel is closed when the call ends; for a reservation, when it is decided. If the context cannot be cancelled,
// the batch may be sent in the goroutine of the caller.
func (p *Participant) Submit(ctx context.Context, q *Call) (answered <-chan struct{}) {
	if answered = q.ready; q.answer != nil {
		answered = q.answer
	}
	if p.accept(q, ctx.Done() == nil) {
		p.trips.Take(ctx, "", p)
	}
	return answered
}

// accept adds a call to the queue. It reports whether the caller is to send the batch itself.
func (p *Participant) accept(q *Call, stays bool) (take bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count++
	if p.count > p.MaxWaiters && q.settles == nil {
		p.fail(q, fmt.Errorf("%w: group: %d wait already", permit.ErrTooManyWaiters, p.MaxWaiters))
		return false
	}
	mono := clock.Mono()
	now := p.local.NowAt(mono)
	q.sent, q.came, q.until = mono, now, math.MaxInt64
	if q.timeout < permit.MaxExact {
		q.until = now + q.timeout
	}
	if q.deadline != 0 {
		q.until = min(q.until, now+max(0, (q.deadline-mono).Microseconds()))
	}
	if waits := q.settles == nil && !q.reserves; !p.waiting() {
		p.askAt = 0
	} else if waits && p.askAt > now {
		if p.hopeless(q, now) {
			return false
		}
		if now-p.at >= engine.SnapshotAge.Microseconds() && q.until != math.MaxInt64 {
			p.askAt = 0 // the next reply shows whether the call can be in time
		} else {
			q.decided = now // those ahead were refused, so it counts as refused
		}
	}
	p.asking = append(p.asking, q)
	if q.until != math.MaxInt64 {
		p.nextEnd = sooner(p.nextEnd, q.until)
	}
	if stays && p.Direct && !p.busy && len(p.asking) == 1 && p.sends(now) {
		if p.failDown(now); len(p.asking) == 1 {
			p.begin()
			return true
		}
	}
	p.dispatch(now)
	return false
}

// begin records that a batch is about to be built. mu must be held.
func (p *Participant) begin() {
	p.busy = true
	if p.since == 0 {
		p.since = clock.Mono()
	}
	p.startDeadline(p.Timeout)
}

// hopeless refuses a waiter that cannot be in time by the last reply, behind those that wait already. mu must be held.
func (p *Participant) hopeless(q *Call, now int64) bool {
	if q.until == math.MaxInt64 || now-p.at >= engine.SnapshotAge.Microseconds() {
		return false
	}
	ahead := q.permits
	for _, o := range p.asking {
		ahead += o.permits
	}
	late, least, by := int64(0), int64(math.MaxInt64), 0
	for i := range p.members {
		m := &p.members[i]
		t := m.effective()
		n := float64(ahead)*float64(m.Weight) - float64(m.stored)
		if t.PayLater {
			n -= float64(q.permits * m.Weight)
		}
		due := max(now, m.free) + int64(min(max(0, n)*t.Interval, permit.MaxExact))
		if due > late {
			late, by = due, i
		}
		least = min(least, due)
	}
	if p.Choice == permit.Any {
		late = least
	}
	if late <= q.until {
		return false
	}
	q.blame(by, late-now, len(p.members))
	p.refuse(q, late-now)
	return true
}

// blame notes that a member is the reason for a refusal, unless that is known. wait is how long its permits would have taken.
func (q *Call) blame(member int, wait int64, members int) {
	if q.member < 0 {
		q.member = member
	}
	if q.members == nil && q.reserves {
		q.members = make([]Outcome, members)
		q.members[member] = Outcome{Wait: wait, Refused: true}
	}
}

// waiting reports whether calls wait that were not sent, or were refused. mu must be held.
func (p *Participant) waiting() bool {
	return slices.ContainsFunc(p.asking, func(q *Call) bool { return q.settles == nil && (!q.reserves || q.promised) })
}

// Wait waits for the result of a call. If the context ends first, the call is abandoned.
func (p *Participant) Wait(ctx context.Context, q *Call, answered <-chan struct{}) Result {
	select {
	case <-answered:
	default:
		select {
		case <-answered:
		case <-ctx.Done():
			if p.leave(q) {
				return Result{Err: ctx.Err()}
			}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	r := Result{Granted: q.state == owned || q.state == done || q.promised, Wait: q.wait, Member: q.member, Members: q.members, Err: q.err}
	if r.Granted {
		r.Wait = max(0, q.due-q.decided)
	}
	return r
}

// leave abandons a call. It reports false if the call has ended before.
func (p *Participant) leave(q *Call) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.local.Now()
	p.release(now)
	if q.state > owned {
		return false
	}
	p.abandon(q, nil)
	p.dispatch(now)
	return true
}

// abandon ends a call whose caller gives up. mu must be held.
func (p *Participant) abandon(q *Call, c *confirm) {
	was := q.state
	q.state = left
	p.count--
	switch {
	case was == owned:
		p.owned = remove(p.owned, q)
		g := q.grant
		q.grant = nil
		p.free(g, c)
	case q.flight == nil:
		p.asking = remove(p.asking, q)
	}
}

func remove(calls []*Call, q *Call) []*Call {
	if i := slices.Index(calls, q); i >= 0 {
		return slices.Delete(calls, i, i+1)
	}
	return calls
}

// Cancel gives back the permits of a reservation that are not due yet, and waits for the replies. It reports whether it did.
func (p *Participant) Cancel(ctx context.Context, q *Call) (gone bool, err error) {
	c := &confirm{done: make(chan struct{})}
	p.mu.Lock()
	now := p.local.Now()
	p.release(now)
	if gone = q.state <= owned; gone {
		p.abandon(q, c)
		p.dispatch(now)
	}
	open := c.open
	p.mu.Unlock()
	if open == 0 {
		return gone, nil
	}
	return gone, p.confirmed(ctx, c)
}

// Return gives back the permits of a reservation even if they were due at once.
func (p *Participant) Return(ctx context.Context, q *Call) error {
	p.mu.Lock()
	if q.unused == nil {
		p.mu.Unlock()
		_, err := p.Cancel(ctx, q)
		return err
	}
	c := &confirm{done: make(chan struct{})}
	p.giveBack(q.unused, c)
	q.unused = nil
	p.dispatch(p.local.Now())
	p.mu.Unlock()
	return p.confirmed(ctx, c)
}

// confirmed waits for the replies to refunds, but not for longer than the store timeout.
func (p *Participant) confirmed(ctx context.Context, c *confirm) error {
	timeout := time.NewTimer(max(p.Timeout, time.Second))
	defer timeout.Stop()
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return ctx.Err()
	case <-timeout.C:
		return p.Failure(p.awaited(nil), fmt.Errorf("%w: cancel was not answered within %v", permit.ErrStoreTimeout, p.Timeout))
	}
}

// Delay returns how long after its decision a reservation is due, in microseconds.
func (p *Participant) Delay(q *Call) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(0, q.due-q.decided)
}

// Taken returns the member that a call has permits of, for permit.Any; -1 if there is none.
func (p *Participant) Taken(q *Call) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return q.member
}

// Ready returns the channel that is closed when the permits of a reservation are due.
func (q *Call) Ready() <-chan struct{} { return q.ready }

// Left reports whether the caller of a call has given it up.
func (p *Participant) Left(q *Call) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return q.state == left
}

// free gives a grant that its call no longer needs to the calls behind it that want as many permits, and gives back what is left. mu must be held.
func (p *Participant) free(g *grant, c *confirm) {
	now := p.local.Now()
	if now-g.due > schedule.Tolerated {
		p.giveBack(g, c)
		return
	}
	for _, q := range p.owned {
		if q.permits == g.permits && q.grant.due > g.due && (p.Choice == permit.All || !q.reserves) {
			q.grant, g = g, q.grant
			p.noteDue(q)
		}
	}
	for i, q := range p.asking {
		if q.settles == nil && q.permits == g.permits && q.came <= g.due && g.due <= q.until && (!q.reserves || q.promised) {
			p.asking = slices.Delete(p.asking, i, i+1)
			p.give(q, g, now)
			return
		}
	}
	p.giveBack(g, c)
}

// noteDue sets a call's due time and its outcomes by its grant. mu must be held.
func (p *Participant) noteDue(q *Call) {
	q.due = q.grant.due
	p.nextDue = sooner(p.nextDue, q.due)
	if p.Choice == permit.Any {
		q.member = slices.IndexFunc(q.grant.parts, func(part part) bool { return part.taken })
	}
	for m := range q.members {
		if taken := q.grant.parts[m].taken; q.members[m].Taken != taken {
			q.members = slices.Clone(q.members) // the reservation reads the former ones without the lock
			q.members[m].Taken = taken
		}
	}
}

// giveBack sends a grant back to its members with the next batch. mu must be held.
func (p *Participant) giveBack(g *grant, c *confirm) {
	p.snapshot.Store(nil)
	for m := range g.parts {
		if part := &g.parts[m]; part.taken {
			if c != nil {
				c.open++
			}
			r := &refund{give: part.place.Refund(part.terms, 0, part.at), permits: g.permits * p.Members[m].Weight, confirm: c}
			p.members[m].refunds = append(p.members[m].refunds, r)
		}
	}
}

// give gives a grant to a call. mu must be held.
func (p *Participant) give(q *Call, g *grant, now int64) {
	if q.decided == 0 {
		q.decided = now
	}
	if q.members == nil && q.reserves {
		q.members = make([]Outcome, len(p.members))
		for m := range q.members {
			q.members[m].Wait = max(0, g.parts[m].due-now)
		}
	}
	q.grant = g
	p.noteDue(q)
	if q.reserves {
		q.promised, q.until = true, math.MaxInt64
		if q.answer != nil {
			close(q.answer)
			q.answer = nil
		}
	}
	if q.until != math.MaxInt64 {
		q.until = max(q.until, g.due) // the store has found it in time
	}
	if g.due <= now && !p.overdue(g, now) {
		if q.reserves && g.due <= q.decided {
			q.unused = g
		}
		p.end(q, done, nil)
		return
	}
	q.state = owned
	p.owned = append(p.owned, q)
}

// overdue reports whether the permits of a grant lapse, because they were due more than 100 ms ago.
func (p *Participant) overdue(g *grant, now int64) bool {
	return p.local.System() && now-g.due > schedule.Tolerated
}

// end ends a call. mu must be held.
func (p *Participant) end(q *Call, s state, err error) {
	if q.state > owned {
		return
	}
	p.count--
	q.state, q.err, q.grant = s, err, nil
	if q.answer != nil {
		close(q.answer)
		q.answer = nil
	}
	close(q.ready)
}

func (p *Participant) refuse(q *Call, wait int64) {
	q.wait = wait
	p.end(q, refused, nil)
}

func (p *Participant) fail(q *Call, err error) { p.end(q, failed, err) }

// release ends the calls that are due, and those whose timeouts have ended. Permits that are overdue by more than 100 ms lapse, because this process
// was stopped. mu must be held.
func (p *Participant) release(now int64) {
	if p.nextDue != 0 && p.nextDue <= now {
		p.nextDue = 0
		var lapsed []*Call
		kept := p.owned[:0]
		for _, q := range p.owned {
			switch {
			case q.grant.due > now:
				kept = append(kept, q)
				p.nextDue = sooner(p.nextDue, q.grant.due)
			case p.overdue(q.grant, now):
				lapsed = append(lapsed, q)
			default:
				p.end(q, done, nil)
			}
		}
		clear(p.owned[len(kept):])
		p.owned = kept
		for _, q := range lapsed {
			g := q.grant
			q.grant, q.state = nil, asking
			p.giveBack(g, nil)
		}
		if len(lapsed) > 0 {
			p.asking, p.askAt = append(lapsed, p.asking...), 0
		}
	}
	if p.nextEnd != 0 && p.nextEnd <= now {
		p.expireTimeouts(now)
	}
}

// expireTimeouts refuses the waiters whose timeouts have ended. mu must be held.
func (p *Participant) expireTimeouts(now int64) {
	p.nextEnd = 0
	p.asking = slices.DeleteFunc(p.asking, func(q *Call) bool {
		switch {
		case q.until == math.MaxInt64:
			return false
		case q.until <= now && q.decided != 0: // the store has refused it once; a newcomer with timeout 0 is asked for
			q.blame(p.refuser, now-q.came, len(p.members))
			p.refuse(q, now-q.came)
			return true
		case q.until > now:
			p.nextEnd = sooner(p.nextEnd, q.until)
		}
		return false
	})
	var late []*Call
	for _, q := range p.owned {
		if q.until != math.MaxInt64 && q.grant.due > q.until { // a penalty has moved its permits
			late = append(late, q)
		}
	}
	for _, q := range late {
		p.owned = remove(p.owned, q)
		g := q.grant
		p.refuse(q, g.due-q.came) // its members still have the outcome of the grant
		p.free(g, nil)
	}
}

// sooner returns the earlier of two times, where 0 stands for never.
func sooner(a, b int64) int64 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// dispatch sends what there is to send, unless a batch is in flight, and sets the alarm. mu must be held.
func (p *Participant) dispatch(now int64) {
	switch {
	case p.Immediate:
		for f := p.build(now); f != nil; f = p.build(p.local.Now()) {
			p.run(f)
			p.deliver(f, p.local.Now(), 0)
			f.reset()
			p.spare = f
		}
	case p.busy:
		p.release(now)
		p.failDown(now)
	default:
		p.release(now)
		if p.failDown(now); p.sends(now) {
			p.begin()
			p.trips.Ready("", p)
		} else {
			p.since = 0
		}
	}
	p.setAlarm(now)
}

// sends reports whether there is anything to send. mu must be held.
func (p *Participant) sends(now int64) bool {
	for m := range p.members {
		if len(p.members[m].refunds) > 0 {
			return true
		}
	}
	for _, q := range p.asking {
		if p.asks(q, now) {
			return true
		}
		if !q.reserves && q.settles == nil {
			break // so do the waiters behind it; reservations do not wait among them for long
		}
	}
	return p.asksAside(now) || p.listens() && now-p.at >= engine.ListenMicros
}

// asksAside reports whether a reservation or a settlement is to be sent, though the waiters are not. mu must be held.
func (p *Participant) asksAside(now int64) bool {
	if p.askAt <= now {
		return false
	}
	for i := len(p.asking) - 1; i >= 0; i-- {
		if q := p.asking[i]; q.settles != nil || q.reserves && !q.promised {
			return true
		} else if q.decided != 0 {
			return false // all before it were refused together
		}
	}
	return false
}

// asks reports whether the next batch asks for a call. mu must be held.
func (p *Participant) asks(q *Call, now int64) bool {
	return q.settles != nil || q.reserves && !q.promised || p.askAt <= now
}

// listens reports whether a penalty would matter: there are waiters, or grants that are not due. mu must be held.
func (p *Participant) listens() bool { return len(p.owned)+len(p.asking) > 0 }

// Depart implements [transport.Source].
func (p *Participant) Depart() (f *flight, deadline time.Time, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.local.Now()
	f = p.build(now)
	p.flight, p.busy = f, f != nil
	p.setAlarm(now)
	if f == nil {
		p.since = 0
		return nil, time.Time{}, false
	}
	return f, clock.At(f.began + p.Timeout), true
}

// look bounds how much of a bucket's time a batch asks for, see lookAhead in internal/engine.
type look struct {
	horizon, ahead, counted, permits, most, stored int64
	floor                                          engine.Floor // the credit that is left
	class                                          engine.Class // of most
}

// build returns the next batch, or nil if there is nothing to send. mu must be held.
func (p *Participant) build(now int64) *flight {
	p.release(now)
	p.failDown(now)
	if !p.sends(now) {
		return nil
	}
	n := len(p.members)
	f := p.spare
	if p.spare = nil; f == nil {
		f = &flight{own: make([][]own, n), batch: make([]permit.Batch, n), looks: make([]look, n), parts: make([]leg, len(p.Parts))}
	}
	f.local, f.began, f.heeds = now, 0, len(p.owned) > 0
	if !p.Immediate {
		f.began = clock.Mono()
	}
	for i := range p.members {
		m := &p.members[i]
		p.addRefunds(f, i)
		f.looks[i] = look{horizon: engine.Horizon(m.effective()), ahead: p.ahead(i, now), stored: m.stored, floor: m.floor}
	}
	for _, q := range p.asking {
		if q.settles == nil || len(f.own[0]) >= permit.MaxBatch/n/2 {
			continue
		}
		for m, more := range q.settles {
			if more != 0 {
				f.own[m] = append(f.own[m], own{call: q})
			}
		}
		q.flight, q.sent = f, max(q.sent, p.since)
	}
	p.prepare(f)
	rest := p.asking[:0]
	more, budget := true, permit.MaxBatch/n/2
	for _, q := range p.asking {
		waits := !q.reserves || q.promised
		switch {
		case q.flight == f: // a settlement
		case q.settles != nil || len(f.rows) >= budget || !p.asks(q, now) || waits && !more:
			rest = append(rest, q)
		default:
			if ok := p.addRow(f, q, now); waits {
				more = ok
			}
			q.flight, q.sent = f, max(q.sent, p.since)
		}
	}
	clear(p.asking[len(rest):])
	p.asking = rest
	p.limit(f)
	return f
}

// addRefunds adds the refunds of a member to a batch, the newest first, because that is at the bucket's tail. mu must be held.
func (p *Participant) addRefunds(f *flight, i int) {
	m := &p.members[i]
	slices.SortStableFunc(m.refunds, func(a, b *refund) int { return int(b.give.ID - a.give.ID) })
	n := min(len(m.refunds), permit.MaxBatch/4)
	for _, r := range m.refunds[:n] {
		f.own[i] = append(f.own[i], own{refund: r})
	}
	m.refunds = slices.Delete(m.refunds, 0, n)
}

// ahead returns how much of a member's future time this process owns, in microseconds. mu must be held.
func (p *Participant) ahead(member int, now int64) (micros int64) {
	for _, q := range p.owned {
		if part := &q.grant.parts[member]; part.taken {
			micros += max(0, min(part.spent, part.due-now))
		}
	}
	return micros
}

// remaining returns the longest wait from now on that is of use to the caller. A timeout counts from the first decision.
func (q *Call) remaining(now int64) int64 {
	wait := min(q.timeout, permit.MaxExact)
	if q.decided != 0 && q.until != math.MaxInt64 {
		wait = max(0, min(wait, q.until-now))
	}
	if q.promised {
		return permit.MaxExact
	}
	if q.deadline != 0 {
		wait = max(0, min(wait, (q.deadline-clock.Mono()).Microseconds()))
	}
	return wait
}

// addRow adds a joint request to a batch. It reports whether there is any use in asking for another waiter. mu must be held.
func (p *Participant) addRow(f *flight, q *Call, now int64) (more bool) {
	remaining := q.remaining(now)
	ends := uint64(0)
	more = true
	for i := range p.members {
		m, l := &p.members[i], &f.looks[i]
		r := permit.Request{Permits: q.permits * m.Weight, MaxWaitMicros: remaining}
		if !q.reserves || q.promised {
			t := m.effective()
			if c := l.floor.Next(m.Limiter.Coordinator.Class, r.Permits); l.permits != r.Permits || l.class != c || l.ahead-l.counted > l.horizon/16 {
				l.permits, l.class, l.counted, l.most = r.Permits, c, l.ahead, engine.LookAhead(t, c, r.Permits, l.ahead)
			}
			if remaining <= l.most && !q.promised {
				ends |= 1 << i
			}
			r.MaxWaitMicros = min(remaining, l.most)
			if l.stored -= r.Permits; l.stored < 0 {
				l.ahead += engine.CostFromCold(t, min(-l.stored, r.Permits))
			}
			more = more && l.ahead <= 2*l.horizon
		} else {
			ends |= 1 << i
		}
		f.batch[i].Requests = append(f.batch[i].Requests, r)
	}
	f.all = append(f.all, len(f.rows))
	f.rows, f.ends = append(f.rows, q), append(f.ends, ends)
	return more
}

// limit sets when the last caller of a batch gives up. mu must be held.
func (p *Participant) limit(f *flight) {
	until := f.began
	for _, q := range f.rows {
		last := q.sent + p.Timeout
		if q.deadline != 0 {
			last = min(last, q.deadline)
		}
		until = max(until, last)
	}
	if len(f.rows) == 0 || slices.ContainsFunc(f.own, func(of []own) bool { return len(of) > 0 }) {
		until = f.began + p.Timeout
	}
	f.until = min(until, f.began+p.Timeout)
	for i := range f.batch {
		f.batch[i].Until = clock.At(f.until)
	}
}

// prepare begins the batches of the members with their own requests. mu must be held.
func (p *Participant) prepare(f *flight) {
	for i := range p.members {
		m := &p.members[i]
		l := m.Limiter
		c := l.Coordinator
		b := &f.batch[i]
		*b = permit.Batch{
			Name: c.Name, Key: c.Key, Terms: l.Own, Known: m.effective(), Initial: l.Initial, Transient: l.Transient,
			Requests: b.Requests[:0], Epoch: engine.NewEpoch(), LocalMicros: p.micros, Session: m.session,
		}
		if m.session = nil; b.Session == nil && p.NewSession != nil && !p.Immediate {
			b.Session = p.NewSession()
		}
		if m.server.Known() {
			micros, received := m.server.Last()
			b.ServerMicros, b.ServerRead = micros, clock.At(received)
		}
		for _, o := range f.own[i] {
			r := permit.Request{Op: permit.GiveBack}
			if o.refund != nil {
				r.Back = o.refund.give
			} else {
				r = permit.Request{Op: permit.Settle, Permits: o.call.settles[i]}
			}
			b.Requests = append(b.Requests, r)
		}
	}
}

// send implements [transport.Trips].Send.
func (p *Participant) send(_ string, items []*transport.Item[*flight, struct{}]) {
	for _, i := range items {
		p.run(i.Batch)
		i.Answer(struct{}{}, nil)
	}
}

// run has the parts decide a batch, one after the other. It needs no lock: nobody else touches what it uses until the batch lands.
func (p *Participant) run(f *flight) {
	rows := f.all
	for k, members := range p.Parts {
		leg := &f.parts[k]
		if leg.rows = rows; k > 0 && len(rows) == 0 && !f.heeds && !f.needs(members) {
			continue
		}
		leg.group.Choice, leg.group.Joint, leg.group.Members = p.Choice, len(rows), leg.group.Members[:0]
		for _, m := range members {
			b := &f.batch[m]
			if own := len(f.own[m]); len(rows) < len(f.all) {
				for j, i := range rows {
					b.Requests[own+j] = b.Requests[own+i]
				}
				b.Requests = b.Requests[:own+len(rows)]
			}
			leg.group.Members = append(leg.group.Members, b)
		}
		f.asked.Store(int32(k))
		if leg.err = p.Decide(clock.At(f.until), k, &leg.group); leg.err != nil {
			if p.Choice == permit.All { // for permit.Any another part may grant it
				rows = f.all[:0] // the later parts decide the requests of their members alone
			}
			continue
		}
		leg.decided = true
		if k+1 < len(p.Parts) {
			rows = f.after(p, k, members)
		}
	}
}

// needs reports whether members have requests of their own.
func (f *flight) needs(members []int) bool {
	return slices.ContainsFunc(members, func(m int) bool { return len(f.own[m]) > 0 })
}

// after returns the joint requests that the legs after k are asked for.
func (f *flight) after(p *Participant, k int, members []int) (next []int) {
	for j, i := range f.parts[k].rows {
		granted, wait := false, int64(0)
		for _, m := range members {
			if g := &f.request(m, j).Grant; g.OK {
				granted, wait = true, max(wait, g.WaitMicros)
			}
		}
		switch {
		case p.Choice == permit.All && granted:
			next = append(next, i)
		case p.Choice == permit.Any && (!granted || wait > 0):
			if next = append(next, i); granted { // only an earlier due time is of use
				for _, later := range p.Parts[k+1:] {
					for _, m := range later {
						r := f.request(m, i) // it has all rows as yet
						r.MaxWaitMicros = min(r.MaxWaitMicros, wait-1)
					}
				}
			}
		}
	}
	return next
}

// Land implements [transport.Source].
func (p *Participant) Land(f *flight, _ struct{}, err error, late bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	mono := clock.Mono()
	now := p.local.NowAt(mono)
	if !late {
		p.flight, p.busy = nil, false
	}
	switch {
	case err == transport.ErrLate:
		p.expireFlight(f, now)
	case err != nil: // a panic of a client
		for k := range f.parts {
			if leg := &f.parts[k]; !leg.decided && leg.err == nil {
				leg.err = err
			}
		}
		p.deliver(f, now, mono)
	default:
		p.deliver(f, now, mono)
		if !f.late {
			f.reset()
			p.spare = f
		}
	}
	p.dispatch(now)
}

// expireFlight stops waiting for a batch whose deadline has passed. mu must be held.
func (p *Participant) expireFlight(f *flight, now int64) {
	f.late, p.at = true, now
	err := p.timeoutError(f)
	for i, q := range f.rows {
		if q.flight = nil; q.state == asking {
			p.failOrRetry(q, err, now)
		}
		f.rows[i] = nil
	}
	for m := range f.own {
		for i, o := range f.own[m] {
			if o.refund != nil {
				p.lost.Add(o.refund.permits)
				o.refund.confirm.settled(err)
			} else if o.call != nil {
				p.fail(o.call, err)
			}
			f.own[m][i] = own{}
		}
	}
	for _, c := range p.stores() {
		c.Health.Suspect(c)
	}
}

// timeoutError returns why there is no reply: the batch waits for a lock, or for a store. mu must be held.
func (p *Participant) timeoutError(f *flight) error {
	if f != nil {
		for m := range f.batch {
			if s := f.batch[m].Session; s != nil && s.Waits() {
				return p.Failure(m, fmt.Errorf("%w: bucket %q: within %v", permit.ErrLockNotObtained, f.batch[m].Name, p.Timeout))
			}
		}
	}
	return p.Failure(p.awaited(f), fmt.Errorf("%w: no answer within %v", permit.ErrStoreTimeout, p.Timeout))
}

// awaited returns a member whose store has not replied to a batch: of the part that is asked, or of the first part whose store may fail.
func (p *Participant) awaited(f *flight) int {
	fails := func(m int) bool { return p.Members[m].Limiter.Coordinator.Health != nil }
	if f != nil {
		if m := p.Parts[f.asked.Load()][0]; fails(m) {
			return m
		}
	}
	for _, members := range p.Parts {
		if fails(members[0]) {
			return members[0]
		}
	}
	return 0
}

// failOrRetry fails a call, unless it is a granted reservation, which asks again. mu must be held.
func (p *Participant) failOrRetry(q *Call, err error, now int64) {
	if q.promised {
		q.flight = nil
		p.asking, p.askAt = append([]*Call{q}, p.asking...), now+retryMicros
		return
	}
	p.fail(q, err)
}

// retryMicros is the pause before granted reservations whose permits have lapsed ask again after a failure.
const retryMicros = 100_000

// stores returns one coordinator for each monitor of the members' stores.
func (p *Participant) stores() (some []*engine.Coordinator) {
	for _, m := range p.Members {
		c := m.Limiter.Coordinator
		if c.Health != nil && !slices.ContainsFunc(some, func(o *engine.Coordinator) bool { return o.Health == c.Health }) {
			some = append(some, c)
		}
	}
	return some
}

// deliver hands out the reply to a batch. mu must be held.
func (p *Participant) deliver(f *flight, now int64, mono time.Duration) {
	p.at = now
	if !f.late {
		p.since = mono
	}
	for k := range f.parts {
		leg := &f.parts[k]
		for _, m := range p.Parts[k] {
			p.keepSession(f, m)
			switch {
			case leg.decided:
				out := &f.batch[m].Outcome
				if !f.late {
					p.observe(f, m, out, receivedAt(out, now), now, mono)
				}
				p.settleOwn(f, m, f.batch[m].Requests, nil)
			case leg.err != nil:
				p.report(m, leg.err)
				p.settleOwn(f, m, nil, p.Failure(m, leg.err))
			default: // it was not asked, because an earlier part has failed
				p.requeueOwn(f, m)
			}
		}
	}
	var again []*Call
	first := -1
	for i, q := range f.rows {
		if q != nil {
			q.flight = nil
		}
		live := q != nil && q.state == asking
		if live && !q.reserves && !f.late && p.dueAtOnce(f, i, q) {
			q.decided = cmpOr(q.decided, now)
			q.due = q.decided
			for m := range p.members {
				if p.Choice == permit.All || m == q.member {
					p.members[m].floor.Spend(q.permits * p.Members[m].Weight)
				}
			}
			p.end(q, done, nil)
			continue
		}
		g := p.granted(f, i, now)
		switch failed := p.legError(f, i); {
		case g != nil && live && !f.late:
			p.noteOutcome(f, q, i)
			q.decided = cmpOr(q.decided, receivedAt(&f.batch[p.Parts[0][0]].Outcome, now))
			p.give(q, g, now)
		case g != nil && f.late:
			p.giveBack(g, nil)
		case g != nil:
			p.free(g, nil)
		case !live:
		case failed != nil:
			p.failOrRetry(q, failed, now)
		default:
			if p.noteOutcome(f, q, i); p.refuseOrKeep(f, q, i, now) {
				if again = append(again, q); first < 0 {
					first = i
				}
			}
		}
	}
	if len(again) > 0 {
		p.asking = append(again, p.asking...)
		p.refused(f, first, now)
	} else if !f.late {
		p.askSooner(f)
	}
	p.show(f)
	p.release(now)
}

// receivedAt returns the time of a decision by the limiter's clock, or later.
func receivedAt(out *permit.Outcome, now int64) int64 {
	if out.Local != 0 {
		return out.Local
	}
	return now
}

// dueAtOnce reports whether a joint request was granted by one part, and is due. For permit.Any it sets the member.
func (p *Participant) dueAtOnce(f *flight, i int, q *Call) bool {
	if len(p.Parts) > 1 || !f.parts[0].decided {
		return false
	}
	granted := 0
	for m := range p.members {
		if g := &f.request(m, i).Grant; g.OK {
			if g.WaitMicros > 0 {
				return false
			}
			if granted++; p.Choice == permit.Any {
				q.member = m
			}
		}
	}
	return granted > 0
}

func cmpOr(a, b int64) int64 {
	if a != 0 {
		return a
	}
	return b
}

// keepSession takes back the session of a member. mu must be held.
func (p *Participant) keepSession(f *flight, m int) {
	if s := f.batch[m].Session; p.members[m].session == nil && !f.late {
		p.members[m].session = s
	} else if s != nil {
		s.Release()
	}
}

// report tells the monitor of a member's store of a failure. mu must be held.
func (p *Participant) report(m int, err error) {
	c := p.Members[m].Limiter.Coordinator
	if c.Health != nil && (c.Away(err) || c.NotAsked(err)) {
		c.Health.Suspect(c)
	}
}

// settleOwn ends the requests of a member alone. err is nil if there is a reply. mu must be held.
func (p *Participant) settleOwn(f *flight, m int, requests []permit.Request, err error) {
	for i, o := range f.own[m] {
		ok := err == nil && requests[i].Grant.OK
		switch {
		case o.refund != nil:
			if !ok {
				p.lost.Add(o.refund.permits)
			}
			o.refund.confirm.settled(err)
		case o.call == nil:
		case err != nil:
			p.fail(o.call, err)
		case !ok:
			p.fail(o.call, p.Members[m].Limiter.Overflow(o.call.settles[m]))
		default:
			if o.call.settles[m] = 0; !slices.ContainsFunc(o.call.settles, func(n int64) bool { return n != 0 }) {
				p.end(o.call, done, nil)
			}
		}
	}
}

// requeueOwn keeps the requests of a member alone for the next batch. mu must be held.
func (p *Participant) requeueOwn(f *flight, m int) {
	for _, o := range f.own[m] {
		if o.refund != nil {
			p.members[m].refunds = append(p.members[m].refunds, o.refund)
		} else if o.call != nil && o.call.state == asking && !slices.Contains(p.asking, o.call) {
			p.asking = append(p.asking, o.call)
		}
	}
}

// observe takes over what a reply shows of a member. mu must be held.
func (p *Participant) observe(f *flight, i int, out *permit.Outcome, received, now int64, mono time.Duration) {
	m, b := &p.members[i], &out.Bucket
	m.offset.Observe(received-out.NowMicros, now-f.local)
	if !p.Immediate {
		m.server.Heard(out.ClockMicros, f.began, mono)
	}
	m.terms = b.Terms
	if b.Terms.Version > 0 && (m.known == nil || b.Terms.Version >= m.known.Version) {
		m.known = b.Terms
	} else if b.Terms.Version == 0 {
		m.known = nil
	}
	m.free, m.stored = received+b.Next-out.NowMicros, 0
	if !b.Terms.WarmsUp {
		m.stored = int64(b.Stored)
	}
	if c := m.Limiter.Coordinator; c.Health != nil {
		c.Health.Answered(mono - f.began - out.LockWait)
	}
	shorter, longer, held := m.penalty.Observe(b.PausedMicros, b.HeldUntilMicros, out.NowMicros)
	if !held && shorter == 0 {
		return
	}
	until := b.HeldUntilMicros + m.offset.Micros()
	for _, q := range p.owned {
		part := &q.grant.parts[i]
		if !part.taken {
			continue
		}
		if part.due > now {
			part.due = max(now, part.due-shorter) + longer
		}
		if held {
			part.due = max(part.due, until)
		}
		q.grant.settle()
		q.due = q.grant.due
		if q.until != math.MaxInt64 && q.due > q.until {
			p.nextEnd = 1 // a penalty has made it too late
		}
	}
	p.nextDue = 0
	for _, q := range p.owned {
		p.nextDue = sooner(p.nextDue, q.due)
	}
}

// settle computes the due time from those of the parts.
func (g *grant) settle() {
	g.due = 0
	for i := range g.parts {
		if g.parts[i].taken {
			g.due = max(g.due, g.parts[i].due)
		}
	}
}

// granted returns the grant of a joint request; nil if it was refused or has failed. What parts have granted to such a request goes back. mu must
// be held.
func (p *Participant) granted(f *flight, i int, now int64) (g *grant) {
	taken, best := 0, -1
	for k := range f.parts {
		j, ok := f.find(k, i)
		if !ok {
			continue
		}
		for _, m := range p.Parts[k] {
			r := f.request(m, j)
			grant := &r.Grant
			if !grant.OK {
				continue
			}
			if g == nil {
				g = newGrant(r.Permits/p.Members[m].Weight, len(p.members))
			}
			if best >= 0 && p.Choice == permit.Any { // a later part is due sooner
				p.giveBackPart(g, best)
				taken--
			}
			taken++
			best = m
			if q := f.rows[i]; q != nil && !q.reserves {
				p.members[m].floor.Spend(r.Permits)
			}
			out := &f.batch[m].Outcome
			due := receivedAt(out, now)
			if grant.WaitMicros > 0 {
				due = out.NowMicros + grant.WaitMicros + p.members[m].offset.Micros()
			}
			g.parts[m] = part{true, grant.Place, out.Bucket.Terms, out.NowMicros, due, grant.Place.After.Next - grant.Place.Before.Next}
		}
	}
	if g == nil {
		return nil
	}
	g.settle()
	if p.Choice == permit.All && taken < len(p.members) {
		p.giveBack(g, nil)
		return nil
	}
	return g
}

// newGrant returns a grant without parts, in one allocation for a usual number of members.
func newGrant(permits int64, members int) *grant {
	if members > 4 {
		return &grant{permits: permits, parts: make([]part, members)}
	}
	g := &struct {
		grant
		room [4]part
	}{grant: grant{permits: permits}}
	g.parts = g.room[:members]
	return &g.grant
}

// giveBackPart gives one part of a grant back. mu must be held.
func (p *Participant) giveBackPart(g *grant, m int) {
	one := &grant{permits: g.permits, parts: make([]part, len(g.parts))}
	one.parts[m] = g.parts[m]
	g.parts[m] = part{}
	p.giveBack(one, nil)
}

// legError returns the error because of which a joint request was not decided; nil if there is none. mu must be held.
func (p *Participant) legError(f *flight, i int) (err error) {
	for k := range f.parts {
		switch leg := &f.parts[k]; {
		case leg.decided && p.Choice == permit.Any:
			return nil // the others count
		case leg.err != nil && err == nil && (leg.rows == nil || len(p.Parts) == 1 || slices.Contains(leg.rows, i)):
			err = p.Failure(p.Parts[k][0], leg.err)
		}
	}
	return err
}

// noteOutcome keeps what was decided about the members' parts of a reservation. mu must be held.
func (p *Participant) noteOutcome(f *flight, q *Call, i int) {
	if q.promised || !q.reserves {
		return
	}
	q.members = make([]Outcome, len(p.members))
	for k := range f.parts {
		if !f.parts[k].decided {
			continue
		}
		j, asked := f.find(k, i)
		for _, m := range p.Parts[k] {
			out, o := &f.batch[m].Outcome, &q.members[m]
			if o.Seen = (engine.Seen{Terms: out.Bucket.Terms, Balance: out.Bucket.Balance, Now: out.NowMicros}); asked {
				r := f.request(m, j)
				o.Wait, o.Taken, o.Refused = r.Grant.WaitMicros, r.Grant.OK, refuses(r)
			}
		}
	}
}

// refuses reports whether a member could not grant its part of a joint request in time.
func refuses(r *permit.Request) bool {
	return !r.Grant.OK && (r.Grant.Overflow || r.Grant.WaitMicros > r.MaxWaitMicros)
}

// refuseOrKeep ends a call that was refused. It reports whether the call waits instead, because its permits lie beyond the look-ahead. mu must be
// held.
func (p *Participant) refuseOrKeep(f *flight, q *Call, i int, now int64) (waits bool) {
	final, some, wait, by := false, true, int64(-1), -1
	for k := range f.parts {
		j, ok := f.find(k, i)
		if !ok {
			continue
		}
		for _, m := range p.Parts[k] {
			r := f.request(m, j)
			if !refuses(r) {
				continue
			}
			if r.Grant.Overflow && p.Choice == permit.All {
				p.fail(q, p.Members[m].Limiter.Overflow(r.Permits))
				return false
			}
			ends := f.ends[i]&(1<<m) != 0
			final, some = final || ends, some && ends
			if w := r.Grant.WaitMicros; by < 0 || p.Choice == permit.All && w > wait || p.Choice == permit.Any && w < wait {
				wait, by = w, m
			}
		}
	}
	if p.Choice == permit.Any {
		final = some
	}
	if q.member = by; !final || q.promised {
		q.decided = cmpOr(q.decided, now)
		return true
	}
	if q.decided != 0 {
		wait += now - q.came
	}
	q.decided = now
	p.refuse(q, max(0, wait))
	return false
}

// refused plans the next attempt for the waiters, whose first was refused. mu must be held.
func (p *Participant) refused(f *flight, first int, now int64) {
	pause, beyond, least := 0.0, int64(0), int64(math.MaxInt64)
	for k := range f.parts {
		j, ok := f.find(k, first)
		if !ok {
			continue
		}
		for _, m := range p.Parts[k] {
			r := f.request(m, j)
			over := r.Grant.WaitMicros - r.MaxWaitMicros
			if r.Grant.OK || over <= 0 {
				continue
			}
			b := &p.members[m]
			b.floor.Earn(b.effective(), b.Limiter.Coordinator.Class, b.Limiter.Floor, b.free-now, r.Permits, now)
			if pause = max(pause, float64(engine.Horizon(p.members[m].effective()))/20); over > beyond {
				p.refuser = m
			}
			beyond, least = max(beyond, over), min(least, over)
		}
	}
	if p.Choice == permit.Any {
		beyond = least
	}
	chance := rand.Float64()
	pause = max(pause, 50_000)
	beyond = beyond * 2 / 3
	p.askAt = now + min(max(int64(pause*(0.5+chance)), beyond+int64(pause*chance)), retryMost)
	for _, q := range p.asking {
		if !q.reserves && q.settles == nil {
			q.decided = cmpOr(q.decided, now)
			if q.until != math.MaxInt64 {
				p.nextEnd = sooner(p.nextEnd, q.until)
			}
		}
	}
}

// retryMost is the longest pause before waiters ask again.
const retryMost = 500_000

// askSooner makes the waiters ask at once if a reply shows that the first could be granted now. mu must be held.
func (p *Participant) askSooner(f *flight) {
	if p.askAt == 0 {
		return
	}
	i := slices.IndexFunc(p.asking, func(q *Call) bool { return q.settles == nil && (!q.reserves || q.promised) })
	if i < 0 {
		p.askAt = 0
		return
	}
	fits := 0
	for k := range f.parts {
		if !f.parts[k].decided {
			return
		}
		for _, m := range p.Parts[k] {
			out, t := &f.batch[m].Outcome, p.members[m].effective()
			n := p.asking[i].permits * p.Members[m].Weight
			if wait, ok := engine.Wait(t, out.Bucket.Balance, out.NowMicros, n); ok && wait <= engine.LookAhead(t, p.Members[m].Limiter.Coordinator.Class, n, p.ahead(m, p.at)) {
				fits++
			}
		}
	}
	if fits == len(p.members) || fits > 0 && p.Choice == permit.Any {
		p.askAt = 0
	}
}

// failDown fails the calls that need a store which is unavailable. mu must be held.
func (p *Participant) failDown(now int64) {
	if p.Immediate || len(p.asking) == 0 {
		return
	}
	for m := range p.Members {
		c := p.Members[m].Limiter.Coordinator
		o := c.Down()
		if o == nil || p.Choice == permit.Any && len(p.Parts) > 1 {
			continue
		}
		c.Health.Suspect(c)
		err := p.Failure(m, fmt.Errorf("%w: bucket %q: since %v: %w", permit.ErrStoreUnavailable, c.Name, time.Since(o.Since).Round(time.Millisecond), o.Err))
		calls := p.asking
		p.asking = nil
		for i, q := range calls {
			if p.asks(q, now) && !q.promised {
				p.fail(q, err)
			} else if p.asks(q, now) {
				p.askAt = now + retryMicros
				p.asking = append(p.asking, calls[i])
			} else {
				p.asking = append(p.asking, q)
			}
		}
		return
	}
}

// startDeadline makes sure that the timer of the deadlines runs. mu must be held.
func (p *Participant) startDeadline(d time.Duration) {
	switch {
	case p.ticking:
		return
	case p.deadline == nil:
		p.deadline = time.AfterFunc(d, p.checkDeadlines)
	default:
		p.deadline.Reset(d)
	}
	p.ticking = true
}

// checkDeadlines fails the calls that have waited for the store timeout, by the system's clock.
func (p *Participant) checkDeadlines() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ticking = false
	if !p.busy {
		return
	}
	mono, now := clock.Mono(), p.local.Now()
	oldest := mono
	expire := func(q *Call) bool {
		if q == nil || q.state != asking || q.promised || q.flight == nil && !p.asks(q, now) {
			return false
		}
		since := max(q.sent, p.since)
		if mono-since < p.Timeout {
			oldest = min(oldest, since)
			return false
		}
		p.fail(q, p.timeoutError(p.flight))
		return true
	}
	if f := p.flight; f != nil {
		oldest = min(oldest, f.began)
		for _, q := range f.rows {
			expire(q)
		}
	}
	p.asking = slices.DeleteFunc(p.asking, expire)
	p.startDeadline(p.Timeout - (mono - oldest))
	p.setAlarm(now)
}

// setAlarm sets the timer for the first due time, the end of a timeout, the next attempt, and the next read. mu must be held.
func (p *Participant) setAlarm(now int64) {
	next := sooner(p.nextDue, p.nextEnd)
	if !p.busy && p.listens() {
		next = sooner(next, p.at+engine.ListenMicros)
		if len(p.asking) > 0 && p.askAt != 0 {
			next = sooner(next, p.askAt)
		}
	}
	if next == p.alarmAt {
		return
	}
	p.alarmAt = next
	switch wait := time.Duration(next-now) * time.Microsecond; {
	case next == 0:
		p.alarm.Stop()
	case p.alarm == nil:
		p.alarm = p.Clock.AfterFunc(wait, p.ring)
	default:
		p.alarm.Reset(wait)
	}
	if !p.local.System() && next != 0 && p.local.Now() >= next {
		p.alarm.Reset(0) // the clock of a test may have jumped past the timer before it was set
	}
}

func (p *Participant) ring() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.alarmAt = 0
	p.dispatch(p.local.Now())
}
