package tokenbucket

import (
	"fmt"
	"sync/atomic"
)

// limiter is what the engine knows of a RateLimiter: under which configuration it asks, and who is told what became of that.
type limiter struct {
	coordinator *coordinator // of its bucket
	own         setting
	initial     float64
	lease       int64 // microseconds; 0: none
	closed      atomic.Bool
	maxWaiters  int
	observer    *Observer // nil: nobody is told
	logger      logger
}

// effective is the configuration in force, as far as this process has heard.
func (l *limiter) effective() *setting {
	if known := l.coordinator.known.Load(); known != nil && known.Version >= l.own.Version {
		return known
	}
	return &l.own
}

// inForce is the configuration under which a bucket may decide on the limiter's requests without being told of the limiter's own:
// a newer one that is known, or its own.
func (l *limiter) inForce() *config {
	if known := l.coordinator.known.Load(); known != nil && known.Version > l.own.Version && known.Kind == l.own.Kind {
		return &known.config
	}
	return &l.own.config
}

// agrees tells whether requests of two limiters may travel in one batch.
func (l *limiter) agrees(o *limiter) bool {
	return l == o || l.own.config == o.own.config && l.initial == o.initial
}

func (l *limiter) crowded() error {
	return fmt.Errorf("%w: bucket %q: %d wait already", ErrTooManyWaiters, l.coordinator.label(), l.maxWaiters)
}

func (l *limiter) overflow(permits int64) error {
	return fmt.Errorf("%w: bucket %q: permits %d: want fewer: the debt would exceed 2^53 µs", ErrInvalidPermits, l.coordinator.label(), permits)
}
