package tokenbucket

import (
	"fmt"
	"sync/atomic"

	"github.com/go-tokenbucket/tokenbucket/internal/logger"
)

// limiter is what the engine knows of a RateLimiter: under which configuration it asks, and who is told what became of that.
type limiter struct {
	coordinator *coordinator // of its bucket
	own         *setting
	initial     float64
	transient   bool  // a full bucket need not be kept, see PermitBucket.renewed
	lease       int64 // microseconds; 0: none
	closed      atomic.Bool
	maxWaiters  int
	observer    *Observer // nil: nobody is told
	label       string    // what metrics count the bucket under; empty: its name
	logger      logger.Logger
}

// observedAs is what metrics count the bucket under.
func (l *limiter) observedAs() string {
	if l.label != "" {
		return l.label
	}
	return l.coordinator.label()
}

// effective is the configuration in force, as far as this process has heard.
func (l *limiter) effective() *setting {
	if known := l.coordinator.known.Load(); known != nil && known.Version >= l.own.Version {
		return known
	}
	return l.own
}

// inForce is the configuration under which a bucket may decide on the limiter's requests without being told of the limiter's own:
// a newer one that is known, or its own.
func (l *limiter) inForce() *setting {
	if known := l.coordinator.known.Load(); known != nil && known.Version > l.own.Version && known.Kind == l.own.Kind {
		return known
	}
	return l.own
}

// agrees tells whether requests of two limiters may travel in one batch.
func (l *limiter) agrees(o *limiter) bool {
	return l == o || l.own.config == o.own.config && l.initial == o.initial && l.transient == o.transient
}

// observeLease calls the observer about a lease that has ended. The bucket's lock is held, so a panic must not go on.
func (l *limiter) observeLease(permits, used int64) {
	if o := l.observer; o != nil && o.Lease != nil {
		defer l.logger.Recovered()
		o.Lease(l.observedAs(), int(permits), int(used))
	}
}

func (l *limiter) crowded() error {
	return fmt.Errorf("%w: bucket %q: %d wait already", ErrTooManyWaiters, l.coordinator.label(), l.maxWaiters)
}

func (l *limiter) overflow(permits int64) error {
	return fmt.Errorf("%w: bucket %q: permits %d: want fewer: the debt would exceed 2^53 µs", ErrInvalidPermits, l.coordinator.label(), permits)
}
