package grpclimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

const (
	defaultMaxPenalty = time.Minute
	longestPenalty    = time.Hour

	// penaltyTimeout bounds how long a call waits for the penalty that it causes. Without the wait, the caller's next attempt
	// could come before the penalty.
	penaltyTimeout = time.Second
)

// Limiter has four interceptors for a gate.Gate. Its methods are arguments of grpc.WithChainUnaryInterceptor,
// ChainStreamInterceptor and the like. One Limiter may serve any number of clients and servers at once. New makes it.
type Limiter struct {
	gate       gate.Gate
	key        KeyFunc
	skip       func(ctx context.Context, fullMethod string) bool
	onError    func(ctx context.Context, fullMethod string, err error) error
	cost       CostFunc // nil if each call or message costs one permit
	used       CostFunc // nil if no reply shows what its call has used
	maxPenalty time.Duration
	priority   PriorityFunc // nil if the context has it
	messages   bool
	logger     *slog.Logger
	uncounted  sync.Once // the warning about calls whose attempts are not counted
	err        error
}

// Option configures a Limiter. A bad value makes New fail.
type Option func(*Limiter)

// New returns a Limiter for a gate. Errors are *ConfigError.
func New(g gate.Gate, opts ...Option) (*Limiter, error) {
	l := &Limiter{gate: g, key: ByMethod, maxPenalty: defaultMaxPenalty}
	if isNil(g) {
		l.fail("gate", "nil", "a gate (gate.One makes none of a nil limiter)")
	}
	for _, opt := range opts {
		if opt == nil {
			l.fail("option", "nil", "no nil options")
			continue
		}
		opt(l)
	}
	if l.err != nil {
		return nil, l.err
	}
	return l, nil
}

func (l *Limiter) fail(field string, value any, want string) {
	if l.err == nil {
		l.err = &ConfigError{field, value, want}
	}
}

func isNil(v any) bool {
	rv := reflect.ValueOf(v)
	return v == nil || rv.Kind() == reflect.Pointer && rv.IsNil()
}

// WithKey sets the function that returns a call's key. The default is ByMethod.
func WithKey(key KeyFunc) Option {
	return func(l *Limiter) {
		if key == nil {
			l.fail("key", "nil", "a function (ByMetadata, ByOutgoingMetadata and Join make none of bad arguments)")
		}
		l.key = key
	}
}

// WithSkip sets a function that selects calls that pass without a limit, such as health checks. It is called for every call,
// and must be safe for concurrent use. By default no call is skipped.
func WithSkip(skip func(ctx context.Context, fullMethod string) bool) Option {
	return func(l *Limiter) {
		if skip == nil {
			l.fail("skip", "nil", "a function")
		}
		l.skip = skip
	}
}

// WithOnError sets the function that decides about a call when the gate fails: err is an *Error that matches [ErrGate]. If it
// returns nil, the call passes without a permit; otherwise the call ends with its error. It is not called for refusals, nor
// if the call's context has ended. It must be safe for concurrent use. By default the call ends with err, whose status is
// Unavailable. For an unavailable store prefer tokenbucket.WithFailurePolicy, because this function is also called for wrong
// passwords and corrupt states.
func WithOnError(f func(ctx context.Context, fullMethod string, err error) error) Option {
	return func(l *Limiter) {
		if f == nil {
			l.fail("error function", "nil", "a function")
		}
		l.onError = f
	}
}

// WithMaxPenalty bounds the time for which a client holds the bucket back when the upstream asks for it, from 0 (never) to
// one hour. The default is one minute.
func WithMaxPenalty(d time.Duration) Option {
	return func(l *Limiter) {
		if d < 0 || d > longestPenalty {
			l.fail("max penalty", d, "0 to 1h")
		}
		l.maxPenalty = d
	}
}

// WithMessages makes StreamServer take a permit for each message received, in place of one for the stream. The service gets a
// message when its permit is due, and the next message is read only then. A refused message is lost; RecvMsg returns the
// *Error from then on, and the handler should end the stream with it. A call with one request costs one permit in either
// mode. Streams themselves are then free: limit their number by other means. The admission of a message ends when the service
// asks for the next one, or has returned.
func WithMessages() Option {
	return func(l *Limiter) { l.messages = true }
}

// WithLogger sets the logger for failed penalties, which no caller sees. The default is slog.Default().
func WithLogger(logger *slog.Logger) Option {
	return func(l *Limiter) {
		if logger == nil {
			l.fail("logger", "nil", "a logger")
		}
		l.logger = logger
	}
}

// call is one call that needs a permit.
type call struct {
	*Limiter
	ctx         context.Context
	method, key string
	cc          *grpc.ClientConn // of a client
}

var errNotMade = errors.New("the Limiter was not made by New")

// begin returns nil for a call that is to be skipped.
func (l *Limiter) begin(ctx context.Context, method string) (*call, error) {
	if l == nil || l.gate == nil {
		return nil, &Error{Method: method, Code: codes.Unavailable, Err: fmt.Errorf("%w: %w", ErrGate, errNotMade)}
	}
	if l.skip != nil && l.skip(ctx, method) {
		return nil, nil
	}
	return &call{Limiter: l, ctx: l.prioritized(ctx, method), method: method, key: l.key(ctx, method)}, nil
}

// enter blocks until the call, or a message of it, may begin. Unless it fails, the caller must call Leave when the call has ended.
func (c *call) enter(message any) (*gate.Admission, error) {
	a, err := c.ask(message)
	switch {
	case err != nil && c.ctx.Err() != nil:
		return nil, c.ended(c.ctx.Err())
	case costCode(err) != codes.OK:
		return nil, c.error(costCode(err), err, 0)
	case err != nil:
		err = c.error(codes.Unavailable, fmt.Errorf("%w: %w", ErrGate, err), 0)
		if c.onError != nil {
			err = c.onError(c.ctx, c.method, err)
		}
		return &gate.Admission{OK: true}, err
	case !a.OK:
		return nil, c.refused(a)
	}
	return a, nil
}

func (c *call) ended(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return c.error(codes.DeadlineExceeded, err, 0)
	}
	return c.error(codes.Canceled, err, 0)
}

// refused returns the error of a refusal.
func (c *call) refused(a *gate.Admission) error {
	return &Error{Method: c.method, Key: c.key, Code: codes.ResourceExhausted, RetryAfter: a.RetryAfter, Member: a.Member, By: a.By, Err: ErrRefused}
}

func (c *call) error(code codes.Code, err error, retryAfter time.Duration) error {
	return &Error{Method: c.method, Key: c.key, Code: code, RetryAfter: retryAfter, Err: err}
}

func (c *call) warn(msg string, err error) {
	logger := c.logger
	if logger == nil {
		logger = slog.Default()
	}
	logger.WarnContext(c.ctx, msg, "method", c.method, "key", c.key, "error", err)
}
