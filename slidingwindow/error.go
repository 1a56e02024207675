package slidingwindow

import (
	"errors"
	"fmt"
)

// Errors, to be matched with errors.Is. An error that wraps one of them names the limiter.
var (
	// ErrInvalidConfig: a name, a limit, a window, a resolution or an option is out of range, or a limiter given to Reconfigure counts
	// something else. It comes in an [*InvalidError].
	ErrInvalidConfig = errors.New("slidingwindow: invalid configuration")
	// ErrInvalidPermits: a number of permits is below 1 or above what is allowed, or a Result has no permits that can be refunded. It comes
	// in an [*InvalidError].
	ErrInvalidPermits = errors.New("slidingwindow: invalid permits")
	// ErrStoreUnavailable: Redis cannot be reached, did not reply in time, or replied that it cannot serve now. Or it failed just now and
	// has not replied since, so the limiter did not ask. The error wraps the failure.
	ErrStoreUnavailable = errors.New("slidingwindow: store unavailable")
	// ErrStoreUnusable: Redis can only be used after a repair. Examples are a wrong password, missing rights, a certificate that is not
	// trusted, an address that does not parse, a closed client. The error wraps the failure. No [FailurePolicy] applies.
	ErrStoreUnusable = errors.New("slidingwindow: store unusable")
	// ErrStoreTimeout: Redis did not reply in time ([WithStoreTimeout]). It comes wrapped in an ErrStoreUnavailable.
	ErrStoreTimeout = errors.New("slidingwindow: store timeout")
	// ErrClock: with WithLocalTime, this process's clock is more than 2 s behind that of another process. Nothing was decided or written.
	ErrClock = errors.New("slidingwindow: clock behind")
	// ErrTooManyWaiters: as many callers of this process wait as [WithMaxWaiters] allows.
	ErrTooManyWaiters = errors.New("slidingwindow: too many waiters")
	// ErrCorruptState: the value under the limiter's key is not a state that this release understands. Nothing was overwritten.
	ErrCorruptState = errors.New("slidingwindow: corrupt state")
	// ErrOverflow: the count of a sub-interval would exceed 2^37, which takes limits that are raised again and again. Nothing was written.
	ErrOverflow = errors.New("slidingwindow: count overflows")
)

// InvalidError names the value that was refused. It matches its Reason.
type InvalidError struct {
	// Limiter is the name of the limiter.
	Limiter string
	// Field and Value that were refused.
	Field string
	Value any
	// Want describes the values that are accepted.
	Want string
	// Reason is [ErrInvalidConfig] or [ErrInvalidPermits].
	Reason error
}

func (e *InvalidError) Error() string {
	return fmt.Sprintf("%v: limiter %.80q: %s %v: want %s", e.Reason, e.Limiter, e.Field, e.Value, e.Want)
}

// Unwrap returns Reason.
func (e *InvalidError) Unwrap() error { return e.Reason }
