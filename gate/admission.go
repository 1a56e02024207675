package gate

import (
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// Admission is the reply of a [Gate]: whether a call may begin, and why. A gate of your own returns &Admission{OK: true} for a call that no
// bucket limits, and sets RetryAfter alone for a refusal.
type Admission struct {
	// OK reports whether the call may begin now.
	OK bool
	// By names the limit that decided; of a refusal, the one that refused.
	By Decider
	// RetryAfter is the time until such a call could pass if nobody else asks, as far as that is known; 0 unless the call is refused.
	RetryAfter time.Duration
	// Level is how full the rate's bucket was as the call began, or was refused; nil if no bucket was asked.
	Level *tokenbucket.Level
	// Release gives back what the call holds while it is under way: a place among those that are under way at once. It is nil if the call
	// holds nothing. Leave calls it.
	Release func()

	left  atomic.Bool
	level tokenbucket.Level // that Level points to, to save an allocation
}

// Leave ends the call, and gives back what it holds. It has to be called once the call has ended; until then the call counts as under way.
// Calling it again, or for a refusal, does nothing.
func (a *Admission) Leave() {
	if a != nil && a.Release != nil && !a.left.Swap(true) {
		a.Release()
	}
}

// Holds reports whether Leave gives something back.
func (a *Admission) Holds() bool { return a.Release != nil }
