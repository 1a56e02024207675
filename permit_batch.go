package tokenbucket

import (
	"context"
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// place is what one granted request occupies: the account before and after it. A later refund needs all of it.
type place struct {
	// Epoch names the life of the bucket that the place belongs to.
	Epoch int64
	// Tag is the place's own number, unique within the epoch; Prev is the bucket's tail before it.
	Tag, Prev int64
	// Version of the configuration in force.
	Version int64

	before, after balance
}

// giveBack asks for the return of places: if Tag is still the bucket's tail, the account goes back to a balance.
type giveBack struct {
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

// giveBack asks for the return of what was granted at a time of the store, but for the first permits that were used.
func (p *place) giveBack(s *setting, used, granted int64) giveBack {
	to, tail := p.before, p.Prev
	if used > 0 {
		to, _ = s.after(s.Kind, to, used)
		tail = p.Tag
	}
	return giveBack{
		Epoch: p.Epoch, Tag: p.Tag, Tail: tail, Version: p.Version, ID: p.Tag, to: to, end: p.after.Next,
		spent: to.Stored - p.after.Stored, level: p.after.Stored, granted: granted,
	}
}

// op is what a [request] asks for.
type op uint8

// The operations. A batch without requests only reads. opTakeStored takes as many permits as are stored, up to Permits
// but no less than two. opHold holds the bucket back; places granted before move, in the same batch too.
const (
	opTake op = iota
	opGiveBack
	opSetRate
	opReset
	opTakeStored
	opHold
	opSetRateAndBurst
)

// request is one entry of a [batch]. [PermitBucket.apply] writes the answer into Grant.
type request struct {
	Op op
	// Permits and MaxWaitMicros belong to opTake: nothing is taken when the wait would be longer.
	Permits       int64
	MaxWaitMicros int64
	// Rate belongs to opSetRate and opSetRateAndBurst, MaxPermits to the latter.
	Rate       float64
	MaxPermits float64
	// HoldMicros belongs to opHold.
	HoldMicros int64
	// Back belongs to opGiveBack.
	Back giveBack

	Grant grant
}

// grant is the answer to one request.
type grant struct {
	// OK: granted, given back, or set. False is a refusal, and nothing was changed.
	OK bool
	// Overflow: the request's debt would leave the range of exact numbers.
	Overflow bool
	// WaitMicros until the permits are due; of a refusal, the wait that it would have taken.
	WaitMicros int64
	// Place of a granted opTake or opTakeStored.
	Place place
	// Permits that an opTakeStored was granted.
	Permits int64
}

// batch is what one process asks of one bucket in one atomic step.
type batch struct {
	// Name of the bucket.
	Name string
	// config of the limiter that asks.
	config config
	// Known is the newest configuration that the process has learned; a bucket that was lost is rebuilt from it.
	Known config
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
	Requests []request

	own    *setting   // config with what follows from it; may be nil
	until  time.Time  // when the last of its callers gives up: decided later, it must take nothing
	keep   bool       // the next batch may follow at once: a lock that others wait for may be kept for it
	cached storeCache // may be nil

	probe bool // only whether the store answers matters

	public  Batch   // the batch as stores know it
	out     outcome // of the last decision
	decided bool    // out is this batch's
}

// storeCache is what a store keeps in mind of a bucket between two batches of this process.
type storeCache interface {
	release()    // gives up a lock that was kept for the next batch
	kept() bool  // tells whether there is one
	waits() bool // tells whether the batch under way waits for a lock that others hold
}

// storeCacheKey is under which a context has what is remembered: a store that a wrapper gives a batch of its own finds it there.
type storeCacheKey struct{}

// maxBatch bounds the requests of a batch, and with it how long a script may occupy Redis.
const maxBatch = 1024

func (b *batch) size() int { return len(b.Requests) }

// release gives up a lock that was kept for a next batch.
func (b *batch) release() {
	if b.cached != nil {
		b.cached.release()
	}
}

// ask has a store decide the batch.
func (b *batch) ask(ctx context.Context, s Store) (*outcome, error) {
	if b.public.asked != b {
		b.public = Batch{Names: []string{keyName(b.Name)}, Decide: b.decide, asked: b}
	}
	b.out, b.decided = outcome{}, false
	err := s.Apply(ctx, &b.public)
	if err == nil && !b.decided {
		err = fmt.Errorf("tokenbucket: bucket %q: %T has not called Decide", label(b.Name), s)
	}
	return &b.out, err
}

// native is what the engine asks, if a batch came as the engine made it: a copy may have other names.
func (b *Batch) native() *batch {
	if b.asked == nil || b != &b.asked.public {
		return nil
	}
	return b.asked
}

// answered notes that a store of this module has decided by itself, and that the outcome is in place.
func (b *batch) answered(err error) error {
	b.decided = err == nil
	return err
}

// decide is its Decide.
func (b *batch) decide(now int64, states [][]byte) (next [][]byte, ttl time.Duration, err error) {
	b.decided = false
	if len(states) != 1 {
		return nil, 0, fmt.Errorf("tokenbucket: bucket %q: %d states: want one for each name", label(b.Name), len(states))
	}
	var bucket PermitBucket
	if err := bucket.parse(string(states[0]), b.own); err != nil {
		return nil, 0, corruptBucket(b.Name, err)
	}
	if err = bucket.apply(now, b, &b.out); err != nil {
		return nil, 0, err
	}
	b.decided = true
	if !b.out.Changed {
		return [][]byte{nil}, 0, nil
	}
	return [][]byte{bucket.appendText(nil)}, time.Duration(bucket.ttlMillis(b.out.NowMicros)) * time.Millisecond, nil
}

// server is the estimate of the store's clock.
func (b *batch) server() (r clock.Remote) {
	if !b.ServerRead.IsZero() {
		at := clock.Of(b.ServerRead)
		r.Heard(b.ServerMicros, at, at)
	}
	return r
}

// deadline is until by the store's clock: perhaps early, but never too late. 0: the clock is not known yet.
func (b *batch) deadline() int64 {
	server := b.server()
	if !server.Known() {
		return 0
	}
	return server.Earliest(clock.Of(b.until))
}

// outcome is what [PermitBucket.apply] decided, besides the Grants.
type outcome struct {
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
