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
	of, ok, err := e.slot.Usage(ctx)
	return Usage(of), ok, err
}

// Held returns the rest of the penalty of a row without a rate, as of the last load (see Registry.Penalize). It is 0 for a disabled row, and
// for a row with a rate, whose penalty is in RateLimiter.State.
func (r *Registry) Held(name string) time.Duration {
	e := r.limits.Load().rows[name]
	if e == nil || e.slot == nil || !e.limit.NoRate || e.limit.Disabled {
		return 0
	}
	return max(0, e.slot.Pause.Left())
}

// mostAsked bounds the rows whose penalties are read at a time, so that they share a few round trips.
const mostAsked = 256

// learnPauses reads the penalties of rows without a rate.
func (r *Registry) learnPauses(ctx context.Context) {
	var asking sync.WaitGroup
	defer asking.Wait()
	turns := make(chan struct{}, mostAsked)
	for name, e := range r.limits.Load().rows {
		if e.slot != nil && e.limit.NoRate && !e.limit.Disabled { // also of rows without a call yet, as a penalty must refuse the first call
			turns <- struct{}{}
			asking.Go(func() { // reads in flight together share round trips
				defer func() { <-turns }()
				if err := e.slot.Pause.Learn(ctx, r.keeperOf(e)); err != nil {
					r.log.Debug("registry: a penalty cannot be read", "bucket", name, "error", err)
				}
			})
		}
	}
}
