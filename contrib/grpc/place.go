package grpclimit

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// clientStream gives back what its call holds when the stream has ended. gRPC asks of its user to make that known in one of these ways:
// by reading until an error, or the one answer of a stream that has only one; by an error of SendMsg or Header; by the end of the
// context; by closing the connection.
type clientStream struct {
	grpc.ClientStream
	call   *call
	single bool // one message is all the server sends
	heeded bool
	leave  func()
}

// hold returns the stream, which leaves when it has ended, whichever side ends it.
func (c *call) hold(stream grpc.ClientStream, a *gate.Admission, desc *grpc.StreamDesc, cc *grpc.ClientConn) *clientStream {
	s := &clientStream{ClientStream: stream, call: c, single: desc != nil && !desc.ServerStreams, leave: func() {}}
	if !a.Holds() {
		return s
	}
	ctx, cancel := context.WithCancel(c.ctx)
	s.leave = func() {
		cancel()
		a.Leave()
	}
	if cc == nil {
		context.AfterFunc(ctx, a.Leave)
		return s
	}
	go func() {
		for is := cc.GetState(); is != connectivity.Shutdown && cc.WaitForStateChange(ctx, is); is = cc.GetState() {
		}
		s.leave()
	}()
	return s
}

// RecvMsg is where the status of a stream arrives, and after that it arrives again with every call.
func (s *clientStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err == nil && !s.single {
		return nil
	}
	if !s.heeded {
		s.heeded = true
		s.call.heed(err)
	}
	s.leave()
	return err
}

// SendMsg aborts the stream when it fails.
func (s *clientStream) SendMsg(m any) error {
	err := s.ClientStream.SendMsg(m)
	if err != nil {
		s.leave()
	}
	return err
}

// Header returns nothing if the stream has ended without any.
func (s *clientStream) Header() (metadata.MD, error) {
	md, err := s.ClientStream.Header()
	if md == nil || err != nil {
		s.leave()
	}
	return md, err
}
