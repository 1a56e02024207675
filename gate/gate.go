// Package gate is the interface between limiters and the code that limits calls: a [Gate] decides, an [Admission] is its
// reply. Packages httplimit and contrib/grpc use a Gate. A *registry.Registry is one, with a limit for each row of a table;
// [One] makes one of a single limiter.
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
// A gate of your own must bound the number of keys that it keeps, because a key may contain anything that a request contains.
package gate

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// Gate decides about calls by key. Its methods may be called concurrently.
type Gate interface {
	// Enter blocks until a call with that key may begin, at most as long as the key's configuration allows. It returns a
	// refusal, an Admission whose OK is false, as soon as the refusal is certain. An error means that no decision was
	// possible, or that ctx has ended.
	Enter(ctx context.Context, key string) (*Admission, error)
	// Penalize holds the key's bucket back for the whole fleet for d, which is positive and at most an hour.
	Penalize(ctx context.Context, key string, d time.Duration) error
}

// One returns a gate in which all keys share one bucket. A call waits at most timeout for its permit; if timeout is 0 or
// less, the permit must be due at once. If no state of the bucket can meet the timeout, every call fails with
// tokenbucket.ErrNeverGranted. One returns nil for a nil limiter, and constructors refuse a nil gate.
//
// A limiter that is several (tokenbucket.All, tokenbucket.Any) is one gate, too: see [Limiter].
func One[R Reservation](limiter Limiter[R], timeout time.Duration) Gate {
	if isNil(limiter) {
		return nil
	}
	return one[R]{limiter, timeout}
}

type one[R Reservation] struct {
	limiter Limiter[R]
	timeout time.Duration
}

func (g one[R]) Enter(ctx context.Context, key string) (*Admission, error) {
	return g.EnterN(ctx, key, 1)
}

// EnterN implements CostGate.
func (g one[R]) EnterN(ctx context.Context, _ string, n int) (*Admission, error) {
	switch l := any(g.limiter).(type) {
	case *tokenbucket.RateLimiter:
		r, err := Await(ctx, l, n, g.timeout)
		a, err := waitUnless(ctx, r, err)
		if a != nil && !a.OK {
			a.Member = l.Name()
		}
		return a, err
	case *tokenbucket.Group:
		r, err := l.ForPriority(PriorityOf(ctx)).TryReserve(ctx, n, g.timeout)
		return waitUnless(ctx, r, err)
	case *tokenbucket.Choice:
		r, err := l.ForPriority(PriorityOf(ctx)).TryReserve(ctx, n, g.timeout)
		return waitUnless(ctx, r, err)
	}
	r, err := g.limiter.TryReserve(ctx, n, g.timeout)
	return waitUnless(ctx, r, err)
}

// waitUnless is Wait unless err is an error of the reservation.
func waitUnless(ctx context.Context, r Reservation, err error) (*Admission, error) {
	if err != nil {
		return nil, err
	}
	return Wait(ctx, r)
}

// Penalize implements Gate. A limiter that is several is held back by [Penalize] of the call.
func (g one[R]) Penalize(ctx context.Context, _ string, d time.Duration) error {
	l, ok := g.limiter.(penalizer)
	if !ok {
		return errSeveral
	}
	return l.Penalize(ctx, d)
}

// patience bounds how long a cancelled call waits for the refund of its permits. Usually the refund is faster, and the next
// call finds the permits.
const patience = 20 * time.Millisecond

// Wait blocks until the permits of a reservation are due, and returns its admission; a refusal is returned at once. If ctx
// ends first, Wait cancels the reservation and returns the context's error. It is for gates with limiters of their own.
func Wait(ctx context.Context, r Reservation) (*Admission, error) {
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
		_ = r.Cancel(aside) // the limiter logs an unavailable store
		return nil, ctx.Err()
	}
}

// Admit returns the admission for a reservation whose permits are due, or the refusal.
func Admit(r Reservation) *Admission {
	a := &Admission{OK: r.OK(), RetryAfter: r.RetryAfter()}
	if a.OK {
		a.reservation = r
	}
	if level, known := a.levelOf(r); known {
		a.level = level
		a.level.Full = max(0, level.Full-r.Delay()) // as of the moment when the permits are due
		a.Level = &a.level
	}
	return a
}
