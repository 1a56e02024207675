package slidingwindow

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/waiting"
)

// Observer receives the events of a limiter, for metrics, traces and logs. Functions that are nil are not called, and a limiter without an
// observer pays nothing for it. The functions are called by many goroutines at once, without a lock of the limiter: they should return
// quickly, and must not panic. contrib/prometheus and contrib/otel have one each.
type Observer struct {
	// Decision is called once for every Allow, AllowN, Take, Wait and WaitN, in its caller's goroutine, just before it returns.
	Decision func(context.Context, Decision)
	// Trip is called when a round trip to Redis has ended or has exceeded its timeout.
	Trip func(Trip)
	// Health is called when an outage of Redis begins or ends for this limiter.
	Health func(Health)
}

// Decision is the result of one call.
type Decision struct {
	// Limiter and Permits of the call.
	Limiter string
	Permits int
	// Granted is false for a refusal and for a failure. Err is set only for a failure.
	Granted bool
	Err     error
	// By is where it was decided.
	By Decider
	// Wait of a Wait or WaitN is how long it took until the permits were admitted. Of a refusal it is the least time until they could be
	// (Limiter.RetryAfter). It is 0 otherwise.
	Wait time.Duration
	// Elapsed is the duration of the call.
	Elapsed time.Duration
}

// Decider is where a decision was made.
type Decider uint8

const (
	// ByStore: where the window is counted, in Redis or in this process.
	ByStore Decider = iota
	// BySnapshot: refused by the last reply, without a round trip.
	BySnapshot
	// ByPolicy: by FailOpen or a LocalShare, during an outage of Redis. A failure under FailClosed is ByStore.
	ByPolicy
	// ByCheck: the argument was invalid, ctx had ended before the call, or too many calls wait.
	ByCheck
)

var deciders = [...]string{"store", "snapshot", "policy", "check"}

// String returns store, snapshot, policy or check.
func (d Decider) String() string {
	if int(d) < len(deciders) {
		return deciders[d]
	}
	return "unknown"
}

// Trip is one round trip of a batch to Redis.
type Trip struct {
	// Limiter of the batch.
	Limiter string
	// Requests in the batch; 0 if it only reported permits or was a probe.
	Requests int
	// Elapsed until the reply or the timeout.
	Elapsed time.Duration
	// Err is the failure; nil if Redis replied.
	Err error
}

// Health is the beginning or the end of an outage of Redis.
type Health struct {
	// Limiter that noticed it.
	Limiter string
	// Down is true when an outage of Redis begins, false when it ends.
	Down bool
	// Policy decides requests during the outage.
	Policy FailurePolicy
	// Err is the failure that began the outage.
	Err error
	// After is how long the outage lasted, when it ends.
	After time.Duration
}

// WithObserver sets the observer of the limiter.
func WithObserver(o Observer) Option { return func(op *options) { op.observer = &o } }

// noteTrip reports the end of a round trip to the observer.
func (m *machine) noteTrip(b *flight, requests int, err error, moment waiting.Moment, out *waiting.Out) {
	if m.observer != nil && m.observer.Trip != nil {
		trip := Trip{string(m.name), requests, moment.Mono - b.began, err}
		out.Note(func() { m.observer.Trip(trip) })
	}
}

// noteHealth reports the beginning or the end of an outage to the observer.
func (m *machine) noteHealth(h Health, out *waiting.Out) {
	if m.observer != nil && m.observer.Health != nil {
		h.Limiter, h.Policy = string(m.name), m.policy.failure
		out.Note(func() { m.observer.Health(h) })
	}
}

// observed makes a decision and reports it to the observer.
func (l *Limiter) observed(ctx context.Context, n int, decide func(context.Context, int) (verdict, time.Duration, error)) (verdict, error) {
	if l.machine.observer == nil || l.machine.observer.Decision == nil {
		v, _, err := decide(ctx, n)
		return v, err
	}
	began := clock.Mono()
	v, wait, err := decide(ctx, n)
	if err == nil && !v.ok {
		wait = l.RetryAfter(n)
	}
	l.machine.observer.Decision(ctx, Decision{
		Limiter: l.Name(), Permits: n, Granted: err == nil && v.ok, Err: err, By: v.by, Wait: wait, Elapsed: clock.Mono() - began,
	})
	return v, err
}
