package main

import (
	"context"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/seam"
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
func (l *ledger) Apply(ctx context.Context, batch *tokenbucket.Batch) error {
	asked := time.Since(l.origin)
	if err := l.Store.Apply(ctx, batch); err != nil {
		return err
	}
	decided := seam.DecidedIn(batch)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.back += decided.Refunds
	for _, t := range decided.Takes {
		if !t.Granted {
			continue
		}
		wait := time.Duration(t.WaitMicros) * time.Microsecond
		due := permit{store: time.Duration(decided.NowMicros)*time.Microsecond + wait, here: asked + wait}
		for range t.Permits {
			l.permits = append(l.permits, due)
		}
	}
	return nil
}
