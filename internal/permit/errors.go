package permit

import "errors"

// Errors of the engine and the stores, which tokenbucket exports under the same names and describes there.
var (
	ErrInvalidPermits   = errors.New("tokenbucket: invalid permits")
	ErrLockNotObtained  = errors.New("tokenbucket: lock not obtained")
	ErrCorruptState     = errors.New("tokenbucket: corrupt state")
	ErrStoreTimeout     = errors.New("tokenbucket: store timeout")
	ErrStoreUnavailable = errors.New("tokenbucket: store unavailable")
	ErrTooManyWaiters   = errors.New("tokenbucket: too many waiters")
	ErrPoolExhausted    = errors.New("tokenbucket: connection pool exhausted")
)
