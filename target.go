package tokenbucket

import (
	"context"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/jonboulle/clockwork"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/weakmap"
)

// target is which bucket a coordinator is for. It is never changed.
type target struct {
	store   Store
	traits  traits // of the store
	trips   *trips // to it; nil: it is a MemoryStore
	name    string
	key     string // of the bucket, as stores know it
	clock   clockwork.Clock
	time    clock.Local   // the same, in microseconds
	timeout time.Duration // how long the store may take to answer
	health  *health       // of the store; nil: it never fails
	parts   *MemoryStore  // of processes' parts of buckets, while the store is away
	micros  func() int64  // time.Micros

	questions atomic.Pointer[question] // for the next batch; nil: another is to be made
}

// apply asks a store that takes one batch at a time. It implements [transport.Trips].Send.
func (t *target) apply(_ string, items []*item) {
	for _, i := range items {
		ctx, cancel := context.WithDeadline(context.Background(), i.Batch.Until)
		q := t.questions.Swap(nil)
		if q == nil {
			q = new(question)
		}
		err := q.ask(redisbucket.WithSession(ctx, i.Batch.Session), t.store, i.Batch)
		t.questions.Store(q)
		cancel()
		i.Answer(&i.Batch.Outcome, err)
	}
}

// panicked logs a panic of a store that is not of this module.
func (t *target) panicked(value any) { t.health.logger.Panicked(value) }

// route is the way to the bucket.
func (t *target) route() string {
	if t.traits.route == nil {
		return ""
	}
	return t.traits.route(t.key)
}

// inline tells that the store is a *MemoryStore: it decides at once, in the caller's goroutine.
func (t *target) inline() bool { return t.traits.memory != nil }

// now is the limiter's clock in microseconds, and never 0. Stores are told micros, which are others.
func (t *target) now() int64 { return t.time.Now() }

// moment is a time by both clocks.
type moment struct {
	local int64         // the limiter's, see now
	mono  time.Duration // the system's; of a store in memory, which never lets anybody wait, it may be 0
}

// moment reads the clocks, each once.
func (t *target) moment() moment {
	if t.inline() {
		return moment{local: t.now()}
	}
	at := mono()
	return moment{t.time.NowAt(at), at}
}

// label is the bucket's name as its users know it.
func (t *target) label() string { return label(t.name) }

// failure returns an error of the store as callers get it.
func (t *target) failure(err error) error { return storeError(t.label(), err) }

// mono is the system's monotonic clock.
func mono() time.Duration { return clock.Mono() }

// coordinators of this process by what they share: one lives as long as a limiter uses it.
var coordinators weakmap.Map[coordinatorKey, coordinator]

type coordinatorKey struct {
	store   Store
	name    string
	clock   clockwork.Clock
	timeout time.Duration
}

// coordinatorOf returns the one that all limiters of a store, a name, a clock and a timeout share.
func coordinatorOf(store Store, name string, clock clockwork.Clock, timeout time.Duration) *coordinator {
	traits := traitsOf(store)
	if traits.memory != nil {
		timeout = 0 // it never waits, so one bucket is one line whatever the timeouts
	}
	fresh := func() *coordinator { return newCoordinator(store, traits, name, clock, timeout) }
	if !reflect.ValueOf(store).Comparable() || !reflect.ValueOf(clock).Comparable() {
		return fresh() // it cannot be recognised again
	}
	return coordinators.Get(coordinatorKey{store, name, clock, timeout}, fresh)
}

func newCoordinator(store Store, traits traits, name string, by clockwork.Clock, timeout time.Duration) *coordinator {
	c := &coordinator{}
	c.store, c.traits, c.name, c.key, c.clock, c.time, c.timeout, c.parts = store, traits, name, keyName(name), by, clock.New(by), timeout, traits.parts
	c.micros, c.heard.stored = c.time.Micros, permit.MaxBatch // as far as is known
	c.waiters.begin(c.time.System())
	if c.inline() {
		return c
	}
	if c.trips = traits.trips; c.trips == nil {
		c.trips = &transport.Trips[*permit.Batch, *permit.Outcome]{Send: c.apply, Max: 1, Parallel: 1, Panicked: c.panicked}
	}
	if c.parts == nil {
		c.parts = partsOf(store)
	}
	c.health = healthOf(&traits)
	c.health.serves(timeout)
	return c
}

// parts holds the stores of processes' parts of buckets, for stores that bring none: one lives as long as a coordinator uses it.
var parts weakmap.Map[Store, MemoryStore]

// partsOf returns the one that all coordinators of a store share, whatever their timeouts.
func partsOf(store Store) *MemoryStore {
	if !reflect.ValueOf(store).Comparable() {
		return NewMemoryStore()
	}
	return parts.Get(store, NewMemoryStore)
}
