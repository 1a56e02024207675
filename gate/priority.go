package gate

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

type priorityKey struct{}

// WithPriority returns a context whose calls have a priority: a gate enters them with it if it knows priorities. A *registry.Registry does, and
// the gate of [One] for a *tokenbucket.RateLimiter, a *tokenbucket.Group or a *tokenbucket.Choice. Gates and limiters of your own have it by
// [PriorityOf]. A limit, and each member of a group, has a priority of its own, and the lower of the two counts. So a call can lower its priority below that of its limit,
// and never raise it.
//
// The context may be passed on: calls that a request causes have its priority.
func WithPriority(ctx context.Context, p tokenbucket.Priority) context.Context {
	return context.WithValue(ctx, priorityKey{}, p)
}

// PriorityOf returns the priority of the calls of a context: Normal if it has none.
func PriorityOf(ctx context.Context) tokenbucket.Priority {
	p, _ := ctx.Value(priorityKey{}).(tokenbucket.Priority)
	return p
}

// Reserve reserves n permits of a limiter for a call of the priority of ctx, or of the limiter's own if that is lower. wait is its timeout
// (tokenbucket.RateLimiter.TryReserve, which also has what a lower priority gets). It is for gates with limiters of their own; [Wait] blocks
// until the permits are due.
func Reserve(ctx context.Context, l *tokenbucket.RateLimiter, n int, wait time.Duration) (*tokenbucket.Reservation, error) {
	return prioritized(ctx, l).TryReserve(ctx, n, wait)
}

// Await is [Reserve], unless the limiter serves tenants in turns (tokenbucket.WithFairness): then it blocks until the call has had its turn,
// and returns a reservation whose permits are due, or the refusal.
func Await(ctx context.Context, l *tokenbucket.RateLimiter, n int, wait time.Duration) (*tokenbucket.Reservation, error) {
	if l = prioritized(ctx, l); l.ServesInTurns() {
		return l.TryAwait(ctx, n, wait)
	}
	return l.TryReserve(ctx, n, wait)
}

// prioritized returns the limiter of the priority of a call.
func prioritized(ctx context.Context, l *tokenbucket.RateLimiter) *tokenbucket.RateLimiter {
	return l.ForPriority(max(l.Priority(), PriorityOf(ctx)))
}
