package grpclimit_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// ten is a bucket of ten permits, which is full, by a clock that stands still.
func ten(t *testing.T) (l *tokenbucket.RateLimiter, stored func() float64) {
	t.Helper()
	l, err := tokenbucket.NewSmoothBursty("calls", 10, tokenbucket.WithInitialPermits(10), tokenbucket.WithClock(clockwork.NewFakeClock()))
	require.NoError(t, err)
	return l, func() float64 {
		t.Helper()
		require.NoError(t, l.Close(context.Background()), "it waits for settlements")
		b, err := l.State(context.Background())
		require.NoError(t, err)
		return b.StoredPermits
	}
}

// size is a cost function for tests: a number in the message. A stream that is opened costs 3.
func size(_ context.Context, _ string, message any) int {
	switch m := message.(type) {
	case nil:
		return 3
	case *pb.SimpleRequest:
		return int(m.ResponseSize)
	case *pb.SimpleResponse:
		return len(m.GetPayload().GetBody())
	case *pb.StreamingOutputCallRequest:
		return int(m.ResponseParameters[0].Size)
	}
	panic("no cost")
}

// Calls cost what their requests say, and are settled with what their replies show, on both sides.
func TestCostOfCalls(t *testing.T) {
	answer := func(used int, err error) (*pb.SimpleResponse, error) {
		return &pb.SimpleResponse{Payload: &pb.Payload{Body: make([]byte, used)}}, err
	}
	for side, call := range map[string]func(l *grpclimit.Limiter, req any, used int, err error) (began bool, _ error){
		"client": func(l *grpclimit.Limiter, req any, used int, failed error) (began bool, _ error) {
			reply := new(pb.SimpleResponse)
			return began, l.UnaryClient(t.Context(), unary, req, reply, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
				began = true
				r, err := answer(used, failed)
				reply.Payload = r.Payload
				return err
			})
		},
		"server": func(l *grpclimit.Limiter, req any, used int, failed error) (began bool, _ error) {
			_, err := l.UnaryServer(t.Context(), req, &grpc.UnaryServerInfo{FullMethod: unary}, func(ctx context.Context, _ any) (any, error) {
				began = true
				require.NotNil(t, gate.FromContext(ctx))
				return answer(used, failed)
			})
			return began, err
		},
	} {
		t.Run(side, func(t *testing.T) {
			limiter, stored := ten(t)
			passed := 0
			l := interceptors(t, gate.One(limiter, 0), grpclimit.WithCost(size), grpclimit.WithActualCost(size),
				grpclimit.WithOnError(func(context.Context, string, error) error { passed++; return nil }))
			for _, c := range []struct {
				cost   int32
				used   int
				failed error
				code   codes.Code
				left   float64
			}{
				{4, 4, nil, codes.OK, 6},
				{3, 1, nil, codes.OK, 5},
				{1, 0, status.Error(codes.NotFound, "none"), codes.NotFound, 4},
				{0, 9, nil, codes.OK, 4},
				{5, 0, nil, codes.ResourceExhausted, 4},
				{11, 0, nil, codes.InvalidArgument, 4},
				{-1, 0, nil, codes.Internal, 4},
			} {
				began, err := call(l, &pb.SimpleRequest{ResponseSize: c.cost}, c.used, c.failed)
				require.Equal(t, c.code, status.Code(err), "%v: %v", c, err)
				require.Equal(t, c.code == codes.OK || c.failed != nil, began, c)
				require.Equal(t, c.left, stored(), c)
				wrong := c.code == codes.InvalidArgument || c.code == codes.Internal
				require.Equal(t, wrong, errors.As(err, new(*gate.CostError)))
				require.Equal(t, c.cost == 11, errors.Is(err, tokenbucket.ErrNeverGranted))
				require.False(t, wrong && (errors.Is(err, grpclimit.ErrGate) || errors.Is(err, grpclimit.ErrRefused)))
			}
			require.Zero(t, passed, "the gate has not failed")
			require.PanicsWithValue(t, "no cost", func() { _, _ = call(l, "unknown", 0, nil) })
			require.Equal(t, 4.0, stored())
		})
	}
}

// Each message costs what it says, and the stream's context settles the last one.
func TestCostOfMessages(t *testing.T) {
	limiter, stored := ten(t)
	l := interceptors(t, gate.One(limiter, 0), grpclimit.WithMessages(), grpclimit.WithCost(size))
	of := func(n int32) *pb.StreamingOutputCallRequest {
		return &pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: n}}}
	}
	err := l.StreamServer(nil, &fakeStream{ctx: t.Context()}, &grpc.StreamServerInfo{FullMethod: unary}, func(_ any, s grpc.ServerStream) error {
		require.NoError(t, s.RecvMsg(of(2)))
		require.Equal(t, 8.0, stored())
		require.NoError(t, s.RecvMsg(of(5)))
		require.Equal(t, 3.0, stored())
		require.NoError(t, gate.FromContext(s.Context()).Settle(t.Context(), 1))
		require.Equal(t, 7.0, stored())
		require.NoError(t, s.RecvMsg(of(0)))
		return s.RecvMsg(of(8))
	})
	require.ErrorIs(t, err, grpclimit.ErrRefused)
	require.Equal(t, 7.0, stored())
}

// A stream costs what its method does, and its context settles it.
func TestCostOfStreams(t *testing.T) {
	limiter, stored := ten(t)
	l := interceptors(t, gate.One(limiter, 0), grpclimit.WithCost(size))
	err := l.StreamServer(nil, &fakeStream{ctx: t.Context()}, &grpc.StreamServerInfo{FullMethod: unary}, func(_ any, s grpc.ServerStream) error {
		require.Equal(t, 7.0, stored())
		return gate.FromContext(s.Context()).Settle(t.Context(), 1)
	})
	require.NoError(t, err)
	require.Equal(t, 9.0, stored())
	s, err := l.StreamClient(t.Context(), &grpc.StreamDesc{}, nil, unary, func(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
		return &clientSide{ctx: ctx}, nil
	})
	require.NoError(t, err)
	require.Equal(t, 6.0, stored())
	require.NoError(t, gate.FromContext(s.Context()).Settle(t.Context(), 2))
	require.Equal(t, 7.0, stored())
}

type clientSide struct {
	grpc.ClientStream
	ctx context.Context
}

func (s *clientSide) Context() context.Context { return s.ctx }

func TestCostOptions(t *testing.T) {
	limiter, _ := ten(t)
	for want, c := range map[string]struct {
		g   gate.Gate
		opt grpclimit.Option
	}{
		"grpclimit: cost function nil: want a function":                                            {gate.One(limiter, 0), grpclimit.WithCost(nil)},
		"grpclimit: actual cost function nil: want a function":                                     {gate.One(limiter, 0), grpclimit.WithActualCost(nil)},
		"grpclimit: cost function of a gate whose calls all cost one permit: want a gate.CostGate": {&stub{}, grpclimit.WithCost(size)},
	} {
		_, err := grpclimit.New(c.g, c.opt)
		require.EqualError(t, err, want)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	}
}
