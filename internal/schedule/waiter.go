package schedule

import "github.com/go-tokenbucket/tokenbucket/internal/permit"

// Forever is the Until of a waiter without a timeout.
const Forever = 1 << 62

// Waiter is a call that waits in the queue.
type Waiter[V any] struct {
	Value   V
	Permits int64
	Came    int64         // when it joined the queue, by the local clock
	Until   int64         // end of its timeout: permits due later are too late; in the queue only [Schedule.Promise] and a grant change it
	Origin  permit.Origin // of its permits, once they are due or promised

	next, prev *Waiter[V]
	state      state
	at         *segment // the segment that it gathers permits of, or nil
	round      uint64   // the search that determined at
	refused    bool     // the store has refused it, or a waiter ahead of it
	decided    bool     // it was refused or covered before
	firm       bool     // it is a granted reservation, which no other waiter may delay
	debt       bool     // its permits were used before: see [Schedule.Owe]
	place      int      // position in parked, from 1; 0 if it is not parked
	rank       int      // rank among the covered waiters; 0 if it is uncovered
	due        int64    // when its permits are due, as of its promotion, its grant or the last walk
}

type state uint8

const (
	absent state = iota
	uncovered
	covered
)

// Waits reports whether w is in the queue.
func (w *Waiter[V]) Waits() bool { return w.state != absent }

// Covered reports whether the process owns permits for w.
func (w *Waiter[V]) Covered() bool { return w.state == covered }

// Decided reports whether a reply has decided about w before: it refused w or a waiter ahead of it, or the permits that the process owns
// sufficed for w.
func (w *Waiter[V]) Decided() bool { return w.decided }

// Due returns when the permits of an expired waiter would have been due.
func (w *Waiter[V]) Due() int64 { return w.due }

// Following returns the waiter behind w, or nil.
func (w *Waiter[V]) Following() *Waiter[V] { return w.next }
