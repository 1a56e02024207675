package tokenbucket

import "context"

// Store keeps the buckets of a fleet and is the one seam between the arithmetic and where its state lives.
//
// Apply decides a batch as one atomic step: it reads the bucket named by the batch (a missing one is the zero
// PermitBucket), calls PermitBucket.Apply with the time of its own clock, and writes the result if the outcome says
// Changed, to live for at least PermitBucket.TTLMillis. The clock is read inside the critical section, and no other
// batch of any process may be decided on the same bucket between the read and the write. Grants are left in the
// requests. On an error nothing may have been granted for certain, and the caller treats the permits as lost. Apply is
// called by one goroutine per bucket and process, by many for different buckets, and ctx always has a deadline.
//
// The package storetest holds the conformance suite that every Store must pass.
type Store interface {
	Apply(ctx context.Context, batch *Batch) (Outcome, error)
}

// checked is a Store that can tell that it was made wrongly; its constructor returns no error.
type checked interface{ check() error }

// inline is a Store that never blocks: its batches need no goroutine of their own and no deadline.
type inline interface{ neverBlocks() }
