package grpclimit

import (
	"context"
	"errors"
	"math"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// pushback is the trailer with the delay of the next attempt, for clients with a retry policy (gRFC A6).
const pushback = "grpc-retry-pushback-ms"

// UnaryServer is a grpc.UnaryServerInterceptor: each call takes a permit before it is handled. It waits no longer than the
// caller does. A refusal has a RetryInfo, and a trailer with the delay for clients with a retry policy.
func (l *Limiter) UnaryServer(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	c, err := l.begin(ctx, info.FullMethod)
	var a *gate.Admission
	if err == nil && c != nil {
		a, err = c.enter(req)
	}
	if err != nil {
		if md := retryLater(err); md != nil {
			_ = grpc.SetTrailer(ctx, md) // it fails only without a stream to send the trailer on
		}
		return nil, err
	}
	defer a.Leave()
	if c == nil {
		return handler(ctx, req)
	}
	reply, err := handler(admitted(ctx, a), req)
	c.settle(a, reply, err)
	return reply, err
}

// StreamServer is a grpc.StreamServerInterceptor: each stream takes a permit before it is handled, or with [WithMessages] one
// for each message received. Otherwise it works like UnaryServer.
func (l *Limiter) StreamServer(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	c, err := l.begin(stream.Context(), info.FullMethod)
	switch {
	case err != nil:
		return err
	case c == nil:
		return handler(srv, stream)
	case c.messages:
		s := &serverStream{ServerStream: stream, call: c}
		defer s.end()
		return handler(srv, s)
	}
	a, err := c.enter(nil)
	if err != nil {
		stream.SetTrailer(retryLater(err))
		return err
	}
	defer a.Leave()
	return handler(srv, &admittedStream{stream, admitted(stream.Context(), a)})
}

// serverStream takes a permit for each message. A message is in progress until the service asks for the next one, or returns.
type serverStream struct {
	grpc.ServerStream
	call *call
	err  error

	mu        sync.Mutex
	admission *gate.Admission // of the last message
	ended     bool            // the service has returned, but may still read
}

// RecvMsg takes the permit after the message has arrived: waiting for a message takes no permit, and neither does the end of
// the stream.
func (s *serverStream) RecvMsg(m any) error {
	if s.err != nil {
		return s.err
	}
	s.holds(nil)
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	a, err := s.call.enter(m)
	if s.err = err; err != nil {
		s.SetTrailer(retryLater(err))
		return err
	}
	s.holds(a)
	return nil
}

// Context has the admission of the last message.
func (s *serverStream) Context() context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	return admitted(s.ServerStream.Context(), s.admission)
}

// holds ends the admission of the last message, and keeps that of the next.
func (s *serverStream) holds(next *gate.Admission) {
	s.mu.Lock()
	last, ended := s.admission, s.ended
	s.admission = next
	s.mu.Unlock()
	last.Leave()
	if ended {
		next.Leave()
	}
}

// end ends the admission of the last message, after the service has returned.
func (s *serverStream) end() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.holds(nil)
}

// retryLater returns the trailer of a refusal; nil for other errors, and if the delay is not known: then the client's own backoff applies.
func retryLater(err error) metadata.MD {
	var refusal *Error
	if !errors.Is(err, ErrRefused) || !errors.As(err, &refusal) || refusal.RetryAfter <= 0 {
		return nil
	}
	after := min(refusal.RetryAfter, math.MaxInt32*time.Millisecond)
	ms := (after + time.Millisecond - 1) / time.Millisecond // rounded up, because an early attempt would be refused again
	return metadata.Pairs(pushback, strconv.FormatInt(int64(ms), 10))
}
