package telemetry

import (
	"context"
	"errors"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// LabelFunc returns the value of LabelBucket for the name of a bucket, a limiter of package slidingwindow or a semaphore. Names with the same
// value count together. It is called for every event, by many goroutines at once.
//
// nil selects the default: the name itself, or for a registry's buckets of single keys the name of their row (tokenbucket.Decision.Label);
// see [Named].
type LabelFunc func(name string) string

// value returns the label value of a bucket. row is the name of the registry row that the bucket belongs to, or "".
func (f LabelFunc) value(name, row string) string {
	switch {
	case f != nil:
		return f(name)
	case row != "":
		return Named(row)
	}
	return Named(name)
}

// Limiter returns an observer of limiters of package tokenbucket. It panics if the recorder is of another package.
func (r *Recorder) Limiter(label LabelFunc) tokenbucket.Observer {
	r.mustBe(ofLimiter)
	return tokenbucket.Observer{
		Decision: func(ctx context.Context, d tokenbucket.Decision) { r.decision(ctx, label.value(d.Bucket, d.Label), &d) },
		Prefetch: func(bucket string, permits, used int) { r.block(label.value(bucket, ""), permits, used) },
		Lost:     func(bucket string, permits int) { r.lost(label.value(bucket, ""), permits) },
		Trip: func(t tokenbucket.Trip) {
			r.trip(t.Requests, t.Elapsed, t.Err)
			r.lockWait(t.LockWait)
		},
		Health: r.health,
	}
}

// SlidingWindow returns an observer of limiters of package slidingwindow. It panics if the recorder is of another package.
func (r *Recorder) SlidingWindow(label LabelFunc) slidingwindow.Observer {
	r.mustBe(ofWindow)
	return slidingwindow.Observer{
		Decision: func(ctx context.Context, d slidingwindow.Decision) {
			r.decision(ctx, label.value(d.Limiter, ""), &tokenbucket.Decision{
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

// Semaphore returns an observer of semaphores. The wait of a call is the time that it took. It panics if the recorder is of another package.
func (r *Recorder) Semaphore(label LabelFunc) semaphore.Observer {
	r.mustBe(ofSemaphore)
	return semaphore.Observer{
		Decision: func(ctx context.Context, d semaphore.Decision) {
			by := tokenbucket.ByStore
			if errors.Is(d.Err, semaphore.ErrInvalidConfig) || errors.Is(d.Err, semaphore.ErrInvalidPermits) {
				by = tokenbucket.ByCheck
			}
			r.decision(ctx, label.value(d.Semaphore, ""), &tokenbucket.Decision{
				Permits: d.Permits, Granted: d.Granted, Err: d.Err, By: by, Wait: d.Elapsed,
			})
		},
		Lease: func(u semaphore.LeaseUse) { r.holding(label.value(u.Semaphore, ""), EndOf(u.Err), u.Held) },
		Trip: func(t semaphore.Trip) {
			r.trip(t.Requests, t.Elapsed, t.Err)
			r.tripLink(t.Err)
		},
		Health: func(h semaphore.Health) { r.health(tokenbucket.Health{Down: h.Down, After: h.After}) },
	}
}

// mustBe panics if the recorder is of another package.
func (r *Recorder) mustBe(set packages) {
	if r.pkg.set != set {
		panic("telemetry: the recorder is of package " + r.pkg.name + ", and has no observer of another")
	}
}
