package gate

import (
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// Admission is the reply of a [Gate]: whether a call may begin, and why. Your own gate returns &Admission{OK: true} for a
// call that no bucket limits, and sets only RetryAfter for a refusal.
type Admission struct {
	// OK reports whether the call may begin now.
	OK bool
	// By names the limit that decided; for a refusal, the one that refused.
	By Decider
	// RetryAfter is, for a refusal, the time until such a call could pass if there are no other calls, as far as that is
	// known; otherwise 0.
	RetryAfter time.Duration
	// Member is the bucket that decided, if the limiter is several: for a refusal the one that refused, otherwise the one that leaves
	// the least. If the limiter of a gate of [One] is a single one, a refusal has its name. Otherwise it is empty: the key names the bucket.
	Member string
	// Level is the level of the rate's bucket when the call began or was refused; nil if no bucket decided. If the limiter is several,
	// it is that of Member, in permits of the call.
	Level *tokenbucket.Level
	// Release returns what the call holds while it is in progress, such as a place of the concurrency limit. It is nil if the
	// call holds nothing. Leave calls it.
	Release func()

	left  atomic.Bool
	level tokenbucket.Level // the target of Level, to save an allocation

	reservation Reservation // of a call that may begin; nil if no bucket has counted it
}

// Leave ends the call, and returns what it holds. Call it once the call has ended; until then the call counts as in progress.
// A second Leave, or one for a refusal, does nothing.
func (a *Admission) Leave() {
	if a != nil && a.Release != nil && !a.left.Swap(true) {
		a.Release()
	}
}

// Holds reports whether Leave returns anything.
func (a *Admission) Holds() bool { return a.Release != nil }
