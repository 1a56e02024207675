package waiting

import "time"

// Machine is the part of a limiter that decides: who is granted what, what is sent next, what a reply means. It has no lock, reads no clock,
// starts no goroutine and wakes no caller, so the same steps always lead to the same state. B is its batches, R the replies of its store, C its
// calls, which embed a Ticket. The Process calls one method at a time. Each may end calls, by Out.End.
type Machine[C, B, R any] interface {
	// Join adds a call.
	Join(c C, now Moment, out *Out) Way
	// Leave withdraws a call that has not ended: its caller has given up. It must not end this call.
	Leave(c C, now Moment, out *Out)
	// Build returns the next batch. It reports false if there is nothing to send.
	Build(now Moment, out *Out) (B, bool)
	// Settle takes the outcome of a batch. The reply is set if how is Replied, or Late without an error.
	Settle(b B, r R, how Landing, err error, now Moment, out *Out)
	// Expire ends the calls that have waited for the store for too long, and returns when to call it next, by Moment.Mono; 0 for never.
	Expire(now Moment, out *Out) time.Duration
	// Tick does what is due, and returns what the shell has to do next. The shell calls it after every other step.
	Tick(now Moment, out *Out) Next
	// Outage records that an outage has begun, or that a probe has failed again, after the Settle of the batch that met it; nil: it has
	// ended.
	Outage(err error, now Moment, out *Out)
}

// Moment is the time of a step.
type Moment struct {
	// Local is the time by the limiter's clock, in microseconds since 1970. That clock may be set.
	Local int64
	// Mono is the time by the process's clock, which never goes back; see clock.Mono.
	Mono time.Duration
	// Pause is the time until the next batch may be sent, which is a probe; 0 without an outage.
	Pause time.Duration
}

const (
	// MinPause and MaxPause bound the time between two probes.
	MinPause = 50 * time.Millisecond
	MaxPause = time.Second
	// LongPause is MaxPause for a client that does not return by itself: each probe may cost a goroutine and a connection. It is also about
	// the time between two probes of a process without calls.
	LongPause = 30 * time.Second
)

// Way is what becomes of a call that has joined.
type Way uint8

const (
	// Ended: the call has its result.
	Ended Way = iota
	// Queued: the call waits.
	Queued
	// Alone: the call waits to be sent, and no batch is in flight: its caller may make the round trip.
	Alone
)

// Landing is the outcome of a batch.
type Landing uint8

const (
	// Replied: the store has replied in time.
	Replied Landing = iota
	// Failed: the store is away. It is unknown whether it has decided the batch.
	Failed
	// Overdue: there was no reply in time. Late follows if the client returns.
	Overdue
	// Late: the client has returned after Overdue. Other batches may have been settled in between.
	Late
	// Unsent: the process had no connection for the batch, although the store replies.
	Unsent
	// Unusable: the store is there, but it must be repaired.
	Unusable
)

// Next is what the shell has to do.
type Next struct {
	// Send: a batch is wanted now.
	Send bool
	// Wait is until the next Tick, by the limiter's clock; 0 for no such time.
	Wait time.Duration
	// By is when the next Tick is due, by Moment.Mono; 0 for no such time.
	By time.Duration
}

// Out is the effects of a step. The Process brings them about when it has unlocked.
type Out struct {
	wake  []*Ticket
	notes []func()
}

// End ends a call: its result is set, and its caller is to be woken.
func (o *Out) End(t *Ticket) {
	t.ended = true
	o.wake = append(o.wake, t)
}

// Note has f called, for an observer.
func (o *Out) Note(f func()) { o.notes = append(o.notes, f) }

// deliver wakes the callers of the calls that have ended, then calls the notes. Afterwards o is empty.
func (o *Out) deliver() {
	for _, t := range o.wake {
		if t.ready != nil {
			close(t.ready)
		}
	}
	for _, note := range o.notes {
		note()
	}
	clear(o.wake)
	o.wake, o.notes = o.wake[:0], nil
}

// Ticket is the part of a call that is the Process's. The zero value is ready for use.
type Ticket struct {
	ended bool
	ready chan struct{} // closed when the call has ended; nil if no caller waits
}

// Ended reports whether the call has its result.
func (t *Ticket) Ended() bool { return t.ended }

// ticket returns t. Calls that embed a Ticket have it, too.
func (t *Ticket) ticket() *Ticket { return t }
