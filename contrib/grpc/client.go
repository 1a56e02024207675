package grpclimit

import (
	"context"
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// UnaryClient is a grpc.UnaryClientInterceptor: each call takes a permit before it is sent.
//
// If the upstream returns ResourceExhausted or Unavailable with a RetryInfo, the key's bucket is held back before the call
// returns ([WithMaxPenalty]). A permit whose due time has passed is used, even if the call then finds no connection. A call
// cancelled before that refunds its permit.
//
// The admission ends when the call returns.
//
// Each attempt of a call takes a permit, whether it is a retry by gRPC itself (transparent, or by a retry policy of the service
// configuration) or by an interceptor outside this one. A retry by gRPC that gets no permit is not sent, and the call ends with the
// *Error of that refusal, although the server may have received an earlier attempt. Retries by interceptors inside this one, closer to the
// connection, take one each, too. To count attempts, the interceptor adds credentials to the call's options that send nothing, and that
// contain those of the caller (grpc.PerRPCCredentials). If an interceptor inside this one sets credentials, it replaces these: dial with
// [CountAttempts] then. An attempt waits no longer than its own context lasts.
func (l *Limiter) UnaryClient(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	c, err := l.begin(ctx, method)
	if err != nil {
		return err
	}
	if c == nil {
		return invoker(ctx, method, req, reply, cc, opts...)
	}
	a, err := c.enter(req)
	if err != nil {
		return err
	}
	c.cc = cc
	all, ctx := c.attempts(req, a)
	defer all.leave()
	err = all.result(invoker(ctx, method, req, reply, cc, all.with(opts)...))
	a = all.last()
	c.heed(a, err)
	c.settle(a, reply, err)
	return err
}

// StreamClient is a grpc.StreamClientInterceptor: each stream takes a permit before it is opened; its messages take none.
// Otherwise it works like UnaryClient; the upstream's RetryInfo takes effect when RecvMsg returns it.
//
// The admission ends when the stream has ended. As gRPC requires of every stream, read it until there is an error, or until
// the only reply of a stream without further ones; or end its context.
func (l *Limiter) StreamClient(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	c, err := l.begin(ctx, method)
	if err != nil {
		return nil, err
	}
	if c == nil {
		return streamer(ctx, desc, cc, method, opts...)
	}
	a, err := c.enter(nil)
	if err != nil {
		return nil, err
	}
	c.cc = cc
	all, ctx := c.attempts(nil, a)
	opened := false
	defer func() {
		if !opened {
			all.leave()
		}
	}()
	stream, err := streamer(ctx, desc, cc, method, all.with(opts)...)
	if err = all.result(err); err != nil {
		c.heed(all.last(), err)
		return nil, err
	}
	opened = true
	return c.hold(stream, all, desc), nil
}

// heed holds back what the call has used, or the key's bucket, if the upstream asks for that.
func (c *call) heed(a *gate.Admission, err error) {
	d := min(retryDelay(err), c.maxPenalty)
	if d <= 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), penaltyTimeout)
	defer cancel()
	if err := gate.Penalize(ctx, c.gate, a, c.key, d); err != nil {
		c.warn("grpclimit: penalty failed, further calls may reach the upstream before its RetryInfo is over", err)
	}
}

// retryDelay returns the delay that the upstream asks for, or 0. A refusal by this process' own limits is not the upstream's.
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
