package grpclimit

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// Gate decides about calls by key. A registry of limiters is one; One makes one from a single limiter. It is used by
// many goroutines at once.
type Gate interface {
	// Reserve takes a permit for the key, if it falls due within what the key's configuration allows. A refusal is a
	// reservation that is not OK; an error means that the gate could not decide.
	Reserve(ctx context.Context, key string) (*tokenbucket.Reservation, error)
	// Penalize holds the key's bucket back for the whole fleet for d, which is positive and at most an hour.
	Penalize(ctx context.Context, key string, d time.Duration) error
}

// Entrance is a Gate that may hold something for a call until it has ended: a place among those that are under way at once. A
// *registry.Registry is one. The interceptors ask Admit, rather than Reserve, of a gate that has it.
type Entrance interface {
	Gate
	// Admit is Reserve for a call that may hold something until it has ended. leave gives that back; it is nil if there is nothing to give
	// back, if the call is refused, and with an error. Admit may wait, as long as the key's configuration allows.
	Admit(ctx context.Context, key string) (permit *tokenbucket.Reservation, leave func(), err error)
}

// One is the gate in which every key is one bucket. A permit may fall due up to timeout later; 0 or less: it must be due at
// once. If no state of the bucket can meet the timeout, every call is a failure, tokenbucket.ErrNeverGranted. A nil limiter
// makes New fail.
func One(limiter *tokenbucket.RateLimiter, timeout time.Duration) Gate {
	return one{limiter, timeout}
}

type one struct {
	limiter *tokenbucket.RateLimiter
	timeout time.Duration
}

func (g one) Reserve(ctx context.Context, _ string) (*tokenbucket.Reservation, error) {
	return g.limiter.TryReserve(ctx, 1, g.timeout)
}

func (g one) Penalize(ctx context.Context, _ string, d time.Duration) error {
	return g.limiter.Penalize(ctx, d)
}
