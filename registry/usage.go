package registry

import (
	"context"
	"sync"
	"time"
)

// Usage is how much is in use of what a row names besides its rate, in the whole fleet.
type Usage struct {
	// Window of the row; 0: none. WindowUsed of WindowLimit, which is in force, count in it.
	Window                  time.Duration
	WindowUsed, WindowLimit int
	// Inside are the calls of this process that are under way, Places those of the fleet, of Concurrent, which is in force; 0: any number.
	Inside, Places, Concurrent int
}

// Usage returns what is in use of the row of a name. It is false if the row names nothing but a rate, or has not been asked for yet. It
// asks where that is counted.
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

// Held is how long a row without a rate is held back yet, as far as this process knows (see Registry.Penalize); 0 of one that is off. Of one
// with a rate RateLimiter.State tells it, and this is 0.
func (r *Registry) Held(name string) time.Duration {
	e := r.limits.Load().rows[name]
	if e == nil || e.slot == nil || !e.limit.NoRate || e.limit.Disabled {
		return 0
	}
	return max(0, e.slot.pause.left())
}

// mostAsked is how many rows are asked for at a time: a few trips' worth.
const mostAsked = 256

// settle puts rows in force again where two loads in a row found something else to be: a limit that somebody has set, or one that is in
// force by its version though the table has another (see dispute). It also looks for the penalties of rows without a rate.
func (r *Registry) settle(ctx context.Context) {
	unknown := func(name string, err error) {
		r.log.Debug("registry: what is in force cannot be known", "bucket", name, "error", err)
	}
	var asking sync.WaitGroup
	defer asking.Wait()
	turns := make(chan struct{}, mostAsked)
	for name, e := range r.limits.Load().rows {
		if e.slot == nil {
			continue
		}
		if e.limit.NoRate && !e.limit.Disabled { // also of those that were not asked for yet: the first call must know
			turns <- struct{}{}
			asking.Go(func() { // those that are under way together share trips
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

func (r *Registry) settleBounds(ctx context.Context, name string, b *bounds) error {
	limit, most := b.limit, b.most // in force as far as this process has heard: what nobody here asks for is another's to settle
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
	r.log.Warn("registry: the window or the concurrency follows something else than the row; the row wins", "bucket", name,
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
