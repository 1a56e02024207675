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

// Option configures both.
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

// settings are a gate and the options. A bad value makes the constructor fail.
type settings struct {
	gate    gate.Gate
	key     KeyFunc
	cost    func(*http.Request) int // nil if each request costs one permit
	onError func(*http.Request, error) error
	logger  *slog.Logger

	priority func(*http.Request) tokenbucket.Priority // nil if the context has it

	base       http.RoundTripper // of transports
	respond    bool
	maxPenalty time.Duration
	used       func(*http.Response) int // nil if no response shows what its request has used

	policy string // of middlewares: a serialized String
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

// WithKey sets the function that returns a request's key. The default is ByPath.
func WithKey(key KeyFunc) Option {
	return forBoth(func(s *settings) {
		if key == nil {
			s.fail("key", "nil", "a function (ByHeader, ByClient, ByClientNetwork and Join make none of bad arguments)")
		}
		s.key = key
	})
}

// WithOnError sets the function that decides about a request when the gate fails: err is a *GateError. If it returns nil, the
// request passes without a permit. Otherwise a Transport returns its error, and a middleware sends 503. It is not called for
// refusals, nor if the request's context has ended. It must be safe for concurrent use. By default no request passes, and the
// middleware logs the error. For an unavailable store prefer tokenbucket.WithFailurePolicy, because this function is also
// called for wrong passwords and corrupt states.
func WithOnError(f func(r *http.Request, err error) error) Option {
	return forBoth(func(s *settings) {
		if f == nil {
			s.fail("error function", "nil", "a function")
		}
		s.onError = f
	})
}

// WithLogger sets the logger for failed penalties and, in a middleware without [WithOnError], for failures of the gate. The
// default is slog.Default().
func WithLogger(l *slog.Logger) Option {
	return forBoth(func(s *settings) {
		if l == nil {
			s.fail("logger", "nil", "a logger")
		}
		s.logger = l
	})
}
