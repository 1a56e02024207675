package tokenbucket

import (
	"context"
	"time"
)

// Observer receives the decisions of a limiter, for metrics, traces and logs. Functions that are nil are not called, and a limiter without
// an observer pays nothing for it. contrib/prometheus and contrib/otel each have one.
//
// The functions are called by many goroutines at once, Prefetch under a bucket's lock, Lost under that of a group. They must return quickly,
// must not call the limiter, and must not panic. A panic of Decision reaches the caller. So does a panic of Trip in a round trip that the
// caller makes itself. Any other panic is logged. No other call is affected.
type Observer struct {
	// Decision is called once for every Try, TryAcquire, Acquire, Reserve and TryReserve, in the caller's goroutine, just before the call
	// returns. See [Group] for calls of several limiters.
	Decision func(context.Context, Decision)
	// Trip is called when the store has replied to a batch of requests, or when the batch was given up. It is called on the observer of the
	// limiter whose request is the first of the batch, or for a batch of a [Group] on that of its first member on the store that has an
	// observer. A MemoryStore makes no round trips.
	Trip func(Trip)
	// Prefetch is called when a block of a bucket's permits (WithPrefetch) is used up, given back or worthless. permits is the size of the
	// block, and used is the number of permits of it that were used. bucket is the Label if there is one, see Decision.
	Prefetch func(bucket string, permits, used int)
	// Lost is called when permits that a [Group] or a [Choice] has taken of the bucket could not be given back, so they lapse: see [Group.Lost]. bucket
	// is as for Prefetch.
	Lost func(bucket string, permits int)
	// Health is called when this process notices that the store is unavailable, or that it is back.
	Health func(Health)
}

// Decision is the result of one call.
type Decision struct {
	// Bucket and Permits of the call.
	Bucket  string
	Permits int
	// Label is the name under which metrics count the bucket, if that is not its own ([WithLabel]). For a registry's buckets of single keys
	// (registry.Limit.PerKey), it is the name of their row.
	Label string
	// Granted is false for a refusal and for a failure; Err is set only for a failure.
	Granted bool
	Err     error
	// By is the place of the decision.
	By Decider
	// Wait of a grant is the time from the decision until its permits were due. Wait of a refusal is how long they would have taken, if
	// that is known.
	Wait time.Duration
	// Elapsed is the duration of the call, waiting included.
	Elapsed time.Duration
	// Priority of the limiter ([WithPriority]).
	Priority Priority
	// Shadow reports that the decision was only counted, and that the call passed (WithShadow).
	Shadow bool
}

// Decider is the place of a decision.
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
	// ByPriority: refused, since callers of a higher priority wait for the bucket in this process, see [WithPriority].
	ByPriority
)

var deciders = [...]string{"store", "snapshot", "prefetch", "switch", "policy", "check", "priority"}

// String returns store, snapshot, prefetch, switch, policy, check or priority.
func (d Decider) String() string {
	if int(d) < len(deciders) {
		return deciders[d]
	}
	return "unknown"
}

// Trip is one round trip: a batch on its way to the store and back.
type Trip struct {
	// Bucket of the batch.
	Bucket string
	// Requests is the number of requests in the batch, of all members for a batch of a [Group].
	Requests int
	// Elapsed is the time until the reply, or until the batch was given up. LockWait is the part of it spent waiting for the bucket's lock,
	// 0 if the lock was free.
	Elapsed, LockWait time.Duration
	// Err is the error of the store, or nil if it replied.
	Err error
}

// Health is the state of the store as this process observes it.
type Health struct {
	// Bucket is the name of the limiter with this observer.
	Bucket string
	// Down reports that the store does not reply, and that the policy decides calls until it does.
	Down bool
	// Policy is the failure policy in force while the store is down.
	Policy FailurePolicy
	// Err is the failure that was noticed.
	Err error
	// After is the duration of the outage, once it has ended.
	After time.Duration
}
