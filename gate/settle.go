package gate

import "context"

// Settle replaces the cost of the call by the permits that it has used, for calls whose cost is known only afterwards
// (tokenbucket.Reservation.Settle). It may be called before or after Leave, and counts once. It settles the rate of the call: a
// window keeps the cost with which the call began, and a place of the concurrency has none. A call that no bucket has counted is
// not settled: one that costs 0, that passed without a limit or in shadow, or whose gate did not use [Wait] or [Admit].
//
// Errors are those of tokenbucket.Reservation.Settle. Settling a nil Admission or a refusal does nothing.
func (a *Admission) Settle(ctx context.Context, actual int) error {
	if a == nil || a.reservation == nil {
		return nil
	}
	return a.reservation.Settle(ctx, actual)
}

// SettleLater is Settle in the background (tokenbucket.Reservation.SettleLater): the limiter logs an error, and its Close waits
// for the settlement.
func (a *Admission) SettleLater(actual int) {
	if a != nil && a.reservation != nil {
		a.reservation.SettleLater(actual)
	}
}

type contextKey struct{}

// NewContext returns a context with the admission of a call, for the code that runs the call ([FromContext]). All adapters
// use it.
func NewContext(ctx context.Context, a *Admission) context.Context {
	return context.WithValue(ctx, contextKey{}, a)
}

// FromContext returns the admission of the call that runs under ctx; nil if there is none. Its Member is the bucket of a
// tokenbucket.Choice that has admitted the call: the key of an upstream with which to send it.
func FromContext(ctx context.Context) *Admission {
	a, _ := ctx.Value(contextKey{}).(*Admission)
	return a
}
