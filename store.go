package tokenbucket

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/instances"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
)

// Store keeps the buckets of a fleet and is the one seam between the arithmetic and where its state lives.
//
// Apply decides a batch as one atomic step: it reads the bucket named by the batch (a missing one is the zero
// [PermitBucket]), calls [PermitBucket.Apply] with the time of its own clock, and writes the result if the outcome says
// Changed, to live for at least [PermitBucket.TTLMillis]. The clock is read inside the critical section, and no other
// batch of any process may be decided on the same bucket between the read and the write. Grants are left in the
// requests. On an error nothing may have been granted for certain, and the caller treats the permits as lost. Apply is
// called by one goroutine per bucket and process, by many for different buckets, and ctx always has a deadline. Two exceptions:
// the next batch does not wait for a call that has outlived its deadline, and after a failure a batch without requests looks
// whether the store answers.
//
// The package storetest holds the conformance suite that every Store must pass.
type Store interface {
	Apply(ctx context.Context, batch *Batch) (Outcome, error)
}

// described is a Store that the engine knows more of than Apply. The stores of this module are, and so is a Store that embeds
// one of them: it has their methods.
type described interface{ describe() traits }

// traits is what the engine knows of a store. The zero value: nothing, as of most stores.
type traits struct {
	// self is the store that describes itself. One that embeds it has an Apply of its own.
	self Store
	// err tells that the store was made wrongly; its constructor returns no error.
	err error
	// decides is what the store's clock keeps step with.
	decides timing
	// health and outages are shared by all lines of the store. nil: each has its own.
	health  *health
	outages *outage.Group
	// parts keeps processes' parts of buckets while the store is away; nil: it brings none.
	parts *MemoryStore
	// probe finds out whether the store could serve a bucket, before the context's deadline if it can. nil: Apply does, with a
	// batch that asks for nothing.
	probe func(ctx context.Context, name string) error
	// join makes this process one of those that use the store and are counted; nil: nobody counts.
	join func() *instances.Member
	// logger is for what join finds wrong; nil: nothing is.
	logger *logger

	// memory and trips are ways past Apply. memory never blocks, so its batches need no goroutine of their own and no deadline;
	// trips take batches of several buckets at once, on the route of each. nil: there is only Apply.
	memory *MemoryStore
	trips  *trips
	route  func(name string) string
}

// trips take batches to a store, and item is one of them on its way.
type (
	trips = batch.Trips[*Batch, Outcome]
	item  = batch.Item[*Batch, Outcome]
)

// timing is what a store's clock keeps step with: the system's, as every server's does, or the limiter's (WithClock).
type timing uint8

const (
	byEither timing = iota
	bySystemTime
	byLocalTime
)

// traitsOf returns what the engine knows of a store. Nothing goes past the Apply of a store that embeds another.
func traitsOf(s Store) traits {
	d, ok := s.(described)
	if !ok {
		return traits{}
	}
	t := d.describe()
	if t.self != s {
		t.memory, t.trips, t.route = nil, nil, nil
	}
	return t
}

// Place is what one granted request occupies: the account before and after it. A later refund needs all of it.
type Place struct {
	// Epoch names the life of the bucket that the place belongs to.
	Epoch int64
	// Tag is the place's own number, unique within the epoch; Prev is the bucket's tail before it.
	Tag, Prev int64
	// Version of the configuration in force.
	Version int64

	before, after balance
}

// GiveBack asks for the return of places: if Tag is still the bucket's tail, the account goes back to a balance.
type GiveBack struct {
	// Epoch of the places. Nothing is given back to a bucket that has forgotten.
	Epoch int64
	// Tag must still be the bucket's tail for time to go back; Tail is the tail afterwards.
	Tag, Tail int64
	// Version of the configuration that the places were granted under; stored permits of another are not comparable.
	Version int64
	// ID is the places' own number, under which their stored permits come back at most once.
	ID int64

	to      balance // the account as it shall be
	end     int64   // the end of the places' time
	spent   float64 // stored permits in the places
	level   float64 // stored permits left after the places were granted
	granted int64   // the time of that
}

// Op is what a [Request] asks for.
type Op uint8

// The operations. A batch without requests only reads. OpTakeStored takes as many permits as are stored, up to Permits
// but no less than two. OpHold holds the bucket back; places granted before move, in the same batch too.
const (
	OpTake Op = iota
	OpGiveBack
	OpSetRate
	OpReset
	OpTakeStored
	OpHold
	OpSetRateAndBurst
)

// Request is one entry of a [Batch]. [PermitBucket.Apply] writes the answer into Grant.
type Request struct {
	Op Op
	// Permits and MaxWaitMicros belong to OpTake: nothing is taken when the wait would be longer.
	Permits       int64
	MaxWaitMicros int64
	// Rate belongs to OpSetRate and OpSetRateAndBurst, MaxPermits to the latter.
	Rate       float64
	MaxPermits float64
	// HoldMicros belongs to OpHold.
	HoldMicros int64
	// Back belongs to OpGiveBack.
	Back GiveBack

	Grant Grant
}

// Grant is the answer to one request.
type Grant struct {
	// OK: granted, given back, or set. False is a refusal, and nothing was changed.
	OK bool
	// Overflow: the request's debt would leave the range of exact numbers.
	Overflow bool
	// WaitMicros until the permits are due; of a refusal, the wait that it would have taken.
	WaitMicros int64
	// Place of a granted OpTake or OpTakeStored.
	Place Place
	// Permits that an OpTakeStored was granted.
	Permits int64
}

// Batch is what one process asks of one bucket in one atomic step.
type Batch struct {
	// Name of the bucket.
	Name string
	// Config of the limiter that asks.
	Config Config
	// Known is the newest configuration that the process has learned; a bucket that was lost is rebuilt from it.
	Known Config
	// Initial is the stored permits that a new bursty bucket starts with.
	Initial float64
	// Epoch is a fresh random number from 1 to 2^53, the epoch's name should a new one begin.
	Epoch int64
	// ServerMicros is the store's clock as of its last answer, which arrived at ServerRead; zero: none arrived yet.
	ServerMicros int64
	ServerRead   time.Time
	// LocalMicros is the limiter's own clock, for stores that have none. It is called once per decision.
	LocalMicros func() int64
	// Requests are decided in order.
	Requests []Request

	own    *setting     // Config with what follows from it; may be nil
	until  time.Time    // when the last of its callers gives up: decided later, it must take nothing
	keep   bool         // the next batch may follow at once: a lock that others wait for may be kept for it
	cached *cachedState // what this process remembers of the bucket, for the Redis stores; may be nil

	probe bool // only whether the store answers matters
}

// server is the estimate of the store's clock.
func (b *Batch) server() (r clock.Remote) {
	if !b.ServerRead.IsZero() {
		at := clock.Of(b.ServerRead)
		r.Heard(b.ServerMicros, at, at)
	}
	return r
}

// maxBatch bounds the requests of a batch, and with it how long a script may occupy Redis.
const maxBatch = 1024

func (b *Batch) size() int { return len(b.Requests) }

// deadline is until by the store's clock: perhaps early, but never too late. 0: the clock is not known yet.
func (b *Batch) deadline() int64 {
	server := b.server()
	if !server.Known() {
		return 0
	}
	return server.Earliest(clock.Of(b.until))
}

// Outcome is what [PermitBucket.Apply] decided, besides the Grants.
type Outcome struct {
	// NowMicros is the time of the decision: ClockMicros, or what the bucket has seen before if that is later.
	NowMicros int64
	// ClockMicros is what the store's clock said.
	ClockMicros int64
	// Bucket is the state afterwards.
	Bucket PermitBucket
	// Changed: the state must be written.
	Changed bool
	// Conflict: the asking configuration has the version of the one in force, but other contents.
	Conflict bool

	// lockWait is how long the bucket's lock was waited for.
	lockWait time.Duration
	// local is the limiter's clock (clock.Local.Now) at a moment when the store's had reached NowMicros; 0: when the answer arrived.
	local int64
}
