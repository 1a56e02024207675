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
)

// Errors, to be matched with errors.Is where the interceptor runs. The other end of the wire sees the status alone.
var (
	// ErrRefused: no permit falls due in time. Nothing was taken.
	ErrRefused = errors.New("grpclimit: refused")
	// ErrGate: the gate could not decide, because its store is away, say. It wraps what the gate said.
	ErrGate = errors.New("grpclimit: gate failed")
)

// Error is why a call, or a message of a stream, was not let through.
type Error struct {
	// Method is the full method of the call, Key what the gate was asked for.
	Method, Key string
	// Code of the status: ResourceExhausted (no permit falls due in time: within what the gate allows, or before the
	// call's deadline), Unavailable (the gate failed), Canceled or DeadlineExceeded (the call's context has ended).
	Code codes.Code
	// RetryAfter is, for a refusal, when such a call could be let through if nobody else asks; else 0.
	RetryAfter time.Duration
	// Err is the reason: ErrRefused, an error that wraps ErrGate, or the context's.
	Err error
}

func (e *Error) Error() string {
	if e.Code == codes.ResourceExhausted {
		return fmt.Sprintf("%v: %s: key %.80q: retry after %v", e.Err, e.Method, e.Key, e.RetryAfter)
	}
	return fmt.Sprintf("grpclimit: %s: key %.80q: %v", e.Method, e.Key, e.Err)
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// GRPCStatus is the status that a client sees. It names neither key nor gate: a server's callers need not know them. A
// refusal has a RetryInfo.
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
	}
	return status.Newf(e.Code, "%v while waiting for a permit of %s", e.Err, e.Method)
}

// ConfigError tells which argument of New is wrong. It matches tokenbucket.ErrInvalidConfig.
type ConfigError struct {
	// Field and Value are what is wrong; Want says what would be right.
	Field string
	Value any
	Want  string
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("grpclimit: %s %v: want %s", e.Field, e.Value, e.Want)
}

// Unwrap returns tokenbucket.ErrInvalidConfig.
func (e *ConfigError) Unwrap() error { return tokenbucket.ErrInvalidConfig }
