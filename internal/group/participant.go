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
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jonboulle/clockwork"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
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
	// Lost counts permits whose refunds were not accepted, or had no reply, of all members together. Participants may share it.
	Lost *atomic.Int64
}

// trips carry one batch at a time.
type trips = transport.Trips[*flight, struct{}]

// Participant is this process's side of several buckets. It only connects its parts, and each of them says its own invariants. It is safe for concurrent
// use.
type Participant struct {
	Config
	local clock.Local
	transport.Place
	trips *trips
	view  view        // it needs no lock to refuse
	idle  atomic.Bool // no call is in progress, and no permits are spare

	mu        sync.Mutex // guards the fields below and the calls; it comes before the lock of trips
	members   []member
	queue     queue
	inFlight  inFlight
	alarm     alarm
	deadlines deadlines
	recalled  error        // see Recall; nil while the limiters are in force
	ends      bool         // its permits do not serve a successor
	successor *Participant // see Succeed; nil while there is none
}

// New returns a participant.
func New(config Config) *Participant {
	p := &Participant{Config: config, local: clock.New(config.Clock), members: make([]member, len(config.Members))}
	for i := range p.members {
		m := &p.members[i]
		m.Member, m.micros, m.stored, m.lost = config.Members[i], p.local.Micros, permit.MaxBatch, config.Lost
	}
	p.view.config, p.view.system = &p.Config, p.local.System()
	quotas := slices.ContainsFunc(config.Members, func(m Member) bool { return m.Limiter.Quota })
	p.queue = queue{quotas: quotas, strict: p.local.System(), config: &p.Config, members: p.members, view: &p.view}
	p.inFlight = inFlight{config: &p.Config, buffer: []chan struct{}{}}
	p.alarm = alarm{clock: config.Clock, local: &p.local, ring: p.ring}
	p.deadlines = deadlines{check: p.checkDeadlines, config: &p.Config, queue: &p.queue, inFlight: &p.inFlight}
	p.trips = &trips{Send: p.send, Max: 1, Parallel: 1, Timeout: config.Timeout}
	if config.Direct {
		p.trips.Direct = p.send
	}
	p.idle.Store(true)
	return p
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
	if p.recalled != nil && q.settles == nil {
		p.queue.count++
		p.queue.fail(q, p.recalled)
		return false
	}
	mono := clock.Mono()
	now := p.local.NowAt(mono)
	if !p.queue.join(q, now, mono) {
		return false
	}
	if stays && p.Direct && !p.inFlight.busy && len(p.queue.asking) == 1 && p.sends(now) {
		if p.queue.failDown(now); len(p.queue.asking) == 1 {
			p.begin()
			return true
		}
	}
	p.dispatch(now)
	return false
}

// Wait waits for the result of a call. If the context ends first, the call is abandoned.
func (p *Participant) Wait(ctx context.Context, q *Call, answered <-chan struct{}) Result {
	if cancelled := ctx.Done(); cancelled == nil {
		<-answered
	} else {
		select {
		case <-answered:
		default:
			select {
			case <-answered:
			case <-cancelled:
				if p.leave(q) {
					return Result{Err: ctx.Err()}
				}
			}
		}
	}
	if q.reserves { // its permits may move or lapse meanwhile
		p.mu.Lock()
		defer p.mu.Unlock()
	}
	return q.result()
}

// leave abandons a call. It reports false if the call has ended before.
func (p *Participant) leave(q *Call) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.local.Now()
	p.queue.release(now)
	if q.state > owned {
		return false
	}
	p.queue.abandon(q, nil, now)
	p.dispatch(now)
	return true
}

// Cancel gives back the permits of a reservation that are not due yet, unless it has ended, and waits for the replies.
func (p *Participant) Cancel(ctx context.Context, q *Call) error { return p.giveUp(ctx, q, false) }

// Return gives back the permits of a reservation even if they were due at once.
func (p *Participant) Return(ctx context.Context, q *Call) error { return p.giveUp(ctx, q, true) }

// giveUp gives back the permits of a reservation that are not due yet, or were due at once if the call has not begun.
func (p *Participant) giveUp(ctx context.Context, q *Call, unused bool) error {
	c := &confirm{done: make(chan struct{})}
	p.mu.Lock()
	now := p.local.Now()
	p.queue.release(now)
	switch {
	case q.state <= owned && q.end.Claim(permit.GivenBack): // permits that are due are used, and may be settled
		p.queue.abandon(q, c, now)
		p.dispatch(now)
	case unused && q.unused != nil && q.end.Claim(permit.GivenBack):
		q.unused.confirm = c.await()
		p.queue.giveBack(q.unused, inTurn, now)
		p.dispatch(now)
	}
	open, err := c.open, c.err
	p.mu.Unlock()
	if !open {
		return err
	}
	return c.wait(ctx, &p.Config)
}

// Claim ends a granted reservation, so that its caller may settle it. It reports false if the reservation has ended before.
func (p *Participant) Claim(q *Call) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return q.end.Claim(permit.Settled)
}

// NewSettlement returns a call that charges the members of a granted reservation n permits more, each times its weight, or gives -n back.
func (p *Participant) NewSettlement(reservation *Call, n int64, deadline time.Duration) *Call {
	q := &Call{timeout: permit.MaxExact, deadline: deadline, settles: make([]int64, len(p.Members)), member: -1, ready: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	q.of = cmp.Or(reservation.grant, reservation.used)
	for m, o := range reservation.members {
		if o.Taken {
			q.settles[m] = n * p.Members[m].Weight
		}
	}
	return q
}

// Recycle lets a call be reused whose caller has received the result. Reservations are not reused.
func (p *Participant) Recycle(q *Call) {
	if !q.reserves && q.err == nil && !q.shared {
		*q = Call{}
		calls.Put(q)
	}
}

// Tells reports whether a refusal tells a member's wait rather than another's.
func (p *Participant) Tells(wait, other int64) bool { return tells(p.Choice, wait, other) }

// Refuses reports whether a request cannot be granted within maxWait by the last reply, by which member, and how long it would wait at least. It needs
// no lock.
func (p *Participant) Refuses(n, maxWait int64) (member int, wait int64, refused bool) {
	return p.view.refuses(n, maxWait)
}

// Seen returns the bucket of a member as the snapshot shows it.
func (p *Participant) Seen(member int) engine.Seen { return p.view.seen(member) }

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

// Depart implements [transport.Source].
func (p *Participant) Depart() (f *flight, deadline time.Time, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.local.Now()
	f = p.build(now)
	p.inFlight.departed(f)
	p.setAlarm(now)
	if f == nil {
		return nil, time.Time{}, false
	}
	return f, clock.At(f.began + p.Timeout), true
}

// build returns the next batch, or nil if there is nothing to send. mu must be held.
func (p *Participant) build(now int64) *flight {
	if !p.ready(now) {
		return nil
	}
	f := p.inFlight.next(now)
	f.fill(&p.queue, p.inFlight.since)
	return f
}

// send implements Send of [transport.Trips].
func (p *Participant) send(_ string, items []*transport.Item[*flight, struct{}]) {
	for _, i := range items {
		i.Batch.run(&p.Config)
		i.Answer(struct{}{}, nil)
	}
}

// Land implements [transport.Source]. Callers are woken after the lock is released.
func (p *Participant) Land(f *flight, _ struct{}, err error, late bool) {
	answered, grants, to := p.settled(f, err, late)
	wake(answered)
	if to != nil {
		to.adopt(grants)
	}
}

// settled delivers the result of a batch. It returns the channels of the callers to wake, and the permits that are for a successor.
func (p *Participant) settled(f *flight, err error, late bool) (answered []chan struct{}, grants spare, to *Participant) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if late { // another flight may land meanwhile
		p.queue.collect([]chan struct{}{})
	} else {
		p.queue.collect(p.inFlight.buffer)
	}
	mono := clock.Mono()
	now := p.local.NowAt(mono)
	if !late {
		p.inFlight.landed()
	}
	switch {
	case err == transport.ErrLate:
		p.deadlines.expireFlight(f, now)
	case err != nil: // a panic of a client
		f.fail(err)
		p.deliver(f, now, mono)
	default:
		p.deliver(f, now, mono)
		if !f.late {
			p.inFlight.reuse(f)
		}
	}
	if answered = p.queue.collected(); !late {
		p.inFlight.buffer = answered
	}
	grants = p.handOver(now)
	p.dispatch(now)
	return answered, grants, p.successor
}

// deliver hands out the reply to a batch. mu must be held.
func (p *Participant) deliver(f *flight, now int64, mono time.Duration) {
	if p.queue.at = now; !f.late {
		p.inFlight.since = mono
	}
	r := reply{flight: f, now: now, mono: mono, config: &p.Config, members: p.members, queue: &p.queue, view: &p.view}
	r.settle()
}

// dispatch sends what there is to send, unless a batch is in flight, and sets the alarm. mu must be held.
func (p *Participant) dispatch(now int64) {
	switch {
	case p.Immediate:
		for f := p.build(now); f != nil; f = p.build(p.local.Now()) {
			f.run(&p.Config)
			p.queue.collect(p.inFlight.buffer)
			p.deliver(f, p.local.Now(), 0)
			p.inFlight.buffer = p.queue.collected()
			wake(p.inFlight.buffer)
			p.inFlight.reuse(f)
		}
	case p.inFlight.busy:
		p.queue.release(now)
		p.queue.failDown(now)
	case p.ready(now):
		p.begin()
		p.trips.Ready("", p)
	default:
		p.inFlight.since = 0
	}
	p.setAlarm(now)
}

// ready ends the calls that need no batch. It reports whether there is anything to send. mu must be held.
func (p *Participant) ready(now int64) bool {
	p.queue.release(now)
	p.queue.failDown(now)
	return p.sends(now)
}

// sends reports whether there is anything to send. mu must be held.
func (p *Participant) sends(now int64) bool {
	for m := range p.members {
		if len(p.members[m].refunds) > 0 {
			return true
		}
	}
	return p.queue.sends(now) || p.queue.returns(now) || p.queue.stale(now)
}

// begin records that a batch is about to be built. mu must be held.
func (p *Participant) begin() {
	p.inFlight.begin()
	p.deadlines.start(p.Timeout)
}

// setAlarm sets the alarm for the next change of the queue, and whether the participant is idle. mu must be held.
func (p *Participant) setAlarm(now int64) {
	if idle := p.queue.count == 0 && len(p.queue.spare) == 0; idle != p.idle.Load() {
		p.idle.Store(idle)
	}
	p.alarm.set(p.queue.next(p.inFlight.busy), now)
}

// Idle reports whether no call is in progress and no permits are spare, so that a newcomer overtakes nobody if it takes permits without the queue. It needs no lock.
func (p *Participant) Idle() bool { return p.idle.Load() }

// ring is called when the alarm rings.
func (p *Participant) ring() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.alarm.at = 0
	p.dispatch(p.local.Now())
}

// checkDeadlines is called when the timer of the deadlines fires.
func (p *Participant) checkDeadlines() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.deadlines.running = false; !p.inFlight.busy {
		return
	}
	now := p.local.Now()
	p.deadlines.expire(now, clock.Mono())
	p.setAlarm(now)
}
