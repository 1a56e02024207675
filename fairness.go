package tokenbucket

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
)

// maxWeight is the largest weight of a tenant.
const maxWeight = 1000

// fairness is how a limiter divides its process's part of the bucket among tenants. It is never changed.
type fairness struct {
	tenant func(context.Context) string
	weight func(tenant string) int // nil: all have the same
}

// WithFairness serves the waiting callers of a process in turns, one tenant after the other. tenant returns whom a call is counted to, by
// the context of the call: a customer, a user, a job. So a tenant with a thousand waiting callers delays another by one call in each turn,
// not by a thousand. Nothing is set aside for any tenant, and the whole rate is used by those who wait.
//
// It is deficit round robin. In a turn a tenant is served as many permits as its weight, 1 by default ([WithTenantWeights]). What is too
// little for its next call is kept for its next turn. A tenant's own callers are served first come, first served. A tenant exists
// only while it has waiting callers, so there are no more tenants to keep than callers.
//
// Fairness is a matter of each process, among callers that wait. Processes at full demand get equal parts of the rate, whatever the number
// of their callers. So tenants get equal parts in the fleet if each process has callers of all of them. A call that need not wait is no
// turn, and [RateLimiter.Reserve] takes none: a reservation keeps its due time, and waits behind nobody.
//
// A waiting call may be overtaken by tenants that come later. So one that cannot be in time is refused at its timeout at the latest, and
// at once only if its turn cannot come before. One tenant may have as many waiting callers as [WithMaxWaiters] leaves room for in addition,
// half of them if it is alone. A call beyond that gets [ErrTooManyWaiters].
//
// Limiters of one bucket with the option share a queue, each with its own tenant function. Limiters without it have a queue of their own,
// first come, first served, and their process's parts of the rate are two. The function is called with every call that asks the store. It
// must be fast and safe for concurrent use.
func WithFairness(tenant func(ctx context.Context) string) Option {
	return func(o *options) {
		if tenant == nil {
			o.fail("fairness", "nil", "a function that returns the tenant of a call")
		}
		o.fairness.tenant = tenant
	}
}

// WithTenantWeights sets the weights of tenants for [WithFairness], from 1 to 1,000. A smaller weight counts as 1, a larger one as 1,000. Of
// two tenants whose callers always wait, one with weight 3 is served three times as many permits as one with weight 1. Default: 1 for each.
//
// The function is called with every call that asks the store, and the newest result applies. It must be fast and safe for concurrent use.
func WithTenantWeights(weight func(tenant string) int) Option {
	return func(o *options) {
		if weight == nil {
			o.fail("tenant weights", "nil", "a function that returns the weight of a tenant")
		}
		o.fairness.weight = weight
	}
}

// checkFairness rejects weights without tenants.
func (o *options) checkFairness() {
	if o.fairness.tenant == nil && o.fairness.weight != nil {
		o.fail("tenant weights", "a function", "WithFairness, too")
	}
}

// fair returns the fairness of a limiter, or nil if its callers are served by arrival. A shadow has no waiters.
func (o *options) fair() *fairness {
	if o.fairness.tenant == nil || o.shadow {
		return nil
	}
	f := o.fairness
	return &f
}

// order returns how the coordinator of a limiter chooses the next waiter.
func (f *fairness) order() engine.Order {
	if f == nil {
		return engine.ByArrival
	}
	return engine.InTurns
}

// count sets the tenant of a call.
func (f *fairness) count(ctx context.Context, q *engine.Call) {
	tenant, weight := f.tenant(ctx), 1
	if f.weight != nil {
		weight = min(max(1, f.weight(tenant)), maxWeight)
	}
	q.For(tenant, int64(weight))
}

// ServesInTurns reports whether the limiter's waiting callers are served in turns by tenant ([WithFairness]).
func (l *RateLimiter) ServesInTurns() bool {
	l = l.inUse()
	return l != nil && l.fairness != nil
}

// TryAwait is [RateLimiter.TryAcquire] for code that needs a [Reservation]: it waits in the queue until the permits are due, and returns them
// as a reservation whose Delay is 0. So callers of a limiter that serves in turns take turns, which those of [RateLimiter.TryReserve] do not.
// Permits that are due are used: Cancel and Return give nothing back, Settle does. The reservation has a Level only if the last reply of the
// store showed a bucket without permits.
func (l *RateLimiter) TryAwait(ctx context.Context, permits int, timeout time.Duration) (*Reservation, error) {
	v, err := l.decide(ctx, await, permits, timeout)
	if err != nil {
		return nil, err
	}
	return l.complete(await, v, permits, timeout), nil
}

// completeAwaited implements complete for TryAwait.
func (l *RateLimiter) completeAwaited(v verdict, permits int, timeout time.Duration) *Reservation {
	level := levelOf(l.limiter.Coordinator.View.Seen())
	switch {
	case l.shadow:
		return v.reservation
	case v.by == BySwitch, v.by == ByCheck, v.by == ByPolicy && v.granted: // decided without the bucket
		return &Reservation{refused: !v.granted}
	case !v.granted:
		return refusedReservation((v.wait - max(0, timeout)).Microseconds(), level)
	}
	r := v.reservation
	r.level, r.limiter, r.permits, r.quota = level, l, int64(permits), l.quota != nil
	return r
}
