package slidingwindow

import (
	"errors"
	"fmt"
)

// Errors, to be matched with errors.Is. What wraps them names the limiter.
var (
	// ErrInvalid: an argument or an option is out of range; *InvalidError says which.
	ErrInvalid = errors.New("slidingwindow: invalid argument")
	// ErrAway: Redis could not be reached, did not answer in time, or said that it cannot serve now. It wraps why.
	ErrAway = errors.New("slidingwindow: redis away")
	// ErrUnusable: Redis cannot be asked until somebody repairs something: a wrong password, missing rights, a certificate that
	// is not trusted, an address that is none, a client that was closed. It wraps what, and no WithAway or WithShare helps.
	ErrUnusable = errors.New("slidingwindow: redis unusable")
	// ErrTimeout: Redis did not answer in time (WithTimeout). It comes wrapped in an ErrAway.
	ErrTimeout = errors.New("slidingwindow: redis timeout")
	// ErrClock: with WithLocalTime, this process's clock is more than 2 s behind that of another one. Nothing was decided or written.
	ErrClock = errors.New("slidingwindow: clock behind")
	// ErrTooManyWaiters: as many callers of this process as WithMaxWaiters allows wait for Redis already.
	ErrTooManyWaiters = errors.New("slidingwindow: too many waiters")
	// ErrCorrupt: what is stored under the limiter's key is not a state that this release understands. Nothing was
	// overwritten.
	ErrCorrupt = errors.New("slidingwindow: corrupt state")
	// ErrOverflow: more was admitted in one sub-interval than is counted (2^37), which takes limits raised again and again.
	// Nothing was written.
	ErrOverflow = errors.New("slidingwindow: count overflows")
)

// InvalidError tells which value was refused. It is an [ErrInvalid].
type InvalidError struct {
	// Limiter is the name of the limiter.
	Limiter string
	// Field and Value that were refused.
	Field string
	Value any
	// Want says what would be accepted.
	Want string
}

func (e *InvalidError) Error() string {
	return fmt.Sprintf("%v: limiter %.80q: %s %v: want %s", ErrInvalid, e.Limiter, e.Field, e.Value, e.Want)
}

// Unwrap returns [ErrInvalid].
func (e *InvalidError) Unwrap() error { return ErrInvalid }
