package tokenbuckettest

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// Store is a [tokenbucket.Store] that fails on command. Create it with [NewStore] or [Wrap]. It is safe for concurrent use; limiters that share
// a bucket must share the Store.
//
// A step is one call of Apply: one decision on one or more requests to a bucket. There may be fewer steps than calls: requests of several
// goroutines share a step, and for 100 ms a limiter refuses calls by the last reply, without a step. After a step has failed, the limiter
// sends a probe, which is a step without requests; if that fails too, an outage begins, the [tokenbucket.FailurePolicy] decides, and
// further probes follow, about every 100 ms. They are counted like other steps, and faults apply to them. So a single failed step
// ([Store.FailNext] with 1) is an error for its callers and no outage.
//
// Each bucket of a Store has outages of its own, as on a cluster.
type Store struct {
	inner tokenbucket.Store

	mu       sync.Mutex
	steps    int           // begun
	fault    Fault         // of the next steps
	left     int           // number of steps that the fault applies to; negative if it applies until Restore
	restored chan struct{} // closed by Restore; steps that hang wait for it
}

// NewStore returns a store that keeps its buckets in memory and has no fault.
func NewStore() *Store { return Wrap(tokenbucket.NewMemoryStore()) }

// Wrap returns a store that keeps its buckets in another one and has no fault.
func Wrap(inner tokenbucket.Store) *Store {
	return &Store{inner: inner, restored: make(chan struct{})}
}

// Fail applies a fault to every step that begins from now on, until Restore or another fault.
func (s *Store) Fail(f Fault) { s.set(f, -1) }

// FailNext applies a fault to the next n steps, instead of any earlier fault. Later steps have none.
func (s *Store) FailNext(n int, f Fault) { s.set(f, max(0, n)) }

// Restore ends the fault. Steps that hang go on, if their callers still wait.
func (s *Store) Restore() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault, s.left = Fault{}, 0
	close(s.restored)
	s.restored = make(chan struct{})
}

// Steps returns the number of steps that have begun, probes and failed steps included.
func (s *Store) Steps() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.steps
}

func (s *Store) set(f Fault, steps int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault, s.left = f, steps
}

// begin counts a step, and returns its fault and the channel that Restore closes.
func (s *Store) begin() (f Fault, restored <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.steps++
	if s.left == 0 {
		return Fault{}, s.restored
	}
	if s.left > 0 {
		s.left--
	}
	return s.fault, s.restored
}

// Apply implements [tokenbucket.Store]: it takes one step.
func (s *Store) Apply(ctx context.Context, b *tokenbucket.Batch) error {
	f, restored := s.begin()
	if err := f.pause(ctx, restored); err != nil {
		return err
	}
	if f.before != nil {
		return f.before
	}
	if err := s.inner.Apply(ctx, b); err != nil {
		return err
	}
	return f.after
}

// Fault is what happens to a step. The zero value is no fault.
type Fault struct {
	hangs  bool
	delay  time.Duration
	before error // instead of the step
	after  error // instead of the step's reply
}

// Outage is the fault of a store that cannot be reached: a step writes nothing and fails at once, with an error that matches
// [tokenbucket.ErrStoreUnavailable].
func Outage() Fault {
	return Error(fmt.Errorf("%w: tokenbuckettest: outage", tokenbucket.ErrStoreUnavailable))
}

// Hang is the fault of a store that does not reply. A step waits for Restore, and then takes place. If its context ends first, it writes
// nothing and fails with an error that matches [tokenbucket.ErrStoreTimeout]. Callers wait no longer than their limiter's store timeout
// ([tokenbucket.WithStoreTimeout]).
func Hang() Fault { return Fault{hangs: true} }

// Slow is the fault of a store whose steps take d longer. If a step's context ends first, the step writes nothing and fails with an error that
// matches [tokenbucket.ErrStoreTimeout].
func Slow(d time.Duration) Fault { return Fault{delay: d} }

// LoseReply is the fault of a connection that breaks after the store has written: a step takes place, and fails with an error that matches
// [tokenbucket.ErrStoreUnavailable]. Its permits are lost.
func LoseReply() Fault {
	return Fault{after: fmt.Errorf("%w: tokenbuckettest: the reply was lost", tokenbucket.ErrStoreUnavailable)}
}

// Error is the fault of a store that replies with an error: a step writes nothing and fails with err. The kind of err determines what callers
// get, see [tokenbucket.Store]. For example, [tokenbucket.ErrCorruptState] is an error under every policy.
func Error(err error) Fault { return Fault{before: err} }

// pause blocks for as long as the fault holds a step up.
func (f Fault) pause(ctx context.Context, restored <-chan struct{}) error {
	var over <-chan time.Time
	switch {
	case f.hangs:
	case f.delay > 0:
		timer := time.NewTimer(f.delay)
		defer timer.Stop()
		over = timer.C
		restored = nil
	default:
		return nil
	}
	select {
	case <-over:
	case <-restored:
	case <-ctx.Done():
		return fmt.Errorf("%w: tokenbuckettest: no reply: %w", tokenbucket.ErrStoreTimeout, ctx.Err())
	}
	return nil
}
