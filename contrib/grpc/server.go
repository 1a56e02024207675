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

// pushback is the trailer by which a server tells a client with a retry policy when to try again (gRFC A6).
const pushback = "grpc-retry-pushback-ms"

// UnaryServer is a grpc.UnaryServerInterceptor: each call takes a permit before it is handled. It waits no longer than the
// caller does. A refusal has a RetryInfo, and the trailer by which clients with a retry policy know when to try again.
func (l *Limiter) UnaryServer(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	c, err := l.begin(ctx, info.FullMethod)
	var a *gate.Admission
	if err == nil && c != nil {
		a, err = c.enter()
	}
	if err != nil {
		if md := retryLater(err); md != nil {
			_ = grpc.SetTrailer(ctx, md) // only fails where there is no stream to have one
		}
		return nil, err
	}
	defer a.Leave()
	return handler(ctx, req)
}

// StreamServer is a grpc.StreamServerInterceptor: each stream takes a permit before it is handled; [WithMessages] makes it
// one for each message received. All else is as with UnaryServer.
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
	a, err := c.enter()
	if err != nil {
		stream.SetTrailer(retryLater(err))
		return err
	}
	defer a.Leave()
	return handler(srv, stream)
}

// serverStream takes a permit for each message. A message is under way until the service asks for the next one, or returns.
type serverStream struct {
	grpc.ServerStream
	call *call
	err  error

	mu        sync.Mutex
	admission *gate.Admission // of the last message
	ended     bool            // the service has returned, though it may still read
}

// RecvMsg takes the permit after the message: while none arrives, none is taken, and the end of the stream costs none.
func (s *serverStream) RecvMsg(m any) error {
	if s.err != nil {
		return s.err
	}
	s.holds(nil)
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	a, err := s.call.enter()
	if s.err = err; err != nil {
		s.SetTrailer(retryLater(err))
		return err
	}
	s.holds(a)
	return nil
}

// holds leaves what the last message held, for that of the next.
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

// end leaves what the last message held: the service has returned.
func (s *serverStream) end() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.holds(nil)
}

// retryLater is the trailer of a refusal, or nil.
func retryLater(err error) metadata.MD {
	var refusal *Error
	if !errors.Is(err, ErrRefused) || !errors.As(err, &refusal) {
		return nil
	}
	after := min(max(1, refusal.RetryAfter), math.MaxInt32*time.Millisecond)
	ms := (after + time.Millisecond - 1) / time.Millisecond // too early would be refused again
	return metadata.Pairs(pushback, strconv.FormatInt(int64(ms), 10))
}
