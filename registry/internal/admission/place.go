package admission

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// lostAgain is the time between two log lines about lost places of a row.
const lostAgain = time.Minute

// place is a call's place among those in flight.
type place struct {
	slot   *Slot
	permit *semaphore.Permit // nil if the place was taken during an outage of the backend
	lost   func(error)
	left   atomic.Bool
}

func (p *place) leave() {
	if p.left.Swap(true) {
		return
	}
	var err error
	p.slot.leaving.Add(1)
	if p.permit != nil {
		released := p.slot.line.call()
		err = aside(p.permit.Release)
		released()
	}
	p.slot.inside.Add(-1)
	p.slot.leaving.Add(-1)
	if errors.Is(err, semaphore.ErrExpired) || errors.Is(err, semaphore.ErrLost) {
		p.lost(err)
	}
}

// enter returns a place, or nil if none is free. During an outage of the backend the process grants share places by itself; if share is 0,
// enter fails.
func (s *Slot) enter(ctx context.Context, b *bounds, share int) (*place, error) {
	n := s.inside.Add(1)
	if n > int64(b.most) {
		s.inside.Add(-1)
		return nil, nil
	}
	s.asking.Add(1)
	permit, err := s.acquire(ctx, b, 0)
	defer s.asking.Add(-1)
	switch {
	case err == nil:
		return &place{slot: s, permit: permit}, nil
	case errors.Is(err, semaphore.ErrRefused):
		err = nil
	case isOutage(ctx, err) && share > 0:
		if err = nil; n <= int64(share) {
			return &place{slot: s}, nil
		}
	}
	s.inside.Add(-1)
	return nil, err
}

// await is enter for a call that waits until a place is free, at most for the given time. While it waits, it is not inside. The place that
// it gets may be that of a call which still waits for the reply to its release, and calls that ask for a place have none yet. During an outage of the backend nothing can be waited for.
func (s *Slot) await(ctx context.Context, b *bounds, share int, wait time.Duration) (*place, error) {
	permit, err := s.acquire(ctx, b, wait)
	switch {
	case err == nil:
		p := &place{slot: s, permit: permit}
		if s.inside.Add(1)-s.leaving.Load()-s.asking.Load() > int64(b.most) { // more than the semaphore knows of: it has lost places, or is another one's, in memory
			p.lost = func(error) {}
			p.leave()
			return nil, nil
		}
		return p, nil
	case errors.Is(err, semaphore.ErrRefused):
		return nil, nil
	case isOutage(ctx, err) && share > 0:
		if s.inside.Add(1) <= int64(min(share, b.most)) {
			return &place{slot: s}, nil
		}
		s.inside.Add(-1)
		return nil, nil
	}
	return nil, err
}

// acquire asks the backend for a permit, and waits for one as long as given. During an outage it returns the outage's error, and only one
// call in a while asks.
func (s *Slot) acquire(ctx context.Context, b *bounds, wait time.Duration) (*semaphore.Permit, error) {
	if err := s.outage.known(); err != nil {
		return nil, err
	}
	permit, err := b.places.TryAcquire(ctx, 1, wait)
	if err != nil && isOutage(ctx, err) {
		s.outage.began(err)
	} else if ctx.Err() == nil {
		s.outage.ended()
	}
	return permit, err
}

// patience bounds how long a caller waits for the reply to a refund. The reply is nearly always there by then, so a call that follows at
// once finds the permit.
const patience = 20 * time.Millisecond

// aside calls giveBack with a context of its own, since the call's context may have ended.
func aside(giveBack func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return giveBack(ctx)
}
