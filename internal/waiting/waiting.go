// Package waiting runs a [Machine] whose calls wait for a store.
//
// Guarantees:
//
//   - Every call ends: by its result, by its context, or by the store timeout if it waits for the store. What the store grants to a call that
//     has left is refunded, by the machine.
//   - At most one batch is in flight, unless the one before it is overdue; see package batch.
//   - No caller is woken, and no observer is called, with the lock held.
//
// The naive way is a lock around the state, with a channel for each caller in it, and a timer for each wait. So it was done here, four times: by
// buckets, groups of buckets, semaphores and windows. Each method then locks, reads a clock, decides, draws a random number, and closes
// channels. Such a method can only be tested with goroutines and timers. And each copy of the mechanism had faults of its own: calls that
// waited longer than the timeout, outages that were none, waiters that were served one a round trip.
//
// Here a [Process] has the lock, the clocks, the goroutines and the channels, and the machine has the decisions. Each event is one step:
// the Process locks, calls one method of the machine with the time, then Tick, sets its alarms, has a batch sent if one is wanted, unlocks,
// and wakes the callers of the calls that ended. An outage begins with the failure of a batch, since each batch shows what the next would
// meet; from then on a batch is a probe, and is sent only when one is due.
package waiting

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
)

// Call is a call of a machine: a pointer to a struct that embeds a Ticket.
type Call interface{ ticket() *Ticket }

// Config is the fixed part of a process.
type Config[C Call, B, R any] struct {
	Machine Machine[C, B, R]
	Clock   clockwork.Clock // nil for the system's
	// Timeout bounds how long a call waits for the store, and a round trip.
	Timeout time.Duration
	// Send makes a round trip with a batch, with a client that may ignore the context. nil without a store.
	Send func(context.Context, B) (R, error)
	// Direct is Send for the goroutine of a caller: it returns when the context ends. nil if there is no such client.
	Direct func(context.Context, B) (R, error)
	// Failure returns what an error of Send means, and the error as callers get it.
	Failure func(error) (Landing, error)
}

// Process is the shell around a machine. It is safe for concurrent use, and must not be copied.
type Process[C Call, B, R any] struct {
	batch.Place
	machine Machine[C, B, R]
	timeout time.Duration
	failure func(error) (Landing, error)
	trips   *batch.Trips[B, R]  // nil without a store
	timers  clockwork.Clock     // as in Config
	local   clock.Local         // reads timers
	spare   atomic.Pointer[Out] // of a step that has ended; nil if there is none

	Mu        sync.Mutex // guards the machine and the fields below
	Outage    outage.Status
	Abandoned int           // overdue batches whose client has not returned
	expires   time.Duration // when Expire is due, by clock.Mono; 0 if no call waits for the store
	alarm     alarm         // for Expire and Next.By
	look      *look         // for Next.Wait; nil until there is one
}

// New returns a process. Its machine is at rest: no call waits.
func New[C Call, B, R any](c Config[C, B, R]) *Process[C, B, R] {
	p := &Process[C, B, R]{machine: c.Machine, timeout: c.Timeout, failure: c.Failure, timers: c.Clock, local: clock.New(c.Clock)}
	if c.Send != nil {
		p.trips = &batch.Trips[B, R]{Max: 1, Parallel: 1, Send: sender(c.Send)}
	}
	if c.Direct != nil {
		p.trips.Timeout, p.trips.Direct = c.Timeout, sender(c.Direct)
	}
	return p
}

// Local returns the time by the limiter's clock; see Moment.
func (p *Process[C, B, R]) Local() int64 { return p.local.Micros() }

// Do makes a call and waits until it has ended. If ctx ends first, the call leaves, and Do returns the error of ctx. Then the result of the
// call must not be read.
func (p *Process[C, B, R]) Do(ctx context.Context, c C) error {
	t := c.ticket()
	now, out := p.Begin()
	way := p.machine.Join(c, now, out)
	if way != Ended {
		t.ready = make(chan struct{})
		if p.expires == 0 {
			p.expires = now.Mono + p.timeout
		}
	}
	p.end(now, out, way == Alone)
	switch way {
	case Ended:
		return nil
	case Alone:
		p.trips.Take(ctx, "", p)
	}
	select {
	case <-t.ready:
		return nil
	case <-ctx.Done():
	}
	now, out = p.Begin()
	defer p.End(now, out)
	if t.ended { // in the same instant: its result counts
		return nil
	}
	p.machine.Leave(c, now, out)
	return ctx.Err()
}

// Begin locks, and returns the time of a step and where it leaves its effects. Between Begin and End the methods of the machine may be called.
func (p *Process[C, B, R]) Begin() (Moment, *Out) {
	out := p.spare.Swap(nil)
	if out == nil {
		out = new(Out)
	}
	p.Mu.Lock()
	mono := clock.Mono()
	now := Moment{Local: p.local.MicrosAt(mono), Mono: mono}
	if p.Outage.Down() != nil {
		now.Pause = p.Outage.UntilProbe()
	}
	return now, out
}

// End brings about what follows from a step, and unlocks.
func (p *Process[C, B, R]) End(now Moment, out *Out) { p.end(now, out, false) }

// end implements End. With sends, the caller takes care of the batch that is wanted.
func (p *Process[C, B, R]) end(now Moment, out *Out, sends bool) {
	next := p.machine.Tick(now, out)
	if next.Send && !sends {
		p.trips.Ready("", p)
	}
	if at := earlier(next.By, p.expires); p.alarm.isLate(at) {
		p.alarm.set(at, now.Mono, p.ring)
	}
	if next.Wait != 0 && p.look == nil {
		p.look = &look{ring: p.rungLook, timers: p.timers, local: &p.local}
	}
	if p.look != nil {
		p.look.set(next.Wait, now.Local)
	}
	p.Mu.Unlock()
	out.deliver()
	if cap(out.wake) <= 64 { // else it is a crowd's
		p.spare.Store(out)
	}
}

// ring is called by the alarm.
func (p *Process[C, B, R]) ring() {
	now, out := p.Begin()
	p.alarm.passed(now.Mono)
	if p.expires != 0 && now.Mono >= p.expires {
		p.expires = p.machine.Expire(now, out)
	}
	p.End(now, out)
}

// rungLook is called by the timer of the limiter's clock: Tick does what is due.
func (p *Process[C, B, R]) rungLook() {
	now, out := p.Begin()
	p.look.on = false
	p.End(now, out)
}

// Depart implements batch.Source.
func (p *Process[C, B, R]) Depart() (b B, deadline time.Time, ok bool) {
	now, out := p.Begin()
	b, ok = p.machine.Build(now, out)
	p.End(now, out)
	return b, time.Now().Add(p.timeout), ok
}

// Land implements batch.Source.
func (p *Process[C, B, R]) Land(b B, reply R, err error, late bool) {
	how := Replied
	if err != nil {
		how, err = p.failure(err)
	}
	now, out := p.Begin()
	switch {
	case late:
		if p.Abandoned--; how == Replied { // it is back
			p.Outage.ProbeNow()
		}
		how = Late
	case errors.Is(err, batch.ErrLate):
		if p.Abandoned++; how == Failed {
			how = Overdue
		}
	}
	p.machine.Settle(b, reply, how, err, now, out)
	p.End(p.judge(how, err, now, out), out)
}

// judge begins, continues or ends an outage by the outcome of a batch, and returns now with the pause before the next. Mu must be held.
func (p *Process[C, B, R]) judge(how Landing, err error, now Moment, out *Out) Moment {
	switch how {
	case Failed, Overdue:
		longest := MaxPause
		if p.Abandoned > 2 {
			longest = LongPause
		}
		p.Outage.ProbeFailed(err, MinPause, longest)
		now.Pause = p.Outage.UntilProbe()
		p.machine.Outage(err, now, out)
	case Replied, Unusable, Unsent:
		now.Pause = 0
		if p.Outage.ProbeAnswered() != nil {
			p.machine.Outage(nil, now, out)
		}
	}
	return now
}

// sender returns a function for batch.Trips that makes round trips by send.
func sender[B, R any](send func(context.Context, B) (R, error)) func(string, []*batch.Item[B, R]) {
	return func(_ string, items []*batch.Item[B, R]) {
		for _, i := range items {
			ctx, cancel := context.WithDeadline(context.Background(), i.Deadline)
			reply, err := send(ctx, i.Batch)
			cancel()
			i.Answer(reply, err)
		}
	}
}
