package semaphore

import (
	"context"
	"errors"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// Observer is told what a semaphore does, for metrics, traces and logs. Functions that are nil are not called, and an observer that is
// not set costs nothing. They are called by many goroutines at once, some of them under the semaphore's lock: they must return
// quickly, must not call the semaphore, and must not panic.
type Observer struct {
	// Decision is called once for every Acquire, TryAcquire, Do and Group.Add, by its caller's goroutine, just before it returns; of
	// Do before it calls its function.
	Decision func(context.Context, Decision)
	// Trip is called when the backend has answered a batch of requests, or was given up on. In memory there are none.
	Trip func(Trip)
	// Lease is called when a permit is no longer held by this process.
	Lease func(LeaseUse)
	// Health is called when this process notices that the backend is away or back. One in memory never is.
	Health func(Health)
}

// Decision is the answer to one call.
type Decision struct {
	// Semaphore and Permits of the call.
	Semaphore string
	Permits   int
	// Granted is false for a refusal and for a failure; Err is set only for a failure.
	Granted bool
	Err     error
	// Elapsed is the time that the call took, waiting included.
	Elapsed time.Duration
}

// Trip is one batch on its way to the backend and back.
type Trip struct {
	Semaphore string
	// Requests that shared it: for permits, releases, renewals, and changes of how many permits there are.
	Requests int
	// Elapsed until its answer, or until it was given up.
	Elapsed time.Duration
	// Err of the backend; nil: answered.
	Err error
}

// LeaseUse is a permit that has ended.
type LeaseUse struct {
	Semaphore string
	Permits   int
	// Held is for how long it was.
	Held time.Duration
	// Err is nil if it was released, else why it was lost: ErrExpired, ErrLost, ErrClosed.
	Err error
}

// Health is what a process thinks of its backend.
type Health struct {
	Semaphore string
	// Down: the backend does not answer.
	Down bool
	// Err is the failure that was noticed.
	Err error
	// After is, when the backend is back, how long it was away.
	After time.Duration
}

// WithObserver tells an observer what the semaphore does.
func WithObserver(o Observer) Option {
	return func(opts *options) { opts.observer = &o }
}

// acquire asks the engine for permits, and tells the observer what came of it.
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
		return nil, s.bad("permits wanted", n, "at least 1")
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

// ended tells of a permit that is no longer held. The engine's lock is held.
func (o *Observer) ended(name string, p *Permit, why error) {
	if o == nil || o.Lease == nil {
		return
	}
	if why == ErrReleased {
		why = nil
	}
	o.Lease(LeaseUse{Semaphore: name, Permits: p.permits, Held: clock.Mono() - p.since, Err: why})
}
