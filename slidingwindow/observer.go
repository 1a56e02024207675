package slidingwindow

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// Observer is told what a limiter does, for metrics, traces and logs. Functions that are nil are not called, and an observer that
// is not set costs nothing. They are called by many goroutines at once, without a lock of the limiter: they should return quickly, and
// must not panic. contrib/prometheus and contrib/otel make one of each kind.
type Observer struct {
	// Decision is called once for every Allow, AllowN, Take, Wait and WaitN, by its caller's goroutine, just before it returns.
	Decision func(context.Context, Decision)
	// Trip is called when Redis has answered a batch of requests, or was given up on.
	Trip func(Trip)
	// Health is called when this limiter notices that Redis is away or back.
	Health func(Health)
}

// Decision is the answer to one call.
type Decision struct {
	// Limiter and Permits of the call.
	Limiter string
	Permits int
	// Granted is false for a refusal and for a failure; Err is set only for a failure.
	Granted bool
	Err     error
	// By tells who decided.
	By Decider
	// Wait is how long a Wait or WaitN took until its permits were admitted, 0 of other calls; of a refusal, how long it takes at
	// least until they could be (Limiter.RetryAfter).
	Wait time.Duration
	// Elapsed is the time that the call took.
	Elapsed time.Duration
}

// Decider is who made a decision.
type Decider uint8

const (
	// ByStore: where the window is counted, in Redis or in this process.
	ByStore Decider = iota
	// BySnapshot: refused without asking Redis, by what this process knows.
	BySnapshot
	// ByPolicy: Redis was away, and Pass or a share decided. A failure under Refuse is ByStore.
	ByPolicy
	// ByCheck: what was asked for is invalid, its context had ended before, or too many wait.
	ByCheck
)

var deciders = [...]string{"store", "snapshot", "policy", "check"}

// String is one word: store, snapshot, policy, check.
func (d Decider) String() string {
	if int(d) < len(deciders) {
		return deciders[d]
	}
	return "unknown"
}

// Trip is one batch on its way to Redis and back.
type Trip struct {
	// Limiter of the batch.
	Limiter string
	// Requests that shared it; 0 if it only told or looked.
	Requests int
	// Elapsed until its answer, or until it was given up.
	Elapsed time.Duration
	// Err of Redis; nil: answered.
	Err error
}

// Health is what a limiter thinks of Redis.
type Health struct {
	// Limiter that has noticed.
	Limiter string
	// Down: Redis does not answer, and calls get what WithAway or WithShare says until it does.
	Down bool
	// Away is what that is.
	Away Away
	// Err is the failure that was noticed.
	Err error
	// After is, when Redis is back, how long it was away.
	After time.Duration
}

// WithObserver sets who is told of decisions, round trips and outages. Default: nobody.
func WithObserver(o Observer) Option { return func(op *options) { op.observer = &o } }

// of tells what came of a batch. mu is not held.
func (t *told) of(c *coordinator, b *flight, l landed) {
	if o := t.observer; o != nil {
		if o.Trip != nil {
			o.Trip(Trip{c.name, len(b.calls), clock.Mono() - b.began, l.err})
		}
		if o.Health != nil && l.down {
			o.Health(Health{Limiter: c.name, Down: true, Away: l.away, Err: l.err})
		}
		if o.Health != nil && l.ended != nil {
			o.Health(Health{Limiter: c.name, Away: l.away, After: time.Since(l.ended.Since)})
		}
	}
	if t.hook == nil || l.err == nil && !l.back {
		return
	}
	t.hook(l.err)
}

// observed makes a decision and tells it.
func (l *Limiter) observed(ctx context.Context, n int, decide func(context.Context, int) (verdict, time.Duration, error)) (verdict, error) {
	if l.observer == nil || l.observer.Decision == nil {
		v, _, err := decide(ctx, n)
		return v, err
	}
	began := clock.Mono()
	v, wait, err := decide(ctx, n)
	if err == nil && !v.ok {
		wait = l.RetryAfter(n)
	}
	l.observer.Decision(ctx, Decision{
		Limiter: l.name, Permits: n, Granted: err == nil && v.ok, Err: err, By: v.by, Wait: wait, Elapsed: clock.Mono() - began,
	})
	return v, err
}
