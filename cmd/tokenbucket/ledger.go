package main

import (
	"context"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// ledger is a store that records the due time of each permit taken through it. With these the verdict distinguishes late calls from excess
// calls: a call is released after its permit is due, never before.
type ledger struct {
	tokenbucket.Store
	origin time.Time

	mu      sync.Mutex
	permits []permit
	back    int // refunds, of calls that failed while their request was in flight
}

// permit is one permit's due time on two clocks.
type permit struct {
	store time.Duration // exact, by the store's clock
	here  time.Duration // lower bound by the local clock, as if the store had decided at the moment of the request
}

// Apply implements tokenbucket.Store.
func (l *ledger) Apply(ctx context.Context, batch *tokenbucket.Batch) error {
	asked := time.Since(l.origin)
	if err := l.Store.Apply(ctx, batch); err != nil {
		return err
	}
	now, decisions, refunds := batch.Decided()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.back += refunds
	for _, d := range decisions {
		if !d.Granted {
			continue
		}
		due := permit{store: time.Duration(now)*time.Microsecond + d.Wait, here: asked + d.Wait}
		for range d.Permits {
			l.permits = append(l.permits, due)
		}
	}
	return nil
}
