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
	"sync"
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

	view view

	mu       sync.Mutex // guards the fields below
	members  []member   // the counts of lost permits may be read without it
	queue    queue
	busy     bool    // a batch is about to be built, or in flight
	spare    *flight // for reuse
	flight   *flight // nil while it is not built
	since    time.Duration
	alarm    clockwork.Timer
	alarmAt  int64
	deadline *time.Timer // while a batch is in flight
	ticking  bool        // the deadline's timer runs
}

// New returns a participant.
func New(config Config) *Participant {
	p := &Participant{Config: config, local: clock.New(config.Clock), members: make([]member, len(config.Members))}
	for i := range p.members {
		p.members[i].Member = config.Members[i]
		p.members[i].stored = permit.MaxBatch
	}
	p.view.config, p.view.system = &p.Config, p.local.System()
	p.queue = queue{strict: p.local.System(), config: &p.Config, members: p.members, view: &p.view}
	p.micros = p.local.Micros
	p.trips = &trips{Send: p.send, Max: 1, Parallel: 1, Timeout: config.Timeout}
	if config.Direct {
		p.trips.Direct = p.send
	}
	return p
}

// Refuses reports whether a request cannot be granted within maxWait by the last reply, by which member, and how long it would wait at least. It needs
// no lock.
func (p *Participant) Refuses(n, maxWait int64) (member int, wait int64, refused bool) {
	return p.view.refuses(n, maxWait)
}

// Seen returns the bucket of a member as the snapshot shows it.
func (p *Participant) Seen(member int) engine.Seen { return p.view.seen(member) }

// Lost returns how many permits could not be given back, of all members together. They lapse.
func (p *Participant) Lost() (permits int64) {
	for i := range p.members {
		permits += p.members[i].lost.Load()
	}
	return permits
}

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
	mono := clock.Mono()
	now := p.local.NowAt(mono)
	if !p.queue.join(q, now, mono) {
		return false
	}
	if stays && p.Direct && !p.busy && len(p.queue.asking) == 1 && p.sends(now) {
		if p.failDown(now); len(p.queue.asking) == 1 {
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

// dispatch sends what there is to send, unless a batch is in flight, and sets the alarm. mu must be held.
func (p *Participant) dispatch(now int64) {
	switch {
	case p.Immediate:
		for f := p.build(now); f != nil; f = p.build(p.local.Now()) {
			f.run(&p.Config)
			p.deliver(f, p.local.Now(), 0)
			f.reset()
			p.spare = f
		}
	case p.busy:
		p.queue.release(now)
		p.failDown(now)
	default:
		p.queue.release(now)
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
	return p.queue.sends(now) || p.queue.stale(now)
}
