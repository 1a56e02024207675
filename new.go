package tokenbucket

import (
	"time"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket/internal/outage"
)

// NewSmoothBursty returns a limiter that hands out permitsPerSecond permits a second, and after a pause at most
// max permits at once ([WithMaxPermits]; default one second's worth, at least 1). By default a caller waits for its own
// permits ([PayNow]), and a bucket that nobody has used yet holds one permit ([WithInitialPermits]).
//
// All limiters of one name on one store share one bucket. permitsPerSecond is a number from 1e-9, a permit in 32 years, to
// 2^53. Errors match [ErrInvalidConfig] and name the field and the value; no store is asked.
func NewSmoothBursty(name string, permitsPerSecond float64, opts ...Option) (*RateLimiter, error) {
	return newLimiter(name, config{Kind: bursty, Payment: PayNow, Rate: permitsPerSecond}, opts)
}

// NewSmoothWarmingUp returns a limiter for upstreams that are slow when cold (empty caches, no connections): after a
// pause it begins at 1/coldFactor of the rate ([WithColdFactor], default 3) and reaches permitsPerSecond after
// warmupPeriod of full demand; left idle for warmupPeriod, it is cold again. By default a caller waits for the debt
// that it finds ([PayLater]), so a cold limiter's first call passes at once.
//
// warmupPeriod counts in whole microseconds, at least one. The cold interval, coldFactor / permitsPerSecond, is at most 1e9 s.
// Otherwise as [NewSmoothBursty].
func NewSmoothWarmingUp(name string, permitsPerSecond float64, warmupPeriod time.Duration, opts ...Option) (*RateLimiter, error) {
	return newLimiter(name, config{
		Kind: warmingUp, Payment: PayLater, Rate: permitsPerSecond, WarmupMicros: warmupPeriod.Microseconds(), ColdFactor: 3,
	}, opts)
}

// realClock is shared, so that all limiters without a clock of their own are recognised as having the same.
var realClock = clockwork.NewRealClock()

func newLimiter(name string, c config, opts []Option) (*RateLimiter, error) {
	o := options{config: c, maxWait: defaultMaxWait, timeout: defaultStoreTimeout, clock: realClock,
		maxWaiters: defaultMaxWaiters}
	initial, err := o.apply(name, opts)
	if err != nil {
		return nil, err
	}
	if o.shadow {
		name = shadowMark + name
	}
	l := &RateLimiter{
		limiter: limiter{
			coordinator: coordinatorOf(o.store, name, o.clock, o.timeout),
			own:         newSetting(o.config), initial: initial, transient: o.transient, maxWaiters: o.maxWaiters, observer: o.observer, label: o.label,
		},
		maxWait: o.maxWait, enabled: o.enabled,
		plain:  o.policy == FailClosed && o.observer == nil && !o.shadow,
		policy: o.policy, shadow: o.shadow,
	}
	t := traitsOf(o.store)
	if _, shares := o.policy.Instances(); shares && t.join != nil {
		l.member = t.join()
	}
	l.logger.Set(o.logger)
	if t.logger != nil {
		t.logger.Set(o.logger)
	}
	if t.used != nil {
		t.used(o.timeout)
	}
	if l.coordinator.health != nil {
		l.coordinator.health.logger.Set(o.logger)
	}
	if o.observer != nil && o.observer.Health != nil && l.coordinator.health != nil {
		l.watch()
	}
	if o.lease != nil && !o.shadow { // a shadow reserves, and who reserves has no use for a lease
		l.lease = o.lease.Microseconds()
	}
	return l, nil
}

// watch has the observer told of outages.
func (l *RateLimiter) watch() {
	outage.Watch(l.coordinator.health.Monitor, l, func(l *RateLimiter) func(outage.Change) {
		tell, bucket, policy, log := l.observer.Health, l.Name(), l.policy, &l.coordinator.health.logger
		return func(c outage.Change) {
			defer log.Recovered()
			tell(Health{Bucket: bucket, Policy: policy, Down: c.Down, Err: c.Err, After: c.After})
		}
	})
}
