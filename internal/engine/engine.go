// Package engine takes the calls of one process to a bucket, and the store's replies back to their callers.
//
// The naive design sends a request for each call. It makes a busy bucket as slow as its store, and it lets callers of one process overtake
// each other. Here calls queue in a Coordinator, one for each bucket. At most one batch is in flight; the calls that arrive meanwhile share
// the next batch. Without a batch in flight, a call is sent at once. Each batch is one atomic decision of the store, so sharing is exact.
//
// A Coordinator consists of parts, and each part keeps its own invariants:
//
//   - queue: the waiters, and the stretches of the bucket's time that the process owns for them (internal/schedule)
//   - outbox: what leaves with the next batch besides the waiters: refunds, operations, reservations
//   - inFlight: the batches on their way, and the late ones
//   - View: what the last replies showed of the bucket, its configuration and the store's clock
//   - leases: blocks of stored permits for callers who need no round trip
//   - listening: reads of a bucket without a recent reply, while anything depends on it
//   - alarm and deadlines: the two timers, one by the limiter's clock and one by the system's
//   - localShare: the bucket of this process for outages of the store
//
// The package knows neither the arithmetic nor a store. It computes balances by permit.Terms, has batches decided by a Store, and reaches
// everything else by the functions of an Env.
package engine

import (
	"context"
	"time"

	"github.com/jonboulle/clockwork"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Store decides batches. The outcome is in the batch. ctx has a deadline, unless the store is Immediate.
type Store interface {
	Decide(ctx context.Context, b *permit.Batch) error
}

// Trips carry batches of several buckets to a store in one round trip. An Item is one of these batches.
type (
	Trips = transport.Trips[*permit.Batch, *permit.Outcome]
	Item  = transport.Item[*permit.Batch, *permit.Outcome]
)

// Timing is the clock that the clock of a store keeps pace with.
type Timing uint8

// The timings. EitherClock is that of a store about which nothing is known.
const (
	EitherClock Timing = iota
	SystemClock
	LimiterClock
)

// String returns either, system or limiter.
func (t Timing) String() string {
	switch t {
	case SystemClock:
		return "system"
	case LimiterClock:
		return "limiter"
	}
	return "either"
}

// Config describes a bucket and its store to a Coordinator. It is never changed.
type Config struct {
	// Name is the bucket's name as users know it, and Key as stores do.
	Name, Key string
	Store     Store
	// Immediate: the store decides at once, in this process and without a failure. It needs no goroutine, no deadline and no monitor.
	Immediate bool
	Timing    Timing
	// Class of the callers.
	Class Class
	// Order in which the waiters are served.
	Order Order
	// Trips carry the batches of several buckets. If they are nil, each batch is decided by Store in a trip of its own.
	Trips *Trips
	// Clock is what callers sleep by.
	Clock clockwork.Clock
	// Timeout is how long the store may take to reply.
	Timeout time.Duration
	// Health monitors the store; nil if it is Immediate.
	Health *Health
	Env
}

// Env is what a Coordinator needs of its surroundings. Functions marked as optional may be nil.
type Env struct {
	// Away reports whether an error means that the store is unavailable, and NotAsked whether the store was not asked for a reason within
	// this process or its fleet: a lock, or the connection pool.
	Away, NotAsked func(error) bool
	// Failure returns an error of the store as callers of a bucket get it.
	Failure func(bucket string, err error) error
	// Probe asks whether the store replies for a key.
	Probe func(ctx context.Context, key string) error
	// Busy returns why the store cannot be asked for a key, if this process itself is the reason. Optional.
	Busy func(key string) error
	// Route returns the route of Trips for a key. Optional.
	Route func(key string) string
	// NewSession returns a session for the batches of a bucket. Optional.
	NewSession func() permit.Session
	// OfClass returns the coordinator of the same bucket for callers of another class. Peer returns it if it is in use, and nil otherwise; it
	// is needed for a class below the highest.
	OfClass, Peer func(Class) *Coordinator
	// LocalShare returns the coordinator of the bucket that decides in this process during an outage.
	LocalShare func() *Coordinator
}

// decideOne has the store decide each batch by itself. It implements [transport.Trips].Send.
func (c *Config) decideOne(_ string, items []*Item) {
	for _, i := range items {
		ctx, cancel := context.WithDeadline(context.Background(), i.Batch.Until)
		err := c.Store.Decide(ctx, i.Batch)
		cancel()
		i.Answer(&i.Batch.Outcome, err)
	}
}

// panicked logs a panic of a store.
func (c *Config) panicked(value any) { c.Health.Logger.Panicked(value) }

// route returns the route of the bucket's batches.
func (c *Config) route() string {
	if c.Route == nil {
		return ""
	}
	return c.Route(c.Key)
}

// failure returns an error of the store as callers get it.
func (c *Config) failure(err error) error { return c.Failure(c.Name, err) }

// unasked reports whether an error means that the store has not decided the batch: it is unavailable, or was not asked.
func (c *Config) unasked(err error) bool { return c.Away(err) || c.NotAsked(err) }

// clocks are the limiter's clock and the system's.
type clocks struct {
	clock.Local
	immediate bool // the system's clock is not read
}

// moment is a time by both clocks.
type moment struct {
	local int64         // the limiter's clock: Local.Now
	mono  time.Duration // the system's clock: clock.Mono; 0 for an Immediate store
}

// moment reads each clock once.
func (c *clocks) moment() moment {
	if c.immediate {
		return moment{local: c.Now()}
	}
	at := clock.Mono()
	return moment{c.NowAt(at), at}
}
