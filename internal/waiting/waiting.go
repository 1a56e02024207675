// Package waiting runs a machine (package step) whose calls wait for a store.
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
	"time"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/step"
)

// Call is a call of a machine: a pointer to a struct that embeds a step.Ticket.
type Call interface{ Self() *step.Ticket }

// Config is the fixed part of a process.
type Config[C Call, B, R any] struct {
	Machine step.Machine[C, B, R]
	Mu      *sync.Mutex     // guards the machine
	Clock   clockwork.Clock // nil for the system's
	// Timeout bounds how long a call waits for the store, and a round trip.
	Timeout time.Duration
	// Send makes a round trip with a batch, with a client that may ignore the context.
	Send func(context.Context, B) (R, error)
	// Direct is Send for the goroutine of a caller: it returns when the context ends. nil if there is no such client.
	Direct func(context.Context, B) (R, error)
	// Failure returns what an error of Send means, and the error as callers get it.
	Failure func(error) (step.Landing, error)
}

// Process is the shell around a machine. It is safe for concurrent use, and must not be copied.
type Process[C Call, B, R any] struct {
	config Config[C, B, R]
	source source[C, B, R]
	trips  batch.Trips[B, R]

	// Mu guards the machine and the fields below.
	Outage    outage.Status
	Abandoned int           // overdue batches whose client has not returned
	expires   time.Duration // when Expire is due, by clock.Mono; 0 if no call waits for the store
	alarm     alarm         // for Expire and Next.By
	look      look          // for Next.Wait
}

// New returns a process. Its machine is at rest: no call waits.
func New[C Call, B, R any](c Config[C, B, R]) *Process[C, B, R] {
	p := &Process[C, B, R]{config: c, look: look{timers: c.Clock, local: clock.New(c.Clock)}}
	p.alarm.ring, p.look.ring = p.ring, p.rungLook
	p.source.process = p
	p.trips = batch.Trips[B, R]{Max: 1, Parallel: 1, Send: p.sender(c.Send)}
	if c.Direct != nil {
		p.trips.Timeout, p.trips.Direct = c.Timeout, p.sender(c.Direct)
	}
	return p
}

// Do makes a call and waits until it has ended. If ctx ends first, the call leaves, and Do returns the error of ctx. Then the result of the
// call must not be read.
func (p *Process[C, B, R]) Do(ctx context.Context, c C) error {
	way, ready := p.join(c)
	switch way {
	case step.Ended:
		return nil
	case step.Alone:
		p.trips.Take(ctx, "", &p.source)
	}
	return p.await(ctx, c, ready)
}

// join adds a call.
func (p *Process[C, B, R]) join(c C) (way step.Way, ready <-chan struct{}) {
	var out step.Out
	now := p.begin()
	if way = p.config.Machine.Join(c, now, &out); way != step.Ended {
		ready = c.Self().Open()
		if p.expires == 0 {
			p.expires = now.Mono + p.config.Timeout
		}
	}
	p.end(now, &out, way == step.Alone)
	return way, ready
}

// await waits until a call has ended or ctx ends.
func (p *Process[C, B, R]) await(ctx context.Context, c C, ready <-chan struct{}) (err error) {
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
	}
	p.Step(func(now step.Moment, out *step.Out) {
		if !c.Self().Ended() { // else in the same instant: its result counts
			p.config.Machine.Leave(c, now, out)
			err = ctx.Err()
		}
	})
	return err
}

// Step makes a step of the machine by f, which is called with the lock held.
func (p *Process[C, B, R]) Step(f func(now step.Moment, out *step.Out)) {
	var out step.Out
	now := p.begin()
	f(now, &out)
	p.end(now, &out, false)
}

// begin locks, and returns the time of a step.
func (p *Process[C, B, R]) begin() step.Moment {
	p.config.Mu.Lock()
	mono := clock.Mono()
	now := step.Moment{Local: p.look.local.MicrosAt(mono), Mono: mono}
	if p.Outage.Down() != nil {
		now.Pause = p.Outage.UntilProbe()
	}
	return now
}

// end brings about what follows from a step, and unlocks. With sends, the caller takes care of the batch that is wanted.
func (p *Process[C, B, R]) end(now step.Moment, out *step.Out, sends bool) {
	next := p.config.Machine.Tick(now, out)
	if next.Send && !sends {
		p.trips.Ready("", &p.source)
	}
	p.alarm.set(earlier(next.By, p.expires), now.Mono)
	p.look.set(next.Wait, now.Local)
	p.config.Mu.Unlock()
	out.Deliver()
}

// ring is called by the alarm.
func (p *Process[C, B, R]) ring() {
	p.Step(func(now step.Moment, out *step.Out) {
		p.alarm.passed(now.Mono)
		if p.expires != 0 && now.Mono >= p.expires {
			p.expires = p.config.Machine.Expire(now, out)
		}
	})
}

// rungLook is called by the timer of the limiter's clock: Tick does what is due.
func (p *Process[C, B, R]) rungLook() {
	p.Step(func(step.Moment, *step.Out) { p.look.on = false })
}

// source is the batch.Source of a process.
type source[C Call, B, R any] struct {
	batch.Place
	process *Process[C, B, R]
}

// Depart implements batch.Source.
func (s *source[C, B, R]) Depart() (b B, deadline time.Time, ok bool) {
	p := s.process
	p.Step(func(now step.Moment, out *step.Out) { b, ok = p.config.Machine.Build(now, out) })
	return b, time.Now().Add(p.config.Timeout), ok
}

// Land implements batch.Source.
func (s *source[C, B, R]) Land(b B, reply R, err error, late bool) {
	p := s.process
	how := step.Replied
	if err != nil {
		how, err = p.config.Failure(err)
	}
	var out step.Out
	now := p.begin()
	switch {
	case late:
		if p.Abandoned--; how == step.Replied { // it is back
			p.Outage.ProbeNow()
		}
		how = step.Late
	case errors.Is(err, batch.ErrLate):
		if p.Abandoned++; how == step.Failed {
			how = step.Overdue
		}
	}
	p.config.Machine.Settle(b, reply, how, err, now, &out)
	now = p.judge(how, err, now, &out)
	p.end(now, &out, false)
}

// judge begins, continues or ends an outage by the outcome of a batch, and returns now with the pause before the next. Mu must be held.
func (p *Process[C, B, R]) judge(how step.Landing, err error, now step.Moment, out *step.Out) step.Moment {
	switch how {
	case step.Failed, step.Overdue:
		longest := step.MaxPause
		if p.Abandoned > 2 {
			longest = step.LongPause
		}
		p.Outage.ProbeFailed(err, step.MinPause, longest)
		now.Pause = p.Outage.UntilProbe()
		p.config.Machine.Outage(err, now, out)
	case step.Replied, step.Unusable, step.Unsent:
		now.Pause = 0
		if p.Outage.ProbeAnswered() != nil {
			p.config.Machine.Outage(nil, now, out)
		}
	}
	return now
}

// sender returns a function for batch.Trips that makes round trips by send.
func (p *Process[C, B, R]) sender(send func(context.Context, B) (R, error)) func(string, []*batch.Item[B, R]) {
	return func(_ string, items []*batch.Item[B, R]) {
		for _, i := range items {
			ctx, cancel := context.WithDeadline(context.Background(), i.Deadline)
			reply, err := send(ctx, i.Batch)
			cancel()
			i.Answer(reply, err)
		}
	}
}
