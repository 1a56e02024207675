package permit

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// Op is what a [Request] asks for.
type Op uint8

// The operations. A batch without requests only reads. TakeStored takes as many permits as are stored, up to Permits
// but no less than two. Hold holds the bucket back; places granted before move, in the same batch too.
const (
	Take Op = iota
	GiveBack
	SetRate
	Reset
	TakeStored
	Hold
	SetRateAndBurst
)

// Request is one entry of a [Batch]. Whoever decides it writes the answer into Grant.
type Request struct {
	Op Op
	// Permits and MaxWaitMicros belong to Take: nothing is taken when the wait would be longer.
	Permits       int64
	MaxWaitMicros int64
	// Rate belongs to SetRate and SetRateAndBurst, MaxPermits to the latter.
	Rate       float64
	MaxPermits float64
	// HoldMicros belongs to Hold.
	HoldMicros int64
	// Back belongs to GiveBack.
	Back Refund

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
	// Place of a granted Take or TakeStored.
	Place Place
	// Permits that a TakeStored was granted.
	Permits int64
}

// Batch is what one process asks of one bucket in one atomic step.
type Batch struct {
	// Name of the bucket as its users know it, for messages, and Key as stores do.
	Name, Key string
	// Terms of the limiter that asks.
	Terms *Terms
	// Known is the newest configuration that the process has learned, nil if none; a bucket that was lost is rebuilt from it.
	Known *Terms
	// Initial is the stored permits that a new bursty bucket starts with.
	Initial float64
	// Transient: the limiter that asks needs no version and no sum of penalties, so the state of a full bucket need not be kept.
	Transient bool
	// Epoch is a fresh random number from 1 to 2^53, the epoch's name should a new one begin. The tags of the batch's grants are made of
	// it, too.
	Epoch int64
	// ServerMicros is the store's clock as of its last answer, which arrived at ServerRead; zero: none arrived yet.
	ServerMicros int64
	ServerRead   time.Time
	// LocalMicros is the limiter's own clock, for stores that have none. It is called once per decision.
	LocalMicros func() int64
	// Requests are decided in order.
	Requests []Request
	// Until is when the last of its callers gives up: decided later, the batch must take nothing.
	Until time.Time
	// Keep: the next batch may follow at once. A lock that others wait for may be kept for it.
	Keep bool
	// Session is what the store keeps of the bucket; may be nil.
	Session Session
	// Probe: only whether the store answers matters.
	Probe bool
	// Read: the bucket as it was left is wanted: Outcome.State.
	Read bool

	// Outcome of the last decision.
	Outcome Outcome
}

// Session is what a store keeps in mind of a bucket between two batches of this process.
type Session interface {
	Release()    // gives up a lock that was kept for the next batch
	Kept() bool  // tells whether there is one
	Waits() bool // tells whether the batch under way waits for a lock that others hold
}

// MaxBatch bounds the requests of a batch, and with it how long a script may occupy Redis.
const MaxBatch = 1024

// maxNonce leaves room for a place's number beside it.
const maxNonce = 1 << 40

// Nonce returns the random number in the tags of the batch's grants.
func (b *Batch) Nonce() int64 { return Nonce(b.Epoch) }

// Nonce returns the random number in the tags of grants, from that of a batch's epoch.
func Nonce(epoch int64) int64 { return epoch % maxNonce }

// Size returns the number of requests.
func (b *Batch) Size() int { return len(b.Requests) }

// Release gives up a lock that was kept for a next batch.
func (b *Batch) Release() {
	if b.Session != nil {
		b.Session.Release()
	}
}

// Server is the estimate of the store's clock.
func (b *Batch) Server() (r clock.Remote) {
	if !b.ServerRead.IsZero() {
		at := clock.Of(b.ServerRead)
		r.Heard(b.ServerMicros, at, at)
	}
	return r
}

// Deadline is Until by the store's clock: perhaps early, but never too late. 0: the clock is not known yet.
func (b *Batch) Deadline() int64 {
	server := b.Server()
	if !server.Known() {
		return 0
	}
	return server.Earliest(clock.Of(b.Until))
}

// Outcome is what was decided, besides the Grants.
type Outcome struct {
	// NowMicros is the time of the decision: ClockMicros, or what the bucket has seen before if that is later.
	NowMicros int64
	// ClockMicros is what the store's clock said.
	ClockMicros int64
	// Bucket is what the decision has left behind.
	Bucket Bucket
	// State is the whole of it, in a batch that reads: a value of the package that has the arithmetic; else nil.
	State any
	// Changed: the state must be written.
	Changed bool
	// Conflict: the asking configuration has the version of the one in force, but other contents.
	Conflict bool
	// LockWait is how long the bucket's lock was waited for.
	LockWait time.Duration
	// Local is the limiter's clock (clock.Local.Now) at a moment when the store's had reached NowMicros; 0: when the answer arrived.
	Local int64
}

// Bucket is what an outcome shows of its bucket.
type Bucket struct {
	Balance
	Epoch int64
	// HeldUntilMicros and PausedMicros are as in the bucket's state.
	HeldUntilMicros int64
	PausedMicros    int64
	// Terms in force.
	Terms *Terms
}
