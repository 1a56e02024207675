package telemetry

import (
	"context"
	"errors"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// Limiter returns the observer of a recorder of package tokenbucket.
func (r *Recorder) Limiter(o *Options) tokenbucket.Observer {
	return tokenbucket.Observer{
		Decision: func(ctx context.Context, d tokenbucket.Decision) { r.decision(ctx, o.labelOf(d.Bucket, d.Label), &d) },
		Prefetch: func(bucket string, permits, used int) { r.block(o.labelOf(bucket, ""), permits, used) },
		Trip: func(t tokenbucket.Trip) {
			r.trip(t.Requests, t.Elapsed, t.Err)
			r.lockWait(t.LockWait)
		},
		Health: r.health,
	}
}

// SlidingWindow returns the observer of a recorder of package slidingwindow.
func (r *Recorder) SlidingWindow(o *Options) slidingwindow.Observer {
	return slidingwindow.Observer{
		Decision: func(ctx context.Context, d slidingwindow.Decision) {
			r.decision(ctx, o.labelOf(d.Limiter, ""), &tokenbucket.Decision{
				Permits: d.Permits, Granted: d.Granted, Err: d.Err, By: deciderOf(d.By), Wait: d.Wait,
			})
		},
		Trip: func(t slidingwindow.Trip) {
			r.trip(t.Requests, t.Elapsed, t.Err)
			r.tripLink(t.Err)
		},
		Health: func(h slidingwindow.Health) { r.health(tokenbucket.Health{Down: h.Down, After: h.After}) },
	}
}

// deciderOf returns the decider of the root package that has the same name.
func deciderOf(by slidingwindow.Decider) tokenbucket.Decider {
	switch by {
	case slidingwindow.BySnapshot:
		return tokenbucket.BySnapshot
	case slidingwindow.ByPolicy:
		return tokenbucket.ByPolicy
	case slidingwindow.ByCheck:
		return tokenbucket.ByCheck
	}
	return tokenbucket.ByStore
}

// Semaphore returns the observer of a recorder of package semaphore. The wait of a call is the time that it took.
func (r *Recorder) Semaphore(o *Options) semaphore.Observer {
	return semaphore.Observer{
		Decision: func(ctx context.Context, d semaphore.Decision) {
			by := tokenbucket.ByStore
			if errors.Is(d.Err, semaphore.ErrInvalidConfig) || errors.Is(d.Err, semaphore.ErrInvalidPermits) {
				by = tokenbucket.ByCheck
			}
			r.decision(ctx, o.labelOf(d.Semaphore, ""), &tokenbucket.Decision{
				Permits: d.Permits, Granted: d.Granted, Err: d.Err, By: by, Wait: d.Elapsed,
			})
		},
		Lease: func(u semaphore.LeaseUse) { r.holding(o.labelOf(u.Semaphore, ""), EndOf(u.Err), u.Held) },
		Trip: func(t semaphore.Trip) {
			r.trip(t.Requests, t.Elapsed, t.Err)
			r.tripLink(t.Err)
		},
		Health: func(h semaphore.Health) { r.health(tokenbucket.Health{Down: h.Down, After: h.After}) },
	}
}
