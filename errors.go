package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// Errors to match with errors.Is. The errors that wrap them name the bucket, the field and the value.
var (
	// ErrInvalidConfig: an option, a rate, a name, a store or a clock is out of range, or the bucket is of another kind.
	ErrInvalidConfig = errors.New("tokenbucket: invalid configuration")
	// ErrInvalidPermits: the number of permits is not positive, or too large.
	ErrInvalidPermits = permit.ErrInvalidPermits
	// ErrNeverGranted: no state of the bucket, not even a full one without debt, could grant the request within its timeout. Such a request
	// would be refused for ever, so it is an error. Nothing was taken. The error is in a [*WaitError], whose Wait is the shortest
	// sufficient timeout. Only [RateLimiter.TryAcquire], [RateLimiter.Try] and [RateLimiter.TryReserve] return it. Two examples: a request
	// with timeout 0 to a bucket that stores nothing; a request for more permits than the bucket can hold, with a timeout too short for the
	// rest. For a limiter that warms up ([PayNow]), the bucket was cold, and the error holds only for a cold bucket: a warm one may grant
	// the request.
	ErrNeverGranted = errors.New("tokenbucket: can never be granted")
	// ErrLockNotObtained: other processes held the bucket's lock for longer than the caller or the store would wait.
	ErrLockNotObtained = permit.ErrLockNotObtained
	// ErrCorruptState: the value under the bucket's key is not a state that this release understands. It was not overwritten.
	ErrCorruptState = permit.ErrCorruptState
	// ErrStoreTimeout: the store did not reply in time (WithStoreTimeout). Permits of a later reply are given back. An error of a limiter
	// matches ErrStoreUnavailable, too.
	ErrStoreTimeout = permit.ErrStoreTimeout
	// ErrTooManyWaiters: as many callers of this process wait for the bucket as WithMaxWaiters allows.
	ErrTooManyWaiters = permit.ErrTooManyWaiters
	// ErrStoreUnavailable: the store cannot be reached, did not reply in time, or replied that it cannot serve now. Or it failed just now
	// and has not replied since, so the call was not sent. An error of a limiter matches it if FailOpen or LocalShare would have decided
	// the call instead. The error that wraps it names the failure. A Store of your own wraps it to report that it cannot be reached.
	ErrStoreUnavailable = permit.ErrStoreUnavailable
	// ErrPoolExhausted: the call was not sent, because all connections of the client were in use (PoolSize) for as long as the caller
	// waited. The cause is this process, so it is no outage: no [FailurePolicy] decides while the server replies.
	ErrPoolExhausted = permit.ErrPoolExhausted
	// ErrStoreUnusable: the store needs a repair before it can be used. Examples are a wrong password (NOAUTH, WRONGPASS), missing rights
	// (NOPERM), a certificate that is not trusted, a client that was closed or that panicked, a script that fails. It is never an outage,
	// so no [FailurePolicy] decides. The error that wraps it names the bucket and the cause, which errors.Is finds, too.
	ErrStoreUnusable = errors.New("tokenbucket: store unusable")
)

// wanted returns an error that names a value and the values allowed. Before it reaches a user it is wrapped in an exported error that names
// the bucket.
func wanted(field string, value any, want string) error {
	return fmt.Errorf("%s %v: want %s", field, value, want)
}

// shadowMark begins the name of a shadow's bucket. It is not valid UTF-8, so no other bucket has such a name.
const shadowMark = "\xff"

// label returns a bucket's name as its users know it.
func label(name string) string {
	_, name = cutSlot(strings.TrimPrefix(name, shadowMark))
	return name
}

// invalid returns an ErrInvalidConfig that names the bucket.
func invalid(bucket string, err error) error {
	return fmt.Errorf("%w: bucket %q: %w", ErrInvalidConfig, bucket, err)
}

// WaitError is the error of a call whose wait would be too long to begin. Nothing was taken.
type WaitError struct {
	// Bucket and Permits of the request.
	Bucket  string
	Permits int
	// Wait is the wait that the request would take; with ErrNeverGranted, the shortest timeout with which it could be granted.
	Wait time.Duration
	// Reason is [context.DeadlineExceeded] (the wait ends after the context does) or [ErrNeverGranted] (no state of the bucket
	// grants the request within its timeout).
	Reason error
}

func (e *WaitError) Error() string {
	if errors.Is(e.Reason, context.DeadlineExceeded) {
		return fmt.Sprintf("tokenbucket: bucket %q: permits %d: due in %v, after the context's deadline", e.Bucket, e.Permits, e.Wait)
	}
	return fmt.Sprintf("%v: bucket %q: permits %d: want a timeout of at least %v", e.Reason, e.Bucket, e.Permits, e.Wait)
}

// Unwrap returns Reason.
func (e *WaitError) Unwrap() error { return e.Reason }

// away reports whether an error means that the store is unavailable now, rather than that it needs a repair.
func away(err error) bool {
	var wait *WaitError
	switch {
	case err == nil, errors.As(err, &wait), errors.Is(err, ErrLockNotObtained), errors.Is(err, ErrPoolExhausted), errors.Is(err, ErrCorruptState), script.Lasting(err):
		return false
	case errors.Is(err, ErrStoreTimeout), errors.Is(err, ErrStoreUnavailable):
		return true
	}
	return script.Away(err)
}

// notAsked reports whether a request could not be sent because of other callers: they hold the bucket's lock, or use all connections. They
// may be waiting for a store that is unavailable; a probe shows that.
func notAsked(err error) bool {
	return errors.Is(err, ErrLockNotObtained) || errors.Is(err, ErrPoolExhausted)
}

// storeFailure is an ErrStoreUnavailable with its cause.
type storeFailure struct {
	bucket string
	err    error
}

func (f *storeFailure) Error() string {
	if errors.Is(f.err, ErrStoreTimeout) { // it names the bucket
		return f.err.Error()
	}
	return fmt.Sprintf("%v: bucket %q: %v", ErrStoreUnavailable, f.bucket, f.err)
}

// Is reports whether target is ErrStoreUnavailable.
func (f *storeFailure) Is(target error) bool { return target == ErrStoreUnavailable }

// Unwrap returns the failure.
func (f *storeFailure) Unwrap() error { return f.err }

// StoreFailure returns the failure, for metrics that count kinds of failures.
func (f *storeFailure) StoreFailure() error { return f.err }

// named lists the errors that already name the bucket or its key, and the cause.
var named = []error{
	ErrStoreUnavailable, ErrStoreUnusable, ErrPoolExhausted, ErrInvalidConfig, ErrInvalidPermits, ErrNeverGranted, ErrCorruptState, ErrLockNotObtained,
}

// storeError returns an error of the store as callers of a bucket receive it. It matches ErrStoreUnavailable if the store is unavailable,
// and ErrStoreUnusable if it needs a repair. Both name the bucket.
func storeError(bucket string, err error) error {
	switch {
	case err == nil, slices.ContainsFunc(named, func(sentinel error) bool { return errors.Is(err, sentinel) }):
		return err
	case !away(err):
		return fmt.Errorf("%w: bucket %q: %w", ErrStoreUnusable, bucket, script.Lacking(err, redisbucket.ApplyScript))
	}
	return &storeFailure{bucket, err}
}

// isNil reports whether v is nil or a nil pointer.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	rv := reflect.ValueOf(v)
	return rv.Kind() == reflect.Pointer && rv.IsNil()
}
