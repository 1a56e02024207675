package tokenbucket

import (
	"context"
	"time"
)

// Observer is told what a limiter does, for metrics, traces and logs. Functions that are nil are not called, and an
// observer that is not set costs nothing. They are called by many goroutines at once, Prefetch under a bucket's lock: they must return
// quickly, must not call the limiter, and must not panic. A panic of Decision, or of Trip in a trip that a caller makes itself, reaches
// that caller; any other is logged. Nobody else is harmed. contrib/prometheus and contrib/otel make one of each kind.
type Observer struct {
	// Decision is called once for every Try, TryAcquire, Acquire, Reserve and TryReserve, by its caller's goroutine, just
	// before it returns.
	Decision func(context.Context, Decision)
	// Trip is called when the store has answered a batch of requests, or was given up on. A batch is told to the limiter
	// whose request is its first. A MemoryStore makes no trips.
	Trip func(Trip)
	// Prefetch is called when a block of a bucket's permits (WithPrefetch) is used up, given back or worthless. It is told how many were
	// in it, and how many of them were used. bucket is its Label if it has one, see Decision.
	Prefetch func(bucket string, permits, used int)
	// Health is called when this process notices that the store is away or back.
	Health func(Health)
}

// Decision is the answer to one call.
type Decision struct {
	// Bucket and Permits of the call.
	Bucket  string
	Permits int
	// Label is what metrics count the bucket under, if that is not its name ([WithLabel]). For a registry's buckets of single keys
	// (registry.Limit.PerKey), it is the name of their row.
	Label string
	// Granted is false for a refusal and for a failure; Err is set only for a failure.
	Granted bool
	Err     error
	// By is where the decision was made.
	By Decider
	// Wait is, of a grant, from the decision until its permits were due; of a refusal, how long they would have taken, if
	// that is known.
	Wait time.Duration
	// Elapsed is the time that the call took, waiting included.
	Elapsed time.Duration
	// Shadow: the decision was only counted, and the call passed (WithShadow).
	Shadow bool
}

// Decider is where a decision was made.
type Decider uint8

const (
	// ByStore: in the bucket. A failure under FailClosed is ByStore.
	ByStore Decider = iota
	// BySnapshot: refused by the bucket's state in the last reply, without a round trip.
	BySnapshot
	// ByPrefetch: granted from permits that this process holds, see [WithPrefetch].
	ByPrefetch
	// BySwitch: passed, since the switch was off, see [WithSwitch].
	BySwitch
	// ByPolicy: by FailOpen or a LocalShare, during an outage of the store.
	ByPolicy
	// ByCheck: the argument was invalid, no state of the bucket could grant the request in time, or the context had ended before the call.
	ByCheck
)

var deciders = [...]string{"store", "snapshot", "prefetch", "switch", "policy", "check"}

// String returns store, snapshot, prefetch, switch, policy or check.
func (d Decider) String() string {
	if int(d) < len(deciders) {
		return deciders[d]
	}
	return "unknown"
}

// Trip is one batch on its way to the store and back.
type Trip struct {
	// Bucket of the batch.
	Bucket string
	// Requests that shared it.
	Requests int
	// Elapsed until its answer, or until it was given up; LockWait is the part of it that was spent waiting for the
	// bucket's lock, 0 if it was free.
	Elapsed, LockWait time.Duration
	// Err of the store; nil: answered.
	Err error
}

// Health is what a process thinks of its store.
type Health struct {
	// Bucket of the limiter that is told.
	Bucket string
	// Down: the store does not answer, and calls get what the policy says until it does.
	Down bool
	// Policy in force while it is down.
	Policy FailurePolicy
	// Err is the failure that was noticed.
	Err error
	// After is, when the store is back, how long it was away.
	After time.Duration
}
