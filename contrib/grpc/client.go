package grpclimit

import (
	"context"
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// UnaryClient is a grpc.UnaryClientInterceptor: each call takes a permit before it leaves.
//
// When the upstream answers ResourceExhausted or Unavailable with a RetryInfo, the key is penalized before the call
// returns ([WithMaxPenalty]). A permit that was due is used, whether or not the call then finds a connection. A call that is
// given up before that gives its permit back.
//
// What the gate's admission holds goes back when the call has returned.
//
// What a retry policy of the service configuration sends again happens below all interceptors, and takes no further
// permit. Retries by an interceptor take one each if that interceptor is outside this one.
func (l *Limiter) UnaryClient(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	c, err := l.begin(ctx, method)
	if err != nil {
		return err
	}
	if c == nil {
		return invoker(ctx, method, req, reply, cc, opts...)
	}
	a, err := c.enter()
	if err != nil {
		return err
	}
	defer a.Leave()
	err = invoker(ctx, method, req, reply, cc, opts...)
	c.heed(err)
	return err
}

// StreamClient is a grpc.StreamClientInterceptor: each stream takes a permit before it is opened, its messages none. All
// else is as with UnaryClient; the upstream's RetryInfo is heeded when RecvMsg returns it.
//
// What the gate's admission holds goes back when the stream has ended. As gRPC demands of whoever opens a stream, read it until
// there is an error, or the answer of one that has only one; or end its context.
func (l *Limiter) StreamClient(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	c, err := l.begin(ctx, method)
	if err != nil {
		return nil, err
	}
	if c == nil {
		return streamer(ctx, desc, cc, method, opts...)
	}
	a, err := c.enter()
	if err != nil {
		return nil, err
	}
	opened := false
	defer func() {
		if !opened {
			a.Leave()
		}
	}()
	stream, err := streamer(ctx, desc, cc, method, opts...)
	if err != nil {
		c.heed(err)
		return nil, err
	}
	opened = true
	return c.hold(stream, a, desc, cc), nil
}

// heed penalizes the key if the upstream asks for that.
func (c *call) heed(err error) {
	d := min(retryDelay(err), c.maxPenalty)
	if d <= 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), penaltyTimeout)
	defer cancel()
	if err := c.gate.Penalize(ctx, c.key, d); err != nil {
		c.warn("grpclimit: the upstream's RetryInfo was not passed on to the fleet", err)
	}
}

// retryDelay is what the upstream asks for, or 0. A refusal by this process' own limits is not the upstream's word.
func retryDelay(err error) time.Duration {
	if ours := (*Error)(nil); errors.As(err, &ours) {
		return 0
	}
	s, _ := status.FromError(err)
	if code := s.Code(); code != codes.ResourceExhausted && code != codes.Unavailable {
		return 0
	}
	for _, detail := range s.Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			return info.GetRetryDelay().AsDuration()
		}
	}
	return 0
}
