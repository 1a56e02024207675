package tokenbucket

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// The seam between the arithmetic and the storage of its state consists of names and bytes.
//
// It must hold that the batches of all processes on a bucket are decided one at a time, each on the state that the one before it left, at a
// time of one clock. The result is written completely or not at all.
//
// The obvious seam hands a store the requests, and the store calls the arithmetic. It was tried: authors of stores met ten types of the
// engine and five rules for their use, and a wrapper that rebuilt a batch lost half of it. So a Batch is opaque. A store reads, calls
// Decide, and writes. The requests of the batch and their results stay inside.
//
// The stores of this module do more: memory keeps states as values, and Redis decides in a script or writes a result computed beforehand.
// They recognise a Batch of the engine, also if a wrapper passes it on unchanged (see Batch.native).

// Store keeps the states of buckets: bytes under a name. It is the one seam between the arithmetic and the storage of its state.
//
// Apply is one atomic step. It reads the states of all b.Names, calls b.Decide once, and writes the result, completely or not at all. No
// other Apply, of whatever process, may write one of these names between the read and the write. The store's clock is read within the step,
// so that it does not run backwards from one step to the next, and it is the same for all processes.
//
//   - A name that was never written, or whose time to live has passed, has a nil state. Losing a state costs the bucket's debt, and never
//     fills the bucket.
//   - If Decide fails, nothing is written, and Apply returns the error, which may be wrapped.
//   - Decide may be called again if it is certain that no earlier result was written: in a transaction that is retried, for example. It
//     then decides again, and the last call counts. It must not be called after Apply has returned.
//   - Nil means that everything is written. An error means that perhaps nothing is: the permits are lost, since the batch is never sent
//     again. If the storage cannot be reached or does not reply, return an error that wraps [ErrStoreUnavailable] or [ErrStoreTimeout].
//     For such an error, a network error or a [context.DeadlineExceeded], the [FailurePolicy] decides. Any other error means that the
//     store needs a repair; callers receive it in an [ErrStoreUnusable].
//   - ctx always has a deadline. No caller waits for the step after that, so a store that can detect the end of the context writes
//     nothing then. Permits that were taken without a waiting caller are given back by a later step.
//   - For one bucket, a process calls Apply from one goroutine at a time. There is one exception: a call that has outlived its deadline
//     may still run. For several buckets, many goroutines call it at once.
//   - After a failure, a batch that reads a bucket and writes nothing checks whether the store replies. So Apply must read even if there
//     is nothing to write.
//
// A store that wraps another passes the batch on unchanged. The package storetest has the suite that every Store must pass, and an example.
type Store interface {
	Apply(ctx context.Context, b *Batch) error
}

// Batch is the input of one step of a [Store]: a decision on one bucket, or on several together. A store that changes names or bytes for
// another store creates a Batch of its own.
type Batch struct {
	// Names are the buckets' names, each once: 1 to 1545 bytes of printable UTF-8 without spaces and braces. They must not be changed.
	Names []string
	// Decide takes the time of the store's clock, in microseconds, and the states in the order of the names, nil for a missing state. It
	// returns the new state of each name, or nil to write nothing, and the least time that the states must be kept. The engine's states are
	// readable text of a few hundred bytes. Decide does not retain the states, and does not block.
	Decide func(nowMicros int64, states [][]byte) (next [][]byte, ttl time.Duration, err error)

	asked    *question // the engine's batch of one bucket; nil if only names and Decide are known
	together *inquiry  // the batches of a group; nil if it is none
}

// maxName bounds the bytes of a bucket's name.
const maxName = 512

// keyName returns a bucket's name as stores know it. No two buckets have the same, and no shadow has that of another bucket.
func keyName(name string) string {
	public, shadow := strings.CutPrefix(name, shadowMark)
	slot, public := cutSlot(public)
	key := script.EncodeName(public)
	if shadow {
		key = "%shadow:" + key // no encoded name has a % like this one
	}
	if slot != "" {
		key = slotName(slot, key)
	}
	return key
}

// bucketStore decides the batches of one bucket by a Store. It implements [engine.Store].
type bucketStore struct {
	store Store
	spare atomic.Pointer[question] // for the next batch; nil while it is in use
}

// Decide implements [engine.Store].
func (s *bucketStore) Decide(ctx context.Context, b *permit.Batch) error {
	q := s.spare.Swap(nil)
	if q == nil {
		q = new(question)
	}
	err := q.ask(redisbucket.WithSession(ctx, b.Session), s.store, b)
	s.spare.Store(q)
	return err
}

// question carries the batches of one bucket through a [Store], one at a time.
type question struct {
	*permit.Batch
	public  Batch // the batch as stores know it
	decided bool  // the outcome is that of this batch
}

// askStore decides a batch by a store.
func askStore(ctx context.Context, s Store, b *permit.Batch) error {
	return new(question).ask(ctx, s, b)
}

func (q *question) ask(ctx context.Context, s Store, b *permit.Batch) error {
	if q.public.asked != q {
		q.public = Batch{Names: []string{b.Key}, Decide: q.decide, asked: q}
	}
	q.Batch, q.decided = b, false
	b.Outcome = permit.Outcome{}
	err := s.Apply(ctx, &q.public)
	if err == nil && !q.decided {
		err = fmt.Errorf("tokenbucket: bucket %q: %T has not called Decide", b.Name, s)
	}
	return err
}

// native returns the question behind a batch that came as the engine made it, or nil: a copy may have other names.
func (b *Batch) native() *question {
	if b.asked == nil || b != &b.asked.public {
		return nil
	}
	return b.asked
}

// answered records that a store of this module has decided the batch itself, and that the outcome is in place.
func (q *question) answered(err error) error {
	q.decided = err == nil
	return err
}

// decide is the Decide function of the public batch.
func (q *question) decide(now int64, states [][]byte) (next [][]byte, ttl time.Duration, err error) {
	b := q.Batch
	q.decided = false
	if len(states) != 1 {
		return nil, 0, fmt.Errorf("tokenbucket: bucket %q: %d states: want one for each name", b.Name, len(states))
	}
	var bucket PermitBucket
	if err := bucket.parse(string(states[0]), b.Terms); err != nil {
		return nil, 0, corruptBucket(b.Name, err)
	}
	if err = bucket.apply(now, b, &b.Outcome); err != nil {
		return nil, 0, err
	}
	q.decided = true
	if !b.Outcome.Changed {
		return [][]byte{nil}, 0, nil
	}
	millis, _ := bucket.ttlMillis(b.Outcome.NowMicros, bucket.renewed(b))
	return [][]byte{bucket.appendText(nil)}, time.Duration(millis) * time.Millisecond, nil
}
