package gate

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-tokenbucket/tokenbucket"
)

// CostGate is an optional interface of gates whose calls may cost several permits. The gate of [One] and a *registry.Registry
// have it. Adapters need it for their cost functions, and their constructors refuse such a function beside a gate without it.
type CostGate interface {
	Gate
	// EnterN is Enter for a call that costs n permits, at least 1. A cost that can never be granted is an error that matches
	// tokenbucket.ErrNeverGranted or tokenbucket.ErrInvalidPermits, and not a refusal.
	EnterN(ctx context.Context, key string, n int) (*Admission, error)
}

// CostError is the error of a call whose cost no limit could ever grant, or is not a cost. It is a mistake of the caller or of
// its cost function, so adapters do not treat it as a failure of the gate. It matches tokenbucket.ErrInvalidPermits or
// tokenbucket.ErrNeverGranted.
type CostError struct {
	// Key and Cost of the call.
	Key  string
	Cost int
	// Want describes the costs that are accepted; empty if Err does.
	Want string
	// Err is the reason.
	Err error
}

func (e *CostError) Error() string {
	if e.Want == "" {
		return fmt.Sprintf("gate: key %.80q: cost %d: %v", e.Key, e.Cost, e.Err)
	}
	return fmt.Sprintf("gate: %v: key %.80q: cost %d: want %s", e.Err, e.Key, e.Cost, e.Want)
}

// Unwrap returns Err.
func (e *CostError) Unwrap() error { return e.Err }

// AskN is [Ask] for a call that costs n permits:
//
//   - A call that costs 0 passes, and the gate is not asked.
//   - A cost below 0 is a [*CostError]. So is a cost above 1 that can never be granted, and one for a gate without EnterN
//     ([CostGate]).
func AskN(ctx context.Context, g Gate, key string, n int) (*Admission, error) {
	switch {
	case n < 0:
		return nil, &CostError{key, n, "0 or more", tokenbucket.ErrInvalidPermits}
	case n == 0 && ctx.Err() != nil:
		return nil, ctx.Err()
	case n == 0:
		return &Admission{OK: true}, nil
	case n == 1:
		return Ask(ctx, g, key)
	}
	c, ok := g.(CostGate)
	if !ok {
		return nil, &CostError{key, n, "1: every call of this gate costs one permit", tokenbucket.ErrInvalidPermits}
	}
	a, err := c.EnterN(ctx, key, n)
	if a, err = judge(ctx, a, err); isNever(err) && !errors.As(err, new(*CostError)) {
		err = &CostError{Key: key, Cost: n, Err: err}
	}
	return a, err
}

// isNever reports whether an error means that the number of permits can never be granted.
func isNever(err error) bool {
	return errors.Is(err, tokenbucket.ErrNeverGranted) || errors.Is(err, tokenbucket.ErrInvalidPermits)
}
