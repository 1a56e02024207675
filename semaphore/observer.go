package semaphore

import (
	"context"
	"errors"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// Observer receives the events of a semaphore, for metrics, traces and logs. Functions that are nil are not called, and a semaphore without
// an observer pays nothing for it. The functions are called by many goroutines at once, some of them with the semaphore's lock held. So
// they must return quickly, must not call the semaphore, and must not panic.
type Observer struct {
	// Decision is called once for every Acquire, TryAcquire, Do and Group.Add, in its caller's goroutine, just before it returns. For Do it
	// is called before Do calls its function.
	Decision func(context.Context, Decision)
	// Trip is called when a round trip to the store has ended or has exceeded its timeout. In memory there are none.
	Trip func(Trip)
	// Lease is called when a permit is no longer held by this process.
	Lease func(LeaseUse)
	// Health is called when an outage of the store begins or ends. In memory there are none.
	Health func(Health)
}

// Decision is the result of one call.
type Decision struct {
	// Semaphore and Permits of the call.
	Semaphore string
	Permits   int
	// Granted is false for a refusal and for a failure. Err is set only for a failure.
	Granted bool
	Err     error
	// Elapsed is the duration of the call, with the time it waited.
	Elapsed time.Duration
}

// Trip is one round trip of a batch to the store.
type Trip struct {
	Semaphore string
	// Requests in the batch: for permits, releases, renewals, and changes of the number of permits.
	Requests int
	// Elapsed until the reply or the timeout.
	Elapsed time.Duration
	// Err is the failure; nil if the store replied.
	Err error
}

// LeaseUse is the end of a permit.
type LeaseUse struct {
	Semaphore string
	Permits   int
	// Held is how long the permit was held.
	Held time.Duration
	// Err is nil if the permit was released. Otherwise it is why the permit was lost: ErrExpired, ErrLost or ErrClosed.
	Err error
}

// Health is the beginning or the end of an outage of the store.
type Health struct {
	Semaphore string
	// Down is true when an outage begins.
	Down bool
	// Err is the failure that began the outage.
	Err error
	// After is how long the outage lasted, when it ends.
	After time.Duration
}

// WithObserver sets the observer of the semaphore.
func WithObserver(o Observer) Option {
	return func(opts *options) { opts.observer = &o }
}

// acquire decides a call and reports it to the observer.
func (s *Semaphore) acquire(ctx context.Context, n int, wait time.Duration) (*Permit, error) {
	if s.observer == nil || s.observer.Decision == nil {
		return s.decide(ctx, n, wait)
	}
	began := clock.Mono()
	p, err := s.decide(ctx, n, wait)
	d := Decision{Semaphore: s.name, Permits: n, Granted: err == nil, Elapsed: clock.Mono() - began}
	if !errors.Is(err, ErrRefused) {
		d.Err = err
	}
	s.observer.Decision(ctx, d)
	return p, err
}

func (s *Semaphore) decide(ctx context.Context, n int, wait time.Duration) (*Permit, error) {
	if n < 1 {
		return nil, s.badPermits("permits wanted", n, "at least 1")
	}
	if !validLabel(s.label) {
		return nil, s.badLabel(s.label)
	}
	p, err := s.engine.acquire(ctx, n, wait, s.label)
	if p == nil && err == nil {
		return nil, ErrRefused
	}
	return p, err
}

// ended reports a permit that is no longer held. The engine's lock must be held.
func (o *Observer) ended(name string, p *Permit, why error) {
	if o == nil || o.Lease == nil {
		return
	}
	if why == ErrReleased {
		why = nil
	}
	o.Lease(LeaseUse{Semaphore: name, Permits: p.permits, Held: clock.Mono() - p.since, Err: why})
}
