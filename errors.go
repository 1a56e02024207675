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
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// Errors, to be matched with errors.Is. What wraps them names the bucket, the field and the value.
var (
	// ErrInvalidConfig: an option, a rate, a name, a store or a clock is out of range, or the bucket is of another kind.
	ErrInvalidConfig = errors.New("tokenbucket: invalid configuration")
	// ErrInvalidPermits: the number of permits is not positive, or too large.
	ErrInvalidPermits = permit.ErrInvalidPermits
	// ErrNeverGranted: no state of the bucket, not even a full one that owes nothing, could grant the request within its
	// timeout. Such a request would be refused for ever, so it is an error. Nothing was taken. It comes in a [*WaitError], whose Wait
	// is the shortest timeout that would do. Only [RateLimiter.TryAcquire], [RateLimiter.Try] and [RateLimiter.TryReserve] return it.
	// Two examples: a bucket that saves nothing up is asked with a timeout of 0; more permits are asked for than the bucket can hold,
	// and the timeout is too short for the rest. If a limiter warms up ([PayNow]), the bucket was cold, and it tells
	// only of a cold one: a warm bucket may grant the request.
	ErrNeverGranted = errors.New("tokenbucket: can never be granted")
	// ErrLockNotObtained: the bucket's lock was held by others for longer than the caller or the store would wait.
	ErrLockNotObtained = permit.ErrLockNotObtained
	// ErrCorruptState: what is stored under the bucket's key is not a state that this release understands. Nothing was
	// overwritten.
	ErrCorruptState = permit.ErrCorruptState
	// ErrStoreTimeout: the store did not answer in time (WithStoreTimeout). If its answer comes later, the permits that it granted are
	// given back. What a limiter returns matches ErrStoreUnavailable, too.
	ErrStoreTimeout = permit.ErrStoreTimeout
	// ErrTooManyWaiters: as many callers of this process wait for the bucket as WithMaxWaiters allows.
	ErrTooManyWaiters = permit.ErrTooManyWaiters
	// ErrStoreUnavailable: the store cannot be reached, did not answer in time, or says that it cannot serve now. Or it failed
	// just now and has not answered since, so it was not asked. An error of a limiter matches it if FailOpen or LocalShare would
	// have decided the call instead. What wraps it names the failure. A Store of your own wraps it to say that it cannot be reached.
	ErrStoreUnavailable = permit.ErrStoreUnavailable
	// ErrPoolExhausted: the store was not asked, since all connections of its client were in use (PoolSize) for as long as the caller
	// waited. That is this process's doing, so it is no outage: no [FailurePolicy] decides while the server answers.
	ErrPoolExhausted = permit.ErrPoolExhausted
	// ErrStoreUnusable: somebody must repair something before the store can be used. Examples are a wrong password (NOAUTH, WRONGPASS),
	// missing rights (NOPERM), a certificate that is not trusted, a client that was closed or that panicked, a script that fails. It is
	// never an outage, so no [FailurePolicy] decides. What wraps it names the bucket and the cause, which errors.Is finds, too.
	ErrStoreUnusable = errors.New("tokenbucket: store unusable")
)

// wanted names what is wrong with a value. Who returns it to a user puts before it which error it is, and of which bucket.
func wanted(field string, value any, want string) error {
	return fmt.Errorf("%s %v: want %s", field, value, want)
}

// shadowMark begins the name of a shadow's bucket: it is no UTF-8, so no other bucket has such a name.
const shadowMark = "\xff"

// label is a bucket's name as its users know it.
func label(name string) string { return strings.TrimPrefix(name, shadowMark) }

// invalid is an ErrInvalidConfig of a bucket.
func invalid(bucket string, err error) error {
	return fmt.Errorf("%w: bucket %q: %w", ErrInvalidConfig, bucket, err)
}

// WaitError tells that a wait would be too long for anybody to begin it. Nothing was taken.
type WaitError struct {
	// Bucket and Permits of the request.
	Bucket  string
	Permits int
	// Wait that the request would take; with ErrNeverGranted, the shortest timeout with which it could be granted.
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

// away tells whether an error means that the store cannot be asked now, rather than that somebody must repair something.
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

// notAsked tells whether an error means that the store could not be asked for what others do: they hold the bucket's lock, or use all
// connections. Perhaps these wait for a store that is away; a probe shows.
func notAsked(err error) bool {
	return errors.Is(err, ErrLockNotObtained) || errors.Is(err, ErrPoolExhausted)
}

// storeFailure is how a call has met a store that is away: it is its cause, and an ErrStoreUnavailable.
type storeFailure struct {
	bucket string
	err    error
}

func (f *storeFailure) Error() string {
	if errors.Is(f.err, ErrStoreTimeout) { // which names the bucket
		return f.err.Error()
	}
	return fmt.Sprintf("%v: bucket %q: %v", ErrStoreUnavailable, f.bucket, f.err)
}

// Is tells that it is an ErrStoreUnavailable.
func (f *storeFailure) Is(target error) bool { return target == ErrStoreUnavailable }

// Unwrap returns the failure.
func (f *storeFailure) Unwrap() error { return f.err }

// StoreFailure is the failure, for those who count kinds of failures.
func (f *storeFailure) StoreFailure() error { return f.err }

// named are errors that name the bucket or its key, and what is wrong.
var named = []error{
	ErrStoreUnavailable, ErrStoreUnusable, ErrPoolExhausted, ErrInvalidConfig, ErrInvalidPermits, ErrNeverGranted, ErrCorruptState, ErrLockNotObtained,
}

// storeError returns an error of the store as callers of a bucket get it: it matches ErrStoreUnavailable if the store is away, and
// ErrStoreUnusable if somebody must repair something. Both name the bucket.
func storeError(bucket string, err error) error {
	switch {
	case err == nil, slices.ContainsFunc(named, func(sentinel error) bool { return errors.Is(err, sentinel) }):
		return err
	case !away(err):
		return fmt.Errorf("%w: bucket %q: %w", ErrStoreUnusable, bucket, err)
	}
	return &storeFailure{bucket, err}
}

// isNil tells that there is nothing: no value, or a nil pointer.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	rv := reflect.ValueOf(v)
	return rv.Kind() == reflect.Pointer && rv.IsNil()
}
