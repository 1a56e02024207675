package engine

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/logger"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Limiter is a limiter as the engine knows it: the configuration under which it asks, and its observer.
type Limiter struct {
	Coordinator *Coordinator
	Own         *permit.Terms // its own configuration
	Initial     float64       // see permit.Batch.Initial
	Transient   bool          // see permit.Batch.Transient
	Quota       bool          // it counts calls: what was granted under a quota that is lowered is given up
	Closed      atomic.Bool   // set by Close: the limiter takes no more leases
	Prefetch    int64         // how long a lease lasts, in microseconds; 0 for a limiter without leases
	Floor       float64       // see Floor.Earn; 0 for no floor
	MaxWaiters  int
	Logger      logger.Logger

	successor *Limiter    // see Coordinator.Supersede; nil while the limiter is in force. The coordinator's mu guards it
	recalled  error       // see Coordinator.Recall; nil while the limiter is in force. The coordinator's mu guards it
	Replaced  atomic.Bool // it has a successor, or was recalled for good, so each of its calls needs the coordinator's mu

	// OnTrip is called after each batch whose first request is the limiter's, without a lock. Nil if there is no observer.
	OnTrip func(Trip)
	// OnPrefetch is called when a lease has ended: how many permits it had, and how many of them were used. The coordinator's lock is held.
	// Nil if there is no observer.
	OnPrefetch func(permits, used int)
	// OnLost is called when permits that a group has taken cannot be given back. The group's lock is held. Nil if there is no observer.
	OnLost func(permits int)
}

// Trip describes a batch after its reply, or after its deadline.
type Trip struct {
	Requests          int
	Elapsed, LockWait time.Duration
	Err               error
}

// Effective returns the configuration in force, as far as this process knows.
func (l *Limiter) Effective() *permit.Terms {
	if known := l.Coordinator.View.known.Load(); known != nil && known.Version >= l.Own.Version {
		return known
	}
	return l.Own
}

// InForce returns the configuration under which a bucket may decide the limiter's requests without knowledge of the limiter's own: a newer
// one that is known, or the limiter's own.
func (l *Limiter) InForce() *permit.Terms {
	if known := l.Coordinator.View.known.Load(); known != nil && known.Version > l.Own.Version && known.WarmsUp == l.Own.WarmsUp {
		return known
	}
	return l.Own
}

// agrees reports whether requests of two limiters may share a batch.
func (l *Limiter) agrees(o *Limiter) bool {
	return l == o || l.Own.Same(o.Own) && l.Initial == o.Initial && l.Transient == o.Transient && l.Quota == o.Quota
}

// Outdates reports whether the process gives up permits that were granted under terms in an epoch, now that others are in force: the quota was lowered
// since, by a version or by a reset. Without either it was not: each limiter's configuration applies to its own calls.
func (l *Limiter) Outdates(granted *permit.Terms, in int64, inForce *permit.Terms, epoch int64) bool {
	newer := inForce.Version > 0 && inForce.Version >= granted.Version || !permit.Succeeds(epoch, in)
	return l.Quota && newer && inForce.Interval > granted.Interval
}

// prefetched calls the observer of a lease that has ended. A panic is logged, because the coordinator's lock is held.
func (l *Limiter) prefetched(permits, used int64) {
	if l.OnPrefetch != nil {
		defer l.Logger.Recovered()
		l.OnPrefetch(int(permits), int(used))
	}
}

// Lost calls the observer of permits that cannot be given back. A panic is logged, because a lock is held.
func (l *Limiter) Lost(permits int64) {
	if l.OnLost != nil {
		defer l.Logger.Recovered()
		l.OnLost(int(permits))
	}
}

func (l *Limiter) tooManyWaiters() error {
	return fmt.Errorf("%w: bucket %q: %d wait already", permit.ErrTooManyWaiters, l.Coordinator.Name, l.MaxWaiters)
}

func (l *Limiter) tooManyOfTenant(tenant string, n int) error {
	return fmt.Errorf("%w: bucket %q: %d of tenant %.40q wait already, as many as there is room for others", permit.ErrTooManyWaiters, l.Coordinator.Name, n, tenant)
}

// Overflow returns the error of a request for too many permits.
func (l *Limiter) Overflow(permits int64) error {
	return fmt.Errorf("%w: bucket %q: permits %d: want fewer: the debt would exceed 2^53 µs", permit.ErrInvalidPermits, l.Coordinator.Name, permits)
}
