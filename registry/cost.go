package registry

import (
	"context"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// EnterN is Enter for a call that costs n permits, at least 1: n of the row's rate and n of its window, which then limits permits
// rather than calls. It has one place of the concurrency, whatever it costs, because a place is a call in flight. EnterN makes a
// Registry a gate.CostGate.
//
// A cost below 1 is a *gate.CostError. So is a cost that a row with a window can never grant, because it exceeds the window's limit: it
// matches tokenbucket.ErrNeverGranted. If the rate can never grant it, the error is that of tokenbucket.RateLimiter.TryReserve. In
// shadow such a call passes.
//
// What the call has used is settled with the Admission (gate.Admission.Settle).
func (r *Registry) EnterN(ctx context.Context, name string, n int) (*gate.Admission, error) {
	if n < 1 {
		return nil, &gate.CostError{Key: name, Cost: n, Want: "1 or more", Err: tokenbucket.ErrInvalidPermits}
	}
	return r.enter(ctx, name, n)
}
