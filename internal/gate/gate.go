// Package gate is what httplimit and contrib/grpc do alike when they ask a gate about a call.
package gate

import (
	"context"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// Gate decides about calls by key.
type Gate interface {
	Reserve(ctx context.Context, key string) (*tokenbucket.Reservation, error)
}

// entrance is a Gate that may hold something for a call until it has ended.
type entrance interface {
	Admit(ctx context.Context, key string) (permit *tokenbucket.Reservation, leave func(), err error)
}

// Ask asks a gate. The place is nil if the call has nothing to give back when it ends: always if it does not begin.
func Ask(ctx context.Context, g Gate, key string) (permit *tokenbucket.Reservation, p *Place, err error) {
	e, ok := g.(entrance)
	if !ok {
		permit, err = g.Reserve(ctx, key)
		return permit, nil, err
	}
	permit, leave, err := e.Admit(ctx, key)
	switch {
	case leave == nil:
	case err == nil && permit != nil && permit.OK():
		p = &Place{leave: leave}
	default: // the call does not begin
		leave()
	}
	return permit, p, err
}

// Place is what a call holds until it has ended; nil: nothing.
type Place struct {
	leave func()
	once  sync.Once
}

// Leave gives it back. The second time it does nothing.
func (p *Place) Leave() {
	if p != nil {
		p.once.Do(p.leave)
	}
}

// Sooner is when a wait will have become as short as ctx lasts, for a call that was refused since ctx does not last so long. It is all of
// the wait if ctx lasts longer: then the gate has a deadline of its own.
func Sooner(ctx context.Context, wait time.Duration) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return wait
	}
	if left := max(0, time.Until(deadline)); left < wait {
		return wait - left
	}
	return wait
}
