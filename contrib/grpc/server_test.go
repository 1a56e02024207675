package grpclimit_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// With WithMessages, a permit is taken for each message that a service receives: it reads no faster than permits come.
func TestMessages(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			limiter, clock := bucket(t)
			s := &service{}
			l := interceptors(t, gate.One(limiter, time.Second), grpclimit.WithMessages())
			client := dial(t, serve(t, s, onServer(l)...))
			ended := make(chan error, 1)
			go func() { ended <- kind.call(limit(t), client) }()
			for i := int64(1); i < kind.received; i++ { // the first permit is there
				require.NoError(t, clock.BlockUntilContext(limit(t), 1))
				require.Equal(t, i, s.received.Load())
				clock.Advance(time.Second)
			}
			require.NoError(t, <-ended)
			require.Equal(t, kind.received, s.received.Load())
			require.False(t, full(t, limiter))
			clock.Advance(time.Second) // neither the stream nor its end has cost anything
			require.True(t, full(t, limiter))
		})
	}
}

// The message that is refused ends the stream; those before it have arrived.
func TestMessageRefused(t *testing.T) {
	limiter, _ := bucket(t)
	s := &service{}
	client := dial(t, serve(t, s, onServer(interceptors(t, gate.One(limiter, 0), grpclimit.WithMessages()))...))
	stream, err := client.FullDuplexCall(limit(t))
	require.NoError(t, err)
	require.NoError(t, stream.Send(&pb.StreamingOutputCallRequest{}))
	_, err = stream.Recv()
	require.NoError(t, err)
	require.NoError(t, stream.Send(&pb.StreamingOutputCallRequest{}))
	_, err = stream.Recv()
	require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
	after, ok := retryInfo(err)
	require.True(t, ok)
	require.Equal(t, time.Second, after)
	require.Equal(t, []string{"1000"}, stream.Trailer()["grpc-retry-pushback-ms"])
	require.EqualValues(t, 1, s.received.Load())
}

// A service that reads on after a refusal gets the same answer, and asks the gate no more.
func TestMessageRefusedForGood(t *testing.T) {
	g := &stub{enter: func() (*gate.Admission, error) { return &gate.Admission{RetryAfter: time.Second}, nil }}
	l := interceptors(t, g, grpclimit.WithMessages())
	err := l.StreamServer(nil, &fakeStream{ctx: t.Context()}, &grpc.StreamServerInfo{FullMethod: unary}, func(_ any, stream grpc.ServerStream) error {
		first := stream.RecvMsg(nil)
		require.ErrorIs(t, first, grpclimit.ErrRefused)
		require.Same(t, first, stream.RecvMsg(nil))
		return first
	})
	require.ErrorIs(t, err, grpclimit.ErrRefused)
	require.Len(t, g.keys, 1)
}

type fakeStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *fakeStream) Context() context.Context { return s.ctx }
func (s *fakeStream) RecvMsg(any) error        { return nil }
func (s *fakeStream) SetTrailer(metadata.MD)   {}

// The trailer is in whole milliseconds, never early, never 0; other errors, and a delay that is not known, have none.
func TestPushback(t *testing.T) {
	for _, test := range []struct {
		after time.Duration
		want  string
	}{
		{1, "1"},
		{time.Millisecond, "1"},
		{time.Millisecond + 1, "2"},
		{1<<63 - 1, "2147483647"},
	} {
		g := &stub{enter: func() (*gate.Admission, error) { return &gate.Admission{RetryAfter: test.after}, nil }}
		client := dial(t, serve(t, &service{}, onServer(interceptors(t, g))...))
		var trailer metadata.MD
		_, err := client.UnaryCall(limit(t), &pb.SimpleRequest{}, grpc.Trailer(&trailer))
		require.Equal(t, codes.ResourceExhausted, status.Code(err))
		require.Equal(t, []string{test.want}, trailer["grpc-retry-pushback-ms"])

		stream, err := client.StreamingOutputCall(limit(t), &pb.StreamingOutputCallRequest{})
		require.NoError(t, err)
		_, err = stream.Recv()
		require.Equal(t, codes.ResourceExhausted, status.Code(err))
		require.Equal(t, []string{test.want}, stream.Trailer()["grpc-retry-pushback-ms"])
	}
	for code, enter := range map[codes.Code]func() (*gate.Admission, error){
		codes.Unavailable:       func() (*gate.Admission, error) { return nil, context.Canceled },
		codes.ResourceExhausted: func() (*gate.Admission, error) { return &gate.Admission{}, nil },
	} {
		client := dial(t, serve(t, &service{}, onServer(interceptors(t, &stub{enter: enter}))...))
		var trailer metadata.MD
		_, err := client.UnaryCall(limit(t), &pb.SimpleRequest{}, grpc.Trailer(&trailer))
		require.Equal(t, code, status.Code(err))
		require.Empty(t, trailer["grpc-retry-pushback-ms"])
	}
}

// A client with a retry policy comes back when the server said, not when its own policy would have it: never, here.
func TestRetryPolicy(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			limiter, err := tokenbucket.NewSmoothBursty("calls", 20)
			require.NoError(t, err)
			s := &service{}
			client := dial(t, serve(t, s, onServer(interceptors(t, gate.One(limiter, 0)))...), grpc.WithDefaultServiceConfig(
				`{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5, "initialBackoff": "3600s", "maxBackoff": "3600s",
				"backoffMultiplier": 1, "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]}`))
			require.NoError(t, kind.call(limit(t), client))
			require.NoError(t, kind.call(limit(t), client))
			require.EqualValues(t, 2, s.calls.Load())
		})
	}
}
