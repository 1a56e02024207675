package grpclimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/gate"
)

const (
	defaultMaxPenalty = time.Minute
	longestPenalty    = time.Hour

	// What was not asked for by the call must not hold it up when the store hangs. A permit goes back without anybody
	// waiting for it; a penalty that nobody waits for would come after the caller's next attempt.
	giveBackPatience = 100 * time.Millisecond
	penaltyPatience  = time.Second
)

// Limiter is four interceptors around a Gate. Its methods are what grpc.WithChainUnaryInterceptor, ChainStreamInterceptor
// and the like take; one Limiter may serve any number of clients and servers at once. New makes it.
type Limiter struct {
	gate       Gate
	key        KeyFunc
	skip       func(ctx context.Context, fullMethod string) bool
	onError    func(ctx context.Context, fullMethod string, err error) error
	maxPenalty time.Duration
	messages   bool
	logger     *slog.Logger
	err        error
}

// Option configures a Limiter. An option with a bad value makes New fail.
type Option func(*Limiter)

// New returns the interceptors for a gate. Errors are *ConfigError.
func New(gate Gate, opts ...Option) (*Limiter, error) {
	l := &Limiter{gate: gate, key: ByMethod, maxPenalty: defaultMaxPenalty}
	if g, ok := gate.(one); isNil(gate) || ok && g.limiter == nil {
		l.fail("gate", "nil", "a gate with a limiter")
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

// WithKey sets how calls are keyed. Default: ByMethod.
func WithKey(key KeyFunc) Option {
	return func(l *Limiter) {
		if key == nil {
			l.fail("key", "nil", "a function (ByMetadata, ByOutgoingMetadata and Join make none of bad arguments)")
		}
		l.key = key
	}
}

// WithSkip lets calls pass for which skip is true, as if there were no interceptor: health checks, say. It is asked at
// every call, and must be safe for concurrent use. Default: none.
func WithSkip(skip func(ctx context.Context, fullMethod string) bool) Option {
	return func(l *Limiter) {
		if skip == nil {
			l.fail("skip", "nil", "a function")
		}
		l.skip = skip
	}
}

// WithOnError sets what a failing gate means for the call: err is an *Error that matches [ErrGate]. If the function returns
// nil, the call passes without a permit; otherwise it ends with what was returned. It is not asked about refusals, nor when
// the call's context has ended. It must be safe for concurrent use. Default: err itself, whose status is Unavailable. For a
// store that is away prefer tokenbucket.WithFailurePolicy: this is asked about wrong passwords and corrupt states, too.
func WithOnError(f func(ctx context.Context, fullMethod string, err error) error) Option {
	return func(l *Limiter) {
		if f == nil {
			l.fail("error function", "nil", "a function")
		}
		l.onError = f
	}
}

// WithMaxPenalty bounds how long a client holds the bucket back when the upstream asks for it, from 0 (never) to one hour.
// Default: one minute.
func WithMaxPenalty(d time.Duration) Option {
	return func(l *Limiter) {
		if d < 0 || d > longestPenalty {
			l.fail("max penalty", d, "0 to 1h")
		}
		l.maxPenalty = d
	}
}

// WithMessages makes StreamServer take a permit for each message that it receives, in place of one for the stream: it is
// handed to the service when its permit is due, and the next one is read only then. A refused message is lost; RecvMsg
// returns the *Error from then on, and the handler ought to end the stream with it. A call with one request costs one
// permit either way. Streams themselves cost nothing then: limit their number in another way. What a gate holds for a message
// (Entrance) goes back when the service asks for the next one, or has returned.
func WithMessages() Option {
	return func(l *Limiter) { l.messages = true }
}

// WithLogger sets who is told, as a warning, of what the gate failed at and no caller sees: a penalty that was not imposed,
// a permit that was not given back. Default: slog.Default().
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
}

var (
	errNotMade = errors.New("the Limiter was not made by New")
	errNothing = errors.New("the gate returned neither a reservation nor an error")
)

// begin returns nil for a call that is to be skipped.
func (l *Limiter) begin(ctx context.Context, method string) (*call, error) {
	if l == nil || l.gate == nil {
		return nil, &Error{Method: method, Code: codes.Unavailable, Err: fmt.Errorf("%w: %w", ErrGate, errNotMade)}
	}
	if l.skip != nil && l.skip(ctx, method) {
		return nil, nil
	}
	return &call{Limiter: l, ctx: ctx, method: method, key: l.key(ctx, method)}, nil
}

// enter takes a permit and waits until it is due. What the call holds then it has to leave when it has ended.
func (c *call) enter() (*gate.Place, error) {
	r, p, err := gate.Ask(c.ctx, c.gate, c.key)
	if err == nil && r == nil {
		err = errNothing
	}
	if err != nil {
		return nil, c.undecided(err)
	}
	if !r.OK() {
		return nil, c.error(codes.ResourceExhausted, ErrRefused, r.RetryAfter())
	}
	select {
	case <-r.Ready():
	case <-c.ctx.Done():
		c.giveBack(r)
	}
	if err := c.ctx.Err(); err != nil { // even if the permit is due: nothing would come of the call
		p.Leave()
		return nil, c.ended(err)
	}
	return p, nil
}

// undecided tells why there is neither a permit nor a refusal: the context has ended or would, or the gate failed.
func (c *call) undecided(err error) error {
	if ended := c.ctx.Err(); ended != nil {
		return c.ended(ended)
	}
	var late *tokenbucket.WaitError
	if errors.As(err, &late) && errors.Is(late.Reason, context.DeadlineExceeded) {
		return c.error(codes.ResourceExhausted, ErrRefused, gate.Sooner(c.ctx, late.Wait))
	}
	err = c.error(codes.Unavailable, fmt.Errorf("%w: %w", ErrGate, err), 0)
	if c.onError != nil {
		return c.onError(c.ctx, c.method, err)
	}
	return err
}

func (c *call) ended(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return c.error(codes.DeadlineExceeded, err, 0)
	}
	return c.error(codes.Canceled, err, 0)
}

func (c *call) error(code codes.Code, err error, retryAfter time.Duration) error {
	return &Error{Method: c.method, Key: c.key, Code: code, RetryAfter: retryAfter, Err: err}
}

// giveBack returns a permit, unless its time has come: then it is used. The context of the call has ended.
func (c *call) giveBack(permit *tokenbucket.Reservation) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), giveBackPatience)
	defer cancel()
	if err := permit.Cancel(ctx); err != nil {
		c.warn("grpclimit: a permit may be lost", err)
	}
}

func (c *call) warn(msg string, err error) {
	logger := c.logger
	if logger == nil {
		logger = slog.Default()
	}
	logger.WarnContext(c.ctx, msg, "method", c.method, "key", c.key, "error", err)
}
