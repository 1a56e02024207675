package httplimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// PenaltyPolicy is implemented by gates that decide which responses of an upstream hold a key's bucket back. With other gates, 429 and 503 do.
type PenaltyPolicy interface {
	// Penalizes reports whether a response of that status, 429 or 503, with a Retry-After holds the key's bucket back. It may be called by
	// many goroutines at once.
	Penalizes(key string, status int) bool
}

// ErrRefused is what every RefusedError is, to be matched with errors.Is.
var ErrRefused = errors.New("httplimit: refused")

// ErrNoKey is returned for a request whose key is [NoKey]. Nothing was sent and nothing was taken.
var ErrNoKey = errors.New("httplimit: the request has no key that limits it")

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

// penaltyTimeout bounds how long a penalty may take, whose request may have ended.
const penaltyTimeout = time.Second

// refused reports whether enter failed because the gate refused the call.
func refused(a *gate.Admission) bool { return a != nil && !a.OK }

// enter blocks until the call may begin. With a *RefusedError comes the admission that it is made of. Unless enter fails, the caller must
// call Leave when the call has ended.
func (s *settings) enter(r *http.Request, key string) (*gate.Admission, error) {
	ctx := r.Context()
	a, err := gate.Ask(ctx, s.gate, key)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		err = &GateError{key, err}
		if s.onError != nil {
			err = s.onError(r, err)
		}
		return &gate.Admission{OK: true}, err
	case !a.OK:
		return a, &RefusedError{key, a.RetryAfter}
	}
	return a, nil
}

// penalize holds the key's bucket back, whether or not the request's context has ended.
func (s *settings) penalize(ctx context.Context, key string, d time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), penaltyTimeout)
	defer cancel()
	if err := s.gate.Penalize(ctx, key, d); err != nil {
		s.log().WarnContext(ctx, "httplimit: penalty failed, so the upstream's Retry-After may not hold the bucket back", "key", key, "retryAfter", d, "error", err)
	}
}
