package schedule

// Forever is the Until of a waiter whose permits cannot come too late.
const Forever = 1 << 62

// Waiter is a caller in the line.
type Waiter[V any] struct {
	Value   V
	Permits int64
	Came    int64 // when it joined the line, by this process's clock
	Until   int64 // permits due later are of no use to it; changed in the line by [Schedule.Promise] only

	next, prev *Waiter[V]
	state      state
	at         *segment // whose next permits it would take; nil: not decided
	round      uint64   // of the search that has found that
	due        int64    // as known
	known      uint64   // after so many changes, and one
}

type state uint8

const (
	absent state = iota
	uncovered
	covered
)

// Waits tells whether a waiter is in the line.
func (w *Waiter[V]) Waits() bool { return w.state != absent }

// Covered tells whether the process owns permits for a waiter.
func (w *Waiter[V]) Covered() bool { return w.state == covered }

// Due is when a waiter's permits would be due that has left the line since they would come too late.
func (w *Waiter[V]) Due() int64 { return w.due }

// Following is the waiter behind w.
func (w *Waiter[V]) Following() *Waiter[V] { return w.next }
