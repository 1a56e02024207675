package httplimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/seam"
)

// Gate decides about calls by key. A *registry.Registry is one; One makes one from a single limiter. It is called by many
// goroutines at once. The gate must bound how many keys it keeps: a key may contain anything that a request contains.
type Gate interface {
	// Reserve takes a permit for the key, if it falls due within what the key's configuration allows; a refusal is a
	// reservation that is not OK. An error tells that nothing could be decided.
	Reserve(ctx context.Context, key string) (*tokenbucket.Reservation, error)
	// Penalize holds the key's bucket back for the whole fleet for d, which is positive and at most an hour.
	Penalize(ctx context.Context, key string, d time.Duration) error
}

// One is the gate in which every key is one bucket. A permit may fall due up to timeout later; 0 or less: it must be due at
// once. If no state of the bucket can meet the timeout, every request is a failure, tokenbucket.ErrNeverGranted. A nil
// limiter makes the constructor that is given the gate fail.
func One(l *tokenbucket.RateLimiter, timeout time.Duration) Gate { return one{l, timeout} }

// Refused returns a reservation that is not OK, for a gate that refuses without a bucket. One that passes without a bucket is the
// zero Reservation.
func Refused(retryAfter time.Duration) *tokenbucket.Reservation {
	return seam.Refused(retryAfter).(*tokenbucket.Reservation)
}

type one struct {
	limiter *tokenbucket.RateLimiter
	timeout time.Duration
}

func (g one) Reserve(ctx context.Context, _ string) (*tokenbucket.Reservation, error) {
	return g.limiter.TryReserve(ctx, 1, g.timeout)
}

func (g one) Penalize(ctx context.Context, _ string, d time.Duration) error {
	return g.limiter.Penalize(ctx, d)
}

// ErrRefused is what every RefusedError is, to be matched with errors.Is.
var ErrRefused = errors.New("httplimit: refused")

// RefusedError tells that no permit falls due in time: within what the gate allows, or before the request's deadline.
// Nothing was sent and nothing was taken.
type RefusedError struct {
	// Key of the request.
	Key string
	// RetryAfter is when such a request could pass if nobody else asks.
	RetryAfter time.Duration
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("%v: key %.80q: try again in %v", ErrRefused, e.Key, e.RetryAfter)
}

// Unwrap returns [ErrRefused].
func (e *RefusedError) Unwrap() error { return ErrRefused }

// GateError tells that the gate failed: nothing could be decided about the request, and it was not sent.
type GateError struct {
	// Key of the request.
	Key string
	// Err is the gate's.
	Err error
}

func (e *GateError) Error() string { return fmt.Sprintf("httplimit: key %.80q: %v", e.Key, e.Err) }

// Unwrap returns Err.
func (e *GateError) Unwrap() error { return e.Err }

const (
	// aside bounds what is done for the gate after a request is over, whose own context may have ended.
	aside = time.Second
	// patience is how long a caller is kept for its permit to be given back. In nearly all cases it is by then, and a call
	// that follows at once finds it.
	patience = 20 * time.Millisecond
)

// errNothing is of a gate that breaks its contract.
var errNothing = errors.New("the gate returned neither a reservation nor an error")

// unlimited is the permit of a call that passes though nothing was decided.
var unlimited = &tokenbucket.Reservation{}

func refused(permit *tokenbucket.Reservation) bool { return permit != nil && !permit.OK() }

// admit takes a permit and waits until it is due. With a RefusedError comes the reservation that says so. When the call has ended, it
// leaves, unless there was an error.
func (s *settings) admit(r *http.Request, key string) (*tokenbucket.Reservation, *gate.Place, error) {
	ctx := r.Context()
	permit, place, err := reserve(ctx, s.gate, key)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, nil, context.Cause(ctx)
	case err != nil:
		err = &GateError{key, err}
		if s.onError != nil {
			err = s.onError(r, err)
		}
		return unlimited, nil, err
	case !permit.OK():
		return permit, nil, &RefusedError{key, permit.RetryAfter()}
	}
	select {
	case <-permit.Ready():
	case <-ctx.Done():
		s.giveBack(ctx, key, permit)
	}
	if ctx.Err() != nil { // even if the permit is due: nothing would come of the request
		place.Leave()
		return nil, nil, context.Cause(ctx)
	}
	return permit, place, nil
}

// reserve asks the gate. A wait that only the context is too short for is a refusal, not a failure.
func reserve(ctx context.Context, g Gate, key string) (*tokenbucket.Reservation, *gate.Place, error) {
	permit, place, err := gate.Ask(ctx, g, key)
	var long *tokenbucket.WaitError
	if errors.As(err, &long) && errors.Is(long.Reason, context.DeadlineExceeded) {
		return Refused(gate.Sooner(ctx, long.Wait)), nil, nil
	}
	if err == nil && permit == nil {
		err = errNothing
	}
	return permit, place, err
}

// giveBack cancels a permit, unless its time has come: then it is used. It returns when that is done, or when the caller has been
// patient enough.
func (s *settings) giveBack(ctx context.Context, key string, permit *tokenbucket.Reservation) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), aside)
		defer cancel()
		if err := permit.Cancel(ctx); err != nil {
			s.log().WarnContext(ctx, "httplimit: a permit may be lost", "key", key, "error", err)
		}
	}()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}

// penalize holds the key's bucket back, whether or not the request's context has ended.
func (s *settings) penalize(ctx context.Context, key string, d time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), aside)
	defer cancel()
	if err := s.gate.Penalize(ctx, key, d); err != nil {
		s.log().WarnContext(ctx, "httplimit: Retry-After could not be told to the fleet", "key", key, "retryAfter", d, "error", err)
	}
}
