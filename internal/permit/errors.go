package permit

import "errors"

// Errors of stores, which tokenbucket exports under the same names and describes there.
var (
	ErrLockNotObtained = errors.New("tokenbucket: lock not obtained")
	ErrCorruptState    = errors.New("tokenbucket: corrupt state")
	ErrStoreTimeout    = errors.New("tokenbucket: store timeout")
	ErrPoolExhausted   = errors.New("tokenbucket: connection pool exhausted")
)
