package tokenbucket

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"time"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/weakmap"
)

// NewSmoothBursty returns a limiter that grants permitsPerSecond permits a second, and after a pause at most
// max permits at once ([WithMaxPermits]; default one second's worth, at least 1). By default a caller waits for its own
// permits ([PayNow]), and a new bucket holds one permit ([WithInitialPermits]).
//
// All limiters of one name on one store share one bucket. permitsPerSecond is a number from 1e-9, a permit in 32 years, to
// 2^53. Errors match [ErrInvalidConfig] and name the field and the value. The constructor sends nothing to the store.
func NewSmoothBursty(name string, permitsPerSecond float64, opts ...Option) (*RateLimiter, error) {
	return newLimiter(name, config{Kind: bursty, Payment: PayNow, Rate: permitsPerSecond}, opts)
}

// NewSmoothWarmingUp returns a limiter for upstreams that are slow when cold (empty caches, no connections): after a
// pause it begins at 1/coldFactor of the rate ([WithColdFactor], default 3) and reaches permitsPerSecond after
// warmupPeriod of full demand; left idle for warmupPeriod, it is cold again. By default a caller waits for the debt
// that it finds ([PayLater]), so a cold limiter's first call passes at once.
//
// warmupPeriod counts in whole microseconds, at least one. The cold interval, coldFactor / permitsPerSecond, is at most 1e9 s.
// In all else it is as [NewSmoothBursty].
func NewSmoothWarmingUp(name string, permitsPerSecond float64, warmupPeriod time.Duration, opts ...Option) (*RateLimiter, error) {
	return newLimiter(name, config{
		Kind: warmingUp, Payment: PayLater, Rate: permitsPerSecond, WarmupMicros: warmupPeriod.Microseconds(), ColdFactor: 3,
	}, opts)
}

// realClock is shared, so that all limiters without a clock of their own are recognised as having the same.
var realClock = clockwork.NewRealClock()

func newLimiter(name string, c config, opts []Option) (*RateLimiter, error) {
	o := options{config: c, maxWait: defaultMaxWait, timeout: defaultStoreTimeout, clock: realClock,
		maxWaiters: defaultMaxWaiters, floor: defaultFloor}
	initial, err := o.apply(name, opts)
	if err != nil {
		return nil, err
	}
	name = slotted(o.slot, name)
	if o.shadow {
		name = shadowMark + name
	}
	t := traitsOf(o.store)
	l := &RateLimiter{
		own: newSetting(o.config), store: o.store, maxWait: o.maxWait, enabled: o.enabled, plain: o.policy == FailClosed && o.observer == nil && !o.shadow,
		policy: o.policy, quota: o.quota, parts: partsOf(o.store, &t), shadow: o.shadow, observer: o.observer, label: o.label, memory: t.memory, time: clock.New(o.clock),
		priority: o.priority, fairness: o.fair(), settles: o.settles,
	}
	e := &l.limiter
	e.Coordinator = coordinatorOf(o.store, l.parts, name, o.clock, o.timeout, engine.Class(o.priority), l.fairness.order())
	e.Own, e.Initial, e.Transient, e.Quota, e.MaxWaiters, e.Floor = &l.own.terms, initial, o.transient, o.quota != nil, o.maxWaiters, o.floor
	if _, shares := o.policy.Instances(); shares && t.join != nil {
		l.member = t.join()
	}
	e.Logger.Set(o.logger)
	if t.logger != nil {
		t.logger.Set(o.logger)
	}
	if t.used != nil {
		t.used(o.timeout)
	}
	if h := e.Coordinator.Health; h != nil {
		h.Logger.Set(o.logger)
		h.Uses(o.policy.String())
	}
	if o.observer != nil {
		l.observe(o.observer)
	}
	if o.prefetch != nil && !o.shadow { // a shadow lets every call pass, so it needs no permits sooner
		e.Prefetch = o.prefetch.Microseconds()
	}
	return l, nil
}

// observe connects the observer to the engine.
func (l *RateLimiter) observe(o *Observer) {
	e, name := &l.limiter, l.Name()
	if trip := o.Trip; trip != nil {
		e.OnTrip = func(t engine.Trip) {
			trip(Trip{Bucket: name, Requests: t.Requests, Elapsed: t.Elapsed, LockWait: t.LockWait, Err: t.Err})
		}
	}
	if prefetch := o.Prefetch; prefetch != nil {
		label := cmp.Or(l.label, name)
		e.OnPrefetch = func(permits, used int) { prefetch(label, permits, used) }
	}
	if lost := o.Lost; lost != nil {
		label := cmp.Or(l.label, name)
		e.OnLost = func(permits int) { lost(label, permits) }
	}
	l.observeHealth()
}

// observeHealth connects the observer, if there is one, to the monitor of the store.
func (l *RateLimiter) observeHealth() {
	if h := l.limiter.Coordinator.Health; h != nil && l.observer != nil && l.observer.Health != nil {
		outage.Watch(h.Monitor, l, func(l *RateLimiter) func(outage.Change) {
			notify, bucket, policy, log := l.observer.Health, l.Name(), l.policy, &l.limiter.Coordinator.Health.Logger
			return func(c outage.Change) {
				defer log.Recovered()
				notify(Health{Bucket: bucket, Policy: policy, Down: c.Down, Err: c.Err, After: c.After})
			}
		})
	}
}

// coordinators of this process by what they share. One lives as long as a limiter uses it.
var coordinators weakmap.Map[coordinatorKey, engine.Coordinator]

type coordinatorKey struct {
	store   Store
	name    string
	clock   clockwork.Clock
	timeout time.Duration
	class   engine.Class
	order   engine.Order
}

// comparable reports whether the coordinator can be shared.
func (k *coordinatorKey) comparable() bool {
	return reflect.ValueOf(k.store).Comparable() && reflect.ValueOf(k.clock).Comparable()
}

// peer returns the coordinator of another class; nil if there is none.
func (k coordinatorKey) peer(class engine.Class) *engine.Coordinator {
	if !k.comparable() {
		return nil
	}
	k.class = class
	return coordinators.Find(k)
}

// coordinatorOf returns the coordinator that all limiters of a store, a name, a clock, a store timeout, a priority and an order share. A
// store or a clock that cannot be compared is not recognised, so its coordinator is not shared. parts is the store of local shares; nil for
// a MemoryStore.
func coordinatorOf(store Store, parts *MemoryStore, name string, clock clockwork.Clock, timeout time.Duration, class engine.Class, order engine.Order) *engine.Coordinator {
	traits := traitsOf(store)
	if traits.memory != nil {
		timeout = 0 // its limiters share a queue whatever their store timeouts, because it always replies
	}
	fresh := func() *engine.Coordinator {
		return newCoordinator(store, parts, traits, name, clock, timeout, class, order)
	}
	key := coordinatorKey{store, name, clock, timeout, class, order}
	if !key.comparable() {
		return fresh()
	}
	return coordinators.Get(key, fresh)
}

func newCoordinator(store Store, parts *MemoryStore, t traits, name string, by clockwork.Clock, timeout time.Duration, class engine.Class, order engine.Order) *engine.Coordinator {
	config := engine.Config{
		Name: label(name), Key: keyName(name), Timing: t.decides, Trips: t.trips, Clock: by, Timeout: timeout, Class: class, Order: order,
		Env: engine.Env{
			Away: away, NotAsked: notAsked, Failure: storeError, Probe: t.probe, Busy: t.busy, Route: t.route,
			NewSession: func() permit.Session { return new(redisbucket.Session) },
			OfClass: func(c engine.Class) *engine.Coordinator {
				return coordinatorOf(store, parts, name, by, timeout, c, order)
			},
		},
	}
	if class != engine.Normal {
		config.Peer = coordinatorKey{store, name, by, timeout, class, order}.peer
	}
	if t.memory != nil {
		config.Store, config.Immediate, config.NewSession = immediate{t.memory}, true, nil
		return engine.New(config)
	}
	config.LocalShare = func() *engine.Coordinator { return coordinatorOf(parts, nil, name, by, 0, class, order) }
	config.Store, config.Health = &bucketStore{store: store}, healthOf(&t)
	if config.Probe == nil {
		local := clock.New(by)
		config.Probe = func(ctx context.Context, key string) error {
			return probeStore(ctx, store, label(name), key, local.Micros)
		}
	}
	return engine.New(config)
}

// probeStore asks a store that has no probe of its own whether it replies.
func probeStore(ctx context.Context, store Store, name, key string, micros func() int64) error {
	err := askStore(ctx, store, &permit.Batch{
		Name: name, Key: key, Terms: &placeholder.terms, Epoch: engine.NewEpoch(), LocalMicros: micros, Probe: true,
	})
	if errors.Is(err, ErrInvalidConfig) { // a bucket of the other kind was read
		return nil
	}
	return err
}

// placeholder is the configuration of a batch that decides nothing.
var placeholder = newSetting(config{Kind: bursty, Rate: 1, Size: 1, Floor: 1})

// healths are the monitors of stores on one server. One lives as long as a coordinator uses it.
var healths weakmap.Map[Store, engine.Health]

// healthOf returns the monitor that all coordinators of a server share, or a new one.
func healthOf(t *traits) *engine.Health {
	group := t.outages
	if group == nil {
		group = new(outage.Group)
	}
	fresh := func() *engine.Health { return engine.NewHealth(group, away, coordinators.All) }
	if !t.oneServer {
		return fresh()
	}
	return healths.Get(t.self, fresh)
}

// parts are the stores of local shares, for stores that bring none. One lives as long as a limiter uses it.
var parts weakmap.Map[Store, MemoryStore]

// partsOf returns the store of local shares, which all coordinators of a store share; nil for a MemoryStore, which has no outages.
func partsOf(store Store, t *traits) *MemoryStore {
	switch {
	case t.memory != nil:
		return nil
	case t.parts != nil:
		return t.parts
	case !reflect.ValueOf(store).Comparable():
		return NewMemoryStore()
	}
	return parts.Get(store, NewMemoryStore)
}
