package httplimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// PenaltyPolicy is an optional interface of gates: it decides which responses of an upstream hold a key's bucket back. With
// other gates, 429 and 503 do.
type PenaltyPolicy interface {
	// Penalizes reports whether a response with that status, 429 or 503, and a Retry-After holds the key's bucket back. It
	// may be called concurrently.
	Penalizes(key string, status int) bool
}

// ErrRefused is matched by every RefusedError, with errors.Is.
var ErrRefused = errors.New("httplimit: refused")

// ErrNoKey is returned for a request whose key is [NoKey]. The request was not sent, and no permit was taken.
var ErrNoKey = errors.New("httplimit: the request has no key that limits it")

// RefusedError is returned if no permit falls due in time: within the time that the gate allows, or before the request's
// deadline. The request was not sent, unless the error is within a [RepeatError], and no permit was taken.
type RefusedError struct {
	// Key of the request.
	Key string
	// RetryAfter is the time after which such a request could pass if there are no others.
	RetryAfter time.Duration
	// Member is the bucket that refused, if the key does not name it: of a limiter that is several, or of gate.One (gate.Admission).
	Member string
	// By is the limit of the key that refused: its rate (gate.ByLimit), window, concurrency, a penalty, or a row without any calls.
	By gate.Decider
}

func (e *RefusedError) Error() string {
	switch {
	case e.By != gate.ByLimit:
		return fmt.Sprintf("%v: key %.80q: by %v: try again in %v", ErrRefused, e.Key, e.By, e.RetryAfter)
	case e.Member != "":
		return fmt.Sprintf("%v: key %.80q: bucket %q: try again in %v", ErrRefused, e.Key, e.Member, e.RetryAfter)
	}
	return fmt.Sprintf("%v: key %.80q: try again in %v", ErrRefused, e.Key, e.RetryAfter)
}

// Unwrap returns [ErrRefused].
func (e *RefusedError) Unwrap() error { return ErrRefused }

// GateError is returned if the gate failed. There was no decision about the request, and it was not sent.
type GateError struct {
	// Key of the request.
	Key string
	// Err is the gate's error.
	Err error
}

func (e *GateError) Error() string { return fmt.Sprintf("httplimit: key %.80q: %v", e.Key, e.Err) }

// Unwrap returns Err.
func (e *GateError) Unwrap() error { return e.Err }

// RepeatError is returned if a request was sent without getting a response, and must not be sent again. The upstream may have
// received it.
type RepeatError struct {
	// Err is the reason: a *RefusedError or a *GateError of the next try, or a *gate.CostError.
	Err error
}

func (e *RepeatError) Error() string {
	return fmt.Sprintf("httplimit: the request was sent, but its connection ended without a response, and it was not sent again: %v", e.Err)
}

// Unwrap returns Err.
func (e *RepeatError) Unwrap() error { return e.Err }

// penaltyTimeout bounds a penalty, because the request that causes it may have ended.
const penaltyTimeout = time.Second

// refused reports whether enter failed because the gate refused the call.
func refused(a *gate.Admission) bool { return a != nil && !a.OK }

// enter blocks until the call may begin. A *RefusedError is returned together with the refusal. Unless enter fails, the
// caller must call Leave when the call has ended.
func (s *settings) enter(r *http.Request, key string) (*gate.Admission, error) {
	ctx := r.Context()
	a, err := s.ask(r, key)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case isCost(err):
		return nil, err
	case err != nil:
		err = &GateError{key, err}
		if s.onError != nil {
			err = s.onError(r, err)
		}
		return &gate.Admission{OK: true}, err
	case !a.OK:
		return a, &RefusedError{key, a.RetryAfter, a.Member, a.By}
	}
	return a, nil
}

// penalize holds back what the request has used, or the key's bucket, even if the request's context has ended.
func (s *settings) penalize(ctx context.Context, a *gate.Admission, key string, d time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), penaltyTimeout)
	defer cancel()
	if err := gate.Penalize(ctx, s.gate, a, key, d); err != nil {
		s.log().WarnContext(ctx, "httplimit: penalty failed, further calls may reach the upstream before its Retry-After is over", "key", key, "retryAfter", d, "error", err)
	}
}
