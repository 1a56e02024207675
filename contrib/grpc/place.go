package grpclimit

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
)

// clientStream ends its call's admission when the stream has ended. gRPC requires every user of a stream to end it in one of
// these ways: read until an error, or until the only reply of a stream without further ones; an error of SendMsg or Header;
// the end of the context; closing the connection.
type clientStream struct {
	grpc.ClientStream
	call     *call
	single   bool // the server sends only one message
	heeded   bool
	leave    func()
	attempts *attempts
}

// Context has the admission of the stream.
func (s *clientStream) Context() context.Context {
	return admitted(s.ClientStream.Context(), s.attempts.last())
}

// hold returns the stream with an admission that ends when either side ends the stream. That of the first attempt may hold nothing, and that of
// a later one a place.
func (c *call) hold(stream grpc.ClientStream, all *attempts, desc *grpc.StreamDesc) *clientStream {
	s := &clientStream{ClientStream: stream, call: c, single: desc != nil && !desc.ServerStreams, attempts: all}
	ctx, cancel := context.WithCancel(c.ctx)
	s.leave = func() {
		cancel()
		all.leave()
	}
	cc := c.cc
	if cc == nil {
		context.AfterFunc(ctx, all.leave)
		return s
	}
	go func() {
		for is := cc.GetState(); is != connectivity.Shutdown && cc.WaitForStateChange(ctx, is); is = cc.GetState() {
		}
		s.leave()
	}()
	return s
}

// RecvMsg returns the stream's status at its end, and again with every further call.
func (s *clientStream) RecvMsg(m any) error {
	err := s.attempts.result(s.ClientStream.RecvMsg(m))
	if err == nil && !s.single {
		return nil
	}
	if !s.heeded {
		s.heeded = true
		s.call.heed(s.attempts.last(), err)
	}
	s.leave()
	return err
}

// SendMsg ends the stream if it fails.
func (s *clientStream) SendMsg(m any) error {
	err := s.attempts.result(s.ClientStream.SendMsg(m))
	if err != nil {
		s.leave()
	}
	return err
}

// Header returns no metadata if the stream has ended without any.
func (s *clientStream) Header() (metadata.MD, error) {
	md, err := s.ClientStream.Header()
	err = s.attempts.result(err)
	if md == nil || err != nil {
		s.leave()
	}
	return md, err
}
