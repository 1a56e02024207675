package permit

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// Op is the operation of a [Request].
type Op uint8

// The operations. A batch without requests only reads. TakeStored takes as many permits as are stored, up to Permits
// but no less than two. Hold holds the bucket back; places granted before move, in the same batch too. Settle charges Permits more than were
// taken before, whenever they fall due, or gives -Permits back. ResetQuota is a Reset that keeps the balance.
const (
	Take Op = iota
	GiveBack
	SetRate
	Reset
	TakeStored
	Hold
	SetRateAndBurst
	Settle
	ResetQuota
)

// Request is one entry of a [Batch]. The decision sets Grant.
type Request struct {
	Op Op
	// Permits and MaxWaitMicros belong to Take, which takes nothing if the wait would be longer. Permits also belongs to TakeStored and Settle.
	Permits       int64
	MaxWaitMicros int64
	// Rate belongs to SetRate and SetRateAndBurst, MaxPermits to the latter.
	Rate       float64
	MaxPermits float64
	// HoldMicros belongs to Hold.
	HoldMicros int64
	// Origin belongs to Settle: the grant of the permits that are settled.
	Origin Origin
	// Back belongs to GiveBack.
	Back Refund

	Grant Grant
}

// Grant is the result of one request.
type Grant struct {
	// OK reports whether the request was granted, given back, or set. False is a refusal, which changes nothing.
	OK bool
	// Overflow reports that the request's debt would leave the range of exact numbers.
	Overflow bool
	// WaitMicros is the time until the permits are due; for a refusal, the wait that the request would have taken.
	WaitMicros int64
	// Place of a granted Take or TakeStored.
	Place Place
	// Permits is the number of permits that a TakeStored was granted, or of a GiveBack that is OK those of Refund.Permits that have not gone back:
	// a part counts as a whole one.
	Permits int64
}

// Batch is the requests of one process to one bucket, decided in one atomic step.
type Batch struct {
	// Name is the name of the bucket for its users and in messages, Key its name in stores.
	Name, Key string
	// Terms are those of the limiter that sends the batch.
	Terms *Terms
	// Known is the newest configuration that the process has received, or nil. A bucket that was lost is rebuilt from it.
	Known *Terms
	// Initial is the stored permits that a new bursty bucket starts with.
	Initial float64
	// Transient reports that the limiter needs no version and no sum of penalties, so the state of a full bucket need not be kept.
	Transient bool
	// Epoch is a fresh random number from 1 to 2^53. If a new epoch begins, it is the epoch's name. The tags of the batch's grants are
	// derived from it, too.
	Epoch int64
	// ServerMicros is the store's clock in its last reply, which arrived at ServerRead. Both are zero before the first reply.
	ServerMicros int64
	ServerRead   time.Time
	// LocalMicros is the limiter's own clock, for stores that have none. It is called once per decision.
	LocalMicros func() int64
	// Requests are decided in order.
	Requests []Request
	// Until is when the last of its callers gives up. A batch decided later must take nothing.
	Until time.Time
	// Keep reports that the next batch may follow at once. A lock that others wait for may be kept for it.
	Keep bool
	// Session is the store's memory of the bucket; may be nil.
	Session Session
	// Probe reports that the batch only checks whether the store replies.
	Probe bool
	// Read asks for the bucket after the batch, in Outcome.State.
	Read bool
	// Settled reports, while the batch is decided, that its settlements have given permits back before: its message arrived twice.
	Settled bool

	// Outcome of the last decision.
	Outcome Outcome
}

// Session is a store's memory of a bucket between two batches of this process.
type Session interface {
	Release()    // releases a lock that was kept for the next batch
	Kept() bool  // reports whether a lock is kept
	Waits() bool // reports whether the batch in flight waits for a lock that others hold
}

// MaxBatch bounds the requests of a batch, and with it how long a script may occupy Redis.
const MaxBatch = 1024

// maxNonce leaves room for a place's number beside it.
const maxNonce = 1 << 40

// Nonce returns the random number in the tags of the batch's grants.
func (b *Batch) Nonce() int64 { return Nonce(b.Epoch) }

// Nonce returns the random number in the tags of a batch's grants, derived from the batch's Epoch.
func Nonce(epoch int64) int64 { return epoch % maxNonce }

// Size returns the number of requests.
func (b *Batch) Size() int { return len(b.Requests) }

// Release releases a lock that was kept for the next batch.
func (b *Batch) Release() {
	if b.Session != nil {
		b.Session.Release()
	}
}

// Server returns the estimate of the store's clock.
func (b *Batch) Server() (r clock.Remote) {
	if !b.ServerRead.IsZero() {
		at := clock.Of(b.ServerRead)
		r.Heard(b.ServerMicros, at, at)
	}
	return r
}

// Deadline returns Until by the store's clock. It may be early, but is never too late. It is 0 if the clock is not known yet.
func (b *Batch) Deadline() int64 {
	server := b.Server()
	if !server.Known() {
		return 0
	}
	return server.Earliest(clock.Of(b.Until))
}

// Outcome is the decision on a batch, besides the Grants.
type Outcome struct {
	// NowMicros is the time of the decision: ClockMicros, or the latest time that the bucket has seen if that is later.
	NowMicros int64
	// ClockMicros is the time of the store's clock.
	ClockMicros int64
	// Bucket is the bucket after the decision.
	Bucket Bucket
	// State is the complete bucket, a value of the package with the arithmetic; nil unless the batch has Read.
	State any
	// Changed reports that the state must be written.
	Changed bool
	// Conflict reports that the batch's configuration has the version of the one in force, but other contents.
	Conflict bool
	// LockWait is the time spent waiting for the bucket's lock.
	LockWait time.Duration
	// Local is the limiter's clock (clock.Local.Now) at a moment when the store's had reached NowMicros; 0 stands for the reply's arrival.
	Local int64
}

// Bucket is the part of a bucket's state that an outcome shows.
type Bucket struct {
	Balance
	Epoch int64
	// HeldUntilMicros and PausedMicros are as in the bucket's state.
	HeldUntilMicros int64
	PausedMicros    int64
	// Terms are those in force.
	Terms *Terms
}
