package main

import (
	"context"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// ledger is a store that notes when each permit taken through it falls due. The verdict needs that to tell what is
// late from what is too much: a call cannot be released before its permit is due, only after.
type ledger struct {
	tokenbucket.Store
	origin time.Time

	mu      sync.Mutex
	permits []permit
	back    int // requests that gave permits back: calls that failed while their permits were under way
}

// permit is one permit's due time on two clocks.
type permit struct {
	store time.Duration // exactly, by the store's clock
	here  time.Duration // at the earliest, by ours: as if the store had decided the moment it was asked
}

// Apply implements tokenbucket.Store.
func (l *ledger) Apply(ctx context.Context, batch *tokenbucket.Batch) (tokenbucket.Outcome, error) {
	asked := time.Since(l.origin)
	out, err := l.Store.Apply(ctx, batch)
	if err != nil {
		return out, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range batch.Requests {
		r := &batch.Requests[i]
		if r.Op == tokenbucket.OpGiveBack {
			l.back++
		}
		if r.Op != tokenbucket.OpTake || !r.Grant.OK {
			continue
		}
		wait := time.Duration(r.Grant.WaitMicros) * time.Microsecond
		due := permit{store: time.Duration(out.NowMicros)*time.Microsecond + wait, here: asked + wait}
		for range r.Permits {
			l.permits = append(l.permits, due)
		}
	}
	return out, err
}
