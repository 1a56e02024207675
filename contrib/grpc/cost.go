package grpclimit

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// CostFunc returns how many permits a call or a message costs. message is the request of a call that is not a stream, or the message of a
// stream with [WithMessages]; nil for a stream that is opened. It must be safe for concurrent use, and must not change the message.
type CostFunc func(ctx context.Context, fullMethod string, message any) int

// WithCost sets the function that returns the cost of each call, and with [WithMessages] of each message that a server receives. By default
// each costs one permit. What costs 0 passes, and the gate is not asked. If the function panics, the call does not pass.
//
// A cost that the limits of the key can never grant ends the call with the status InvalidArgument, and a cost below 0 with Internal. The
// error matches neither [ErrRefused] nor [ErrGate], but *gate.CostError, and [WithOnError] is not asked.
//
// If the cost is known only afterwards, the function returns an estimate, at least 1, and [WithActualCost] or gate.FromContext settles it. A
// service finds its admission in the context of the call or stream, which with WithMessages has that of the last message; the caller of a
// stream in the context of the stream.
//
// New fails unless the gate is a gate.CostGate.
func WithCost(cost CostFunc) Option {
	return func(l *Limiter) {
		if cost == nil {
			l.fail("cost function", "nil", "a function")
		}
		if _, ok := l.gate.(gate.CostGate); !ok {
			l.fail("cost function", "of a gate whose calls all cost one permit", "a gate.CostGate")
		}
		l.cost = cost
	}
}

// WithActualCost sets the function that returns how many permits a call has used, by its reply: the cost is settled in the background with that
// number (gate.Admission.SettleLater). It is for calls that are not streams, and not called after an error. A number below 0 means that it
// is not known, and the cost of [WithCost] stays.
func WithActualCost(used CostFunc) Option {
	return func(l *Limiter) {
		if used == nil {
			l.fail("actual cost function", "nil", "a function")
		}
		l.used = used
	}
}

// ask asks the gate about a call or a message.
func (c *call) ask(message any) (*gate.Admission, error) {
	if c.cost == nil {
		return gate.Ask(c.ctx, c.gate, c.key)
	}
	return gate.AskN(c.ctx, c.gate, c.key, c.cost(c.ctx, c.method, message))
}

// admitted returns a context with the admission.
func admitted(ctx context.Context, a *gate.Admission) context.Context {
	if a == nil {
		return ctx
	}
	return gate.NewContext(ctx, a)
}

// settle settles the cost of a call with what its reply shows.
func (c *call) settle(a *gate.Admission, reply any, err error) {
	if c.used == nil || err != nil {
		return
	}
	if used := c.used(c.ctx, c.method, reply); used >= 0 {
		a.SettleLater(used)
	}
}

// costCode returns the status of an error about the cost of a call; OK for other errors.
func costCode(err error) codes.Code {
	var wrong *gate.CostError
	switch {
	case !errors.As(err, &wrong):
		return codes.OK
	case wrong.Cost < 0:
		return codes.Internal
	}
	return codes.InvalidArgument
}

// admittedStream is a stream whose context has the admission.
type admittedStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *admittedStream) Context() context.Context { return s.ctx }
