package gate

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

type priorityKey struct{}

// WithPriority returns a context whose calls have a priority: a gate enters them with it if it knows priorities. The gate of [One] and a
// *registry.Registry do, others ignore it. A limit has a priority of its own, and the lower of the two counts. So a call can lower its
// priority below that of its limit, and never raise it.
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

// Reserve reserves n permits of a limiter for a call of the priority of ctx, or of the limiter's own if that is lower. A call of
// tokenbucket.Normal waits at most wait for its permits. Calls of a lower priority wait less: half of it at Low, a tenth at Lowest, and the
// time of their own permits at the rate. It is for gates with limiters of their own; [Wait] blocks until the permits are due.
//
// A reservation takes the next permits of the bucket, and does not queue. Under full demand of Normal the next permit is due in about wait.
// So calls of lower priorities are refused, and get what is left as soon as the demand falls. That holds for all processes of a fleet. Where
// wait is 0, a lower priority only leaves stored permits to callers of a higher one that wait in the same process.
func Reserve(ctx context.Context, l *tokenbucket.RateLimiter, n int, wait time.Duration) (*tokenbucket.Reservation, error) {
	if p := max(l.Priority(), PriorityOf(ctx)); p != tokenbucket.Normal {
		l, wait = l.ForPriority(p), patienceOf(l, p, n, wait)
	}
	return l.TryReserve(ctx, n, wait)
}

// waitShares are the shares of the longest wait for which a call of a priority waits. They are those of the look-ahead, see
// tokenbucket.WithPriority.
var waitShares = [...]float64{tokenbucket.Normal: 1, tokenbucket.Low: 0.5, tokenbucket.Lowest: 0.1}

// patienceOf returns how long a call of a priority waits for n permits at most. Without the time of its own permits, a bucket that saves
// nothing up could never grant them.
func patienceOf(l *tokenbucket.RateLimiter, p tokenbucket.Priority, n int, wait time.Duration) time.Duration {
	own := float64(max(0, n)) / l.Rate() * float64(time.Second)
	return time.Duration(min(float64(wait), waitShares[min(p, tokenbucket.Lowest)]*float64(wait)+own))
}
