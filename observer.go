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
	// whose request is its first. A MemoryStore makes no trips.
	Trip func(Trip)
	// Lease is called when a block of a bucket's permits (WithLease) is used up, given back or worthless. It is told how many were
	// in it, and how many of them were used.
	Lease func(bucket string, permits, used int)
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
	// By says who decided. It is one of these words:
	//
	//   - store: the bucket was asked. A failure under FailClosed is the store's, too.
	//   - snapshot: refused without asking, since the bucket was seen to be empty.
	//   - lease: granted from permits that this process holds (WithLease).
	//   - switch: it was off, and the call passed (WithSwitch).
	//   - policy: the store could not be asked, and FailOpen or LocalShare decided.
	//   - check: what was asked for is invalid or can never be granted, or its context had ended before.
	By string
	// Wait is, of a grant, from the decision until its permits were due; of a refusal, how long they would have taken, if
	// that is known.
	Wait time.Duration
	// Elapsed is the time that the call took, waiting included.
	Elapsed time.Duration
	// Shadow: the decision was only counted, and the call passed (WithShadow).
	Shadow bool
}

// Who decided.
const (
	byStore    = "" // told as store
	bySnapshot = "snapshot"
	byLease    = "lease"
	bySwitch   = "switch"
	byPolicy   = "policy"
	byCheck    = "check"
)

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
