package registry

import (
	"context"
	"sync"
	"time"
)

// Usage is the usage of a row's window and concurrency, by the whole fleet.
type Usage struct {
	// Window is the length of the row's window; 0 if it has none. WindowUsed calls count in it, of the WindowLimit in force.
	Window                  time.Duration
	WindowUsed, WindowLimit int
	// Inside is the number of this process' calls in flight, Places the fleet's, of the Concurrent in force; 0 if any number is allowed.
	Inside, Places, Concurrent int
}

// Usage asks the stores for the usage of the row with that name. ok is false if the row has a rate only, or has had no call yet.
func (r *Registry) Usage(ctx context.Context, name string) (u Usage, ok bool, err error) {
	e := r.limits.Load().rows[name]
	if e == nil || e.slot == nil {
		return u, false, nil
	}
	b := e.slot.inForce.Load()
	if b == nil {
		return u, false, nil
	}
	if b.window != nil {
		left, err := b.window.Remaining(ctx)
		if err != nil {
			return u, true, err
		}
		u.Window, u.WindowLimit = b.length, b.window.Limit()
		u.WindowUsed = max(0, u.WindowLimit-left)
	}
	if b.places != nil {
		s, err := b.places.Stats(ctx)
		if err != nil {
			return u, true, err
		}
		u.Inside, u.Places, u.Concurrent = int(e.slot.inside.Load()), s.Used, s.Permits
	}
	return u, true, nil
}

// Held returns the rest of the penalty of a row without a rate, as of the last load (see Registry.Penalize). It is 0 for a disabled row, and
// for a row with a rate, whose penalty is in RateLimiter.State.
func (r *Registry) Held(name string) time.Duration {
	e := r.limits.Load().rows[name]
	if e == nil || e.slot == nil || !e.limit.NoRate || e.limit.Disabled {
		return 0
	}
	return max(0, e.slot.pause.left())
}

// mostAsked bounds the rows whose penalties are read at a time, so that they share a few round trips.
const mostAsked = 256

// settle puts the windows and concurrencies of rows in force again if two consecutive loads found other limits in force: they were set by
// another program, or have a higher version than the row (see dispute). It also reads the penalties of rows without a rate.
func (r *Registry) settle(ctx context.Context) {
	unknown := func(name string, err error) {
		r.log.Debug("registry: the limits in force cannot be read", "bucket", name, "error", err)
	}
	var asking sync.WaitGroup
	defer asking.Wait()
	turns := make(chan struct{}, mostAsked)
	for name, e := range r.limits.Load().rows {
		if e.slot == nil {
			continue
		}
		if e.limit.NoRate && !e.limit.Disabled { // also of rows without a call yet, as a penalty must refuse the first call
			turns <- struct{}{}
			asking.Go(func() { // reads in flight together share round trips
				defer func() { <-turns }()
				if err := r.learnPause(ctx, e); err != nil {
					unknown(name, err)
				}
			})
		}
		b := e.slot.inForce.Load()
		if b == nil || b.version != e.version {
			continue
		}
		if err := r.settleBounds(ctx, name, b); err != nil {
			unknown(name, err)
			return
		}
	}
}

// settleBounds is settle for one row.
func (r *Registry) settleBounds(ctx context.Context, name string, b *bounds) error {
	limit, most := b.limit, b.most // by the last replies: a process that has no calls of the row leaves it to others
	if b.window != nil {
		limit = b.window.Limit()
	}
	if b.places != nil {
		most = b.places.Permits()
	}
	if limit == b.limit && most == b.most {
		b.disputed = 0
		return nil
	}
	if b.disputed++; b.disputed < 2 {
		return nil
	}
	r.log.Warn("registry: the window or the concurrency has differed from its row for two loads; the row is put in force again", "bucket", name,
		"window's limit", limit, "row's", b.limit, "concurrency", most, "row says", b.most)
	if limit != b.limit {
		if err := b.window.SetLimit(ctx, b.limit); err != nil {
			return err
		}
	}
	if most != b.most {
		return b.places.SetPermits(ctx, b.most)
	}
	return nil
}
