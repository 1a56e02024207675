package tokenbucket

import (
	"context"
	"time"
)

// Observer is told what a limiter does, for metrics, traces and logs. Functions that are nil are not called, and an
// observer that is not set costs nothing. They are called by many goroutines at once, some of them under a bucket's
// lock: they must return quickly, must not call the limiter, and must not panic. contrib/prometheus and contrib/otel make one
// of each kind.
type Observer struct {
	// Decision is called once for every Try, TryAcquire, Acquire, Reserve and TryReserve, by its caller's goroutine, just
	// before it returns.
	Decision func(context.Context, Decision)
	// Trip is called when the store has answered a batch of requests, or was given up on. A batch is told to the limiter
	// whose request is its first.
	Trip func(Trip)
	// Lease is called when a block of permits (WithLease) is used up, given back or worthless.
	Lease func(LeaseUse)
	// Health is called when this process notices that the store is away or back.
	Health func(Health)
}

// Decision is the answer to one call.
type Decision struct {
	// Bucket and Permits of the call.
	Bucket  string
	Permits int
	// Granted is false for a refusal and for a failure; Err is set only for a failure.
	Granted bool
	Err     error
	// By tells who decided.
	By Decider
	// Wait is, of a grant, from the decision until its permits were due; of a refusal, how long they would have taken, if
	// that is known.
	Wait time.Duration
	// Elapsed is the time that the call took, waiting included.
	Elapsed time.Duration
	// Shadow: the decision was only counted, and the call passed (WithShadow).
	Shadow bool
}

// Decider is who made a decision.
type Decider uint8

const (
	// ByStore: the bucket was asked.
	ByStore Decider = iota
	// BySight: refused without asking, since the bucket was seen to be empty.
	BySight
	// ByLease: granted from permits that this process holds (WithLease).
	ByLease
	// BySwitch: the switch was off, and the call passed (WithSwitch).
	BySwitch
	// ByPolicy: the store could not be asked, and FailOpen or LocalShare decided. A failure under FailClosed is ByStore.
	ByPolicy
	// ByCheck: what was asked for is invalid, or its context had ended before.
	ByCheck
)

var deciders = [...]string{"store", "sight", "lease", "switch", "policy", "check"}

// String is one word: store, sight, lease, switch, policy, check.
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

// LeaseUse is a block of permits that has ended.
type LeaseUse struct {
	Bucket string
	// Permits in the block, and how many of them were used.
	Permits, Used int
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

// ask is a call for permits that fall due within a timeout.
type ask func(l *RateLimiter, timeout time.Duration) (verdict, error)

// observed asks for permits as told, and tells the observer what came of it. A store that is away is where the policy
// decides.
func (l *RateLimiter) observed(ctx context.Context, permits int, timeout time.Duration, ask ask) (verdict, error) {
	began := mono()
	var v verdict
	var err error
	if l.shadow {
		v, err = l.shadowed(ctx, permits, timeout)
	} else if v, err = ask(l, timeout); err != nil {
		v, err = l.fallback(ctx, v, err, func(local *RateLimiter) (verdict, error) { // in time, whatever it took to get here
			return ask(local, max(0, timeout)-max(0, mono()-began-l.coordinator.timeout))
		})
	}
	if o := l.observer; o != nil && o.Decision != nil {
		o.Decision(ctx, Decision{
			Bucket: l.Name(), Permits: permits, Granted: err == nil && v.granted, Err: err, By: v.by,
			Wait: v.wait, Elapsed: mono() - began, Shadow: l.shadow,
		})
	}
	if l.shadow {
		return verdict{granted: true}, nil
	}
	return v, err
}
