package httplimit

import (
	"fmt"
	"log/slog"
	"net/http"
	"reflect"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// TransportOption configures [NewTransport].
type TransportOption interface{ transport(*settings) }

// MiddlewareOption configures [NewMiddleware].
type MiddlewareOption interface{ middleware(*settings) }

// Option configures either.
type Option interface {
	TransportOption
	MiddlewareOption
}

type (
	forTransport  func(*settings)
	forMiddleware func(*settings)
	forBoth       func(*settings)
)

func (o forTransport) transport(s *settings)   { o(s) }
func (o forMiddleware) middleware(s *settings) { o(s) }
func (o forBoth) transport(s *settings)        { o(s) }
func (o forBoth) middleware(s *settings)       { o(s) }

// settings is what a gate and options come to. An option with a bad value makes the constructor fail.
type settings struct {
	gate    gate.Gate
	key     KeyFunc
	onError func(*http.Request, error) error
	logger  *slog.Logger

	base       http.RoundTripper // the transport's own
	respond    bool
	maxPenalty time.Duration

	policy string // the middleware's own: a serialized String
	refuse http.Handler

	err error
}

func (s *settings) fail(field string, value any, want string) {
	if s.err == nil {
		s.err = fmt.Errorf("httplimit: %w: %s %v: want %s", tokenbucket.ErrInvalidConfig, field, value, want)
	}
}

func (s *settings) begin(g gate.Gate) {
	if isNil(g) {
		s.fail("gate", "nil", "a gate (gate.One makes none of a nil limiter)")
	}
	s.gate = g
}

func isNil(v any) bool {
	if v == nil {
		return true
	}
	rv := reflect.ValueOf(v)
	return rv.Kind() == reflect.Pointer && rv.IsNil()
}

func (s *settings) log() *slog.Logger {
	if s.logger != nil {
		return s.logger
	}
	return slog.Default()
}

// WithKey sets what makes a request's key. Default: ByPath.
func WithKey(key KeyFunc) Option {
	return forBoth(func(s *settings) {
		if key == nil {
			s.fail("key", "nil", "a function (ByHeader, ByClient, ByClientNetwork and Join make none of bad arguments)")
		}
		s.key = key
	})
}

// WithOnError sets what becomes of a request when the gate fails: err is a *GateError. If the function returns nil, the
// request passes without a permit; otherwise what it returns is the Transport's error, or makes the middleware answer 503.
// It is not asked about refusals, nor when the request's context has ended. It must be safe for concurrent use. Default: no
// request passes, and the middleware logs why. For a store that is away prefer tokenbucket.WithFailurePolicy: this is asked
// about wrong passwords and corrupt states, too.
func WithOnError(f func(r *http.Request, err error) error) Option {
	return forBoth(func(s *settings) {
		if f == nil {
			s.fail("error function", "nil", "a function")
		}
		s.onError = f
	})
}

// WithLogger sets where failed penalties are logged and, by a middleware without [WithOnError], failures of the gate. Default:
// slog.Default().
func WithLogger(l *slog.Logger) Option {
	return forBoth(func(s *settings) {
		if l == nil {
			s.fail("logger", "nil", "a logger")
		}
		s.logger = l
	})
}
