package grpclimit

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// Errors for errors.Is, where the interceptor runs. The other end of the connection gets the status only.
var (
	// ErrRefused: no permit falls due in time, and none was taken.
	ErrRefused = errors.New("grpclimit: refused")
	// ErrGate: the gate could not decide, for instance because its store is unavailable. Errors that match it wrap the gate's
	// error.
	ErrGate = errors.New("grpclimit: gate failed")
)

// Error is returned for a call, or a message of a stream, that does not pass.
type Error struct {
	// Method is the full method of the call, Key its key.
	Method, Key string
	// Code of the status: ResourceExhausted (no permit falls due within the time that the gate allows, or before the call's
	// deadline), Unavailable (the gate failed), Canceled or DeadlineExceeded (the call's context has ended), InvalidArgument or Internal
	// ([WithCost]).
	Code codes.Code
	// RetryAfter is, for a refusal, the time after which such a call could pass if there are no others; otherwise 0.
	RetryAfter time.Duration
	// Member is, for a refusal, the bucket that refused, if the key does not name it: of a limiter that is several, or of gate.One
	// (gate.Admission).
	Member string
	// By is, for a refusal, the limit of the key that refused (gate.Admission).
	By gate.Decider
	// Err is the reason: ErrRefused, an error that wraps ErrGate, a *gate.CostError, or the context's error.
	Err error
}

func (e *Error) Error() string {
	if e.Code == codes.ResourceExhausted && e.By != gate.ByLimit {
		return fmt.Sprintf("%v: %s: key %.80q: by %v: retry after %v", e.Err, e.Method, e.Key, e.By, e.RetryAfter)
	}
	if e.Code == codes.ResourceExhausted && e.Member != "" {
		return fmt.Sprintf("%v: %s: key %.80q: bucket %q: retry after %v", e.Err, e.Method, e.Key, e.Member, e.RetryAfter)
	}
	if e.Code == codes.ResourceExhausted {
		return fmt.Sprintf("%v: %s: key %.80q: retry after %v", e.Err, e.Method, e.Key, e.RetryAfter)
	}
	return fmt.Sprintf("grpclimit: %s: key %.80q: %v", e.Method, e.Key, e.Err)
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// GRPCStatus returns the status for clients. It names neither key nor gate, because a server's callers need not know them.
// That of a refusal has a RetryInfo.
func (e *Error) GRPCStatus() *status.Status {
	switch e.Code {
	case codes.ResourceExhausted:
		s := status.Newf(e.Code, "rate limit of %s reached; retry after %v", e.Method, e.RetryAfter)
		if with, err := s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(e.RetryAfter)}); err == nil {
			return with
		}
		return s
	case codes.Unavailable:
		return status.Newf(e.Code, "the rate limit of %s could not be checked; retry later", e.Method)
	case codes.InvalidArgument:
		return status.Newf(e.Code, "the call costs more than the rate limit of %s can ever grant", e.Method)
	case codes.Internal:
		return status.Newf(e.Code, "the cost of a call of %s is not known", e.Method)
	}
	return status.Newf(e.Code, "%v while waiting for a permit of %s", e.Err, e.Method)
}

// ConfigError is returned for a bad argument of New. It matches tokenbucket.ErrInvalidConfig.
type ConfigError struct {
	// Field and Value are the bad argument, and Want is what would be valid.
	Field string
	Value any
	Want  string
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("grpclimit: %s %v: want %s", e.Field, e.Value, e.Want)
}

// Unwrap returns tokenbucket.ErrInvalidConfig.
func (e *ConfigError) Unwrap() error { return tokenbucket.ErrInvalidConfig }
