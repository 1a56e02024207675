package gate

import (
	"context"
	"fmt"
	"reflect"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// Limiter is what [One] needs of a limiter: a *tokenbucket.RateLimiter, or one that is several.
type Limiter[R Reservation] interface {
	TryReserve(ctx context.Context, permits int, timeout time.Duration) (R, error)
}

// Reservation is what a gate needs of a reservation: *tokenbucket.Reservation is one. Its methods are described there.
type Reservation interface {
	OK() bool
	RetryAfter() time.Duration
	Delay() time.Duration
	Ready() <-chan struct{}
	Cancel(ctx context.Context) error
	Settle(ctx context.Context, actual int) error
	SettleLater(actual int)
}

var _ Limiter[*tokenbucket.Reservation] = (*tokenbucket.RateLimiter)(nil)

// penalizer is a limiter that can be held back.
type penalizer interface {
	Penalize(ctx context.Context, d time.Duration) error
}

// errSeveral is the error of a penalty that names no call.
var errSeveral = fmt.Errorf("gate: %w: penalty of a limiter that is several: want gate.Penalize with the admission of a call", tokenbucket.ErrInvalidConfig)

// Penalize holds back what a call has used, for the whole fleet, for d, which is positive and at most an hour: for adapters whose
// upstream asks for a pause. If the limiter is several, these are the buckets of which the call has taken permits. Otherwise it is
// Penalize of the gate.
func Penalize(ctx context.Context, g Gate, a *Admission, key string, d time.Duration) error {
	if used, several := a.used(); several {
		return penalizeAll(ctx, used, d)
	}
	return g.Penalize(ctx, key, d)
}

// isNil reports whether an interface is nil, or has a nil pointer.
func isNil(v any) bool {
	rv := reflect.ValueOf(v)
	return v == nil || rv.Kind() == reflect.Pointer && rv.IsNil()
}
