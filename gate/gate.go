// Package gate is what a limited call passes: [Gate], the question, and [Admission], the reply. Packages httplimit and contrib/grpc ask a
// Gate. A *registry.Registry is one, with a limit for each row of a table; [One] makes one of a single limiter.
//
//	a, err := limits.Enter(ctx, "/ibe/Order")
//	if err != nil {
//		return err // nothing could be decided
//	}
//	defer a.Leave()
//	if !a.OK {
//		return fmt.Errorf("refused: try again in %v", a.RetryAfter)
//	}
//	// make the call
//
// A gate of your own bounds how many keys it keeps: a key may contain anything that a request contains.
package gate

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// Gate decides about calls by key. Its methods may be called by many goroutines at once.
type Gate interface {
	// Enter blocks until a call of that key may begin, no longer than the key's configuration allows. A refusal is an Admission that is not
	// OK; it is returned as soon as it is known. An error means that nothing could be decided, or that ctx has ended.
	Enter(ctx context.Context, key string) (*Admission, error)
	// Penalize holds the key's bucket back for the whole fleet for d, which is positive and at most an hour.
	Penalize(ctx context.Context, key string, d time.Duration) error
}

// One returns the gate in which all keys share one bucket. A permit may fall due up to timeout later; if timeout is 0 or less, it must be
// due at once. If no state of the bucket can meet the timeout, every call fails with tokenbucket.ErrNeverGranted. One returns nil for a nil
// limiter, and constructors refuse that.
func One(limiter *tokenbucket.RateLimiter, timeout time.Duration) Gate {
	if limiter == nil {
		return nil
	}
	return one{limiter, timeout}
}

type one struct {
	limiter *tokenbucket.RateLimiter
	timeout time.Duration
}

func (g one) Enter(ctx context.Context, _ string) (*Admission, error) {
	r, err := g.limiter.TryReserve(ctx, 1, g.timeout)
	if err != nil {
		return nil, err
	}
	return Wait(ctx, r)
}

func (g one) Penalize(ctx context.Context, _ string, d time.Duration) error {
	return g.limiter.Penalize(ctx, d)
}

// patience bounds how long a caller that has given up waits until its permits are back. They nearly always are by then, and a call that
// follows at once finds them.
const patience = 20 * time.Millisecond

// Wait blocks until the permits of a reservation are due, and returns the admission by them; a refusal is returned at once. If ctx ends first,
// Wait cancels the reservation and returns the context's error. It is for gates that keep limiters of their own.
func Wait(ctx context.Context, r *tokenbucket.Reservation) (*Admission, error) {
	a := Admit(r)
	if !a.OK {
		return a, nil
	}
	select {
	case <-r.Ready():
		return a, nil
	case <-ctx.Done():
		aside, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		_ = r.Cancel(aside) // the limiter logs that its store is away
		return nil, ctx.Err()
	}
}

// Admit returns the admission by a reservation whose permits are due, or the refusal that it is.
func Admit(r *tokenbucket.Reservation) *Admission {
	a := &Admission{OK: r.OK(), RetryAfter: r.RetryAfter()}
	if level, known := r.Level(); known {
		a.level = level
		a.level.Full = max(0, level.Full-r.Delay()) // as of the moment when the permits are due
		a.Level = &a.level
	}
	return a
}
