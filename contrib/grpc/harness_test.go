package grpclimit_test

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	messages = 3 // in each direction that is a stream
	unary    = "/grpc.testing.TestService/UnaryCall"
)

// limit gives up a test that hangs, on the slowest machine too.
func limit(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// service counts what reaches it, and answers what a test wants.
type service struct {
	pb.UnimplementedTestServiceServer
	calls, received atomic.Int64
	answer          func(ctx context.Context) error // nil: OK
}

func (s *service) handle(ctx context.Context) error {
	s.calls.Add(1)
	if s.answer == nil {
		return nil
	}
	return s.answer(ctx)
}

func (s *service) UnaryCall(ctx context.Context, _ *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	return &pb.SimpleResponse{}, s.handle(ctx)
}

func (s *service) StreamingInputCall(stream grpc.ClientStreamingServer[pb.StreamingInputCallRequest, pb.StreamingInputCallResponse]) error {
	if err := s.handle(stream.Context()); err != nil {
		return err
	}
	for {
		switch _, err := stream.Recv(); err {
		case nil:
			s.received.Add(1)
		case io.EOF:
			return stream.SendAndClose(&pb.StreamingInputCallResponse{})
		default:
			return err
		}
	}
}

func (s *service) StreamingOutputCall(_ *pb.StreamingOutputCallRequest, stream grpc.ServerStreamingServer[pb.StreamingOutputCallResponse]) error {
	s.received.Add(1)
	if err := s.handle(stream.Context()); err != nil {
		return err
	}
	for range messages {
		if err := stream.Send(&pb.StreamingOutputCallResponse{}); err != nil {
			return err
		}
	}
	return nil
}

func (s *service) FullDuplexCall(stream grpc.BidiStreamingServer[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse]) error {
	if err := s.handle(stream.Context()); err != nil {
		return err
	}
	for {
		switch _, err := stream.Recv(); err {
		case nil:
			s.received.Add(1)
		case io.EOF:
			return nil
		default:
			return err
		}
		if err := stream.Send(&pb.StreamingOutputCallResponse{}); err != nil {
			return err
		}
	}
}

// kinds of calls: each makes one and returns its status.
var kinds = []struct {
	name     string
	received int64 // messages that the service sees
	call     func(ctx context.Context, client pb.TestServiceClient) error
}{
	{"UnaryCall", 0, func(ctx context.Context, client pb.TestServiceClient) error {
		_, err := client.UnaryCall(ctx, &pb.SimpleRequest{})
		return err
	}},
	{"StreamingInputCall", messages, func(ctx context.Context, client pb.TestServiceClient) error {
		stream, err := client.StreamingInputCall(ctx)
		if err != nil {
			return err
		}
		for range messages {
			if err := stream.Send(&pb.StreamingInputCallRequest{}); err != nil {
				break // the status is CloseAndRecv's
			}
		}
		_, err = stream.CloseAndRecv()
		return err
	}},
	{"StreamingOutputCall", 1, func(ctx context.Context, client pb.TestServiceClient) error {
		stream, err := client.StreamingOutputCall(ctx, &pb.StreamingOutputCallRequest{})
		for err == nil {
			_, err = stream.Recv()
		}
		return over(err)
	}},
	{"FullDuplexCall", messages, func(ctx context.Context, client pb.TestServiceClient) error {
		stream, err := client.FullDuplexCall(ctx)
		if err != nil {
			return err
		}
		for range messages {
			if err = stream.Send(&pb.StreamingOutputCallRequest{}); err == nil || err == io.EOF {
				_, err = stream.Recv()
			}
			if err != nil {
				return err
			}
		}
		_ = stream.CloseSend()
		_, err = stream.Recv()
		return over(err)
	}},
}

func over(err error) error {
	if err == io.EOF {
		return nil
	}
	return err
}

// serve starts a server that lives as long as the test, and returns its address.
func serve(t *testing.T, s pb.TestServiceServer, opts ...grpc.ServerOption) (addr string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer(opts...)
	pb.RegisterTestServiceServer(server, s)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-ended)
	})
	return listener.Addr().String()
}

// dial returns a client that lives as long as the test.
func dial(t *testing.T, addr string, opts ...grpc.DialOption) pb.TestServiceClient {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+addr, append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return pb.NewTestServiceClient(conn)
}

func interceptors(t *testing.T, gate gate.Gate, opts ...grpclimit.Option) *grpclimit.Limiter {
	t.Helper()
	l, err := grpclimit.New(gate, opts...)
	require.NoError(t, err)
	return l
}

func onClient(l *grpclimit.Limiter) []grpc.DialOption {
	return []grpc.DialOption{grpc.WithChainUnaryInterceptor(l.UnaryClient), grpc.WithChainStreamInterceptor(l.StreamClient)}
}

func onServer(l *grpclimit.Limiter) []grpc.ServerOption {
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(l.UnaryServer), grpc.ChainStreamInterceptor(l.StreamServer)}
}

// sides are where a limit may stand: start returns a client of the service through it.
var sides = []struct {
	name  string
	start func(t *testing.T, s *service, l *grpclimit.Limiter) pb.TestServiceClient
}{
	{"client", func(t *testing.T, s *service, l *grpclimit.Limiter) pb.TestServiceClient {
		return dial(t, serve(t, s), onClient(l)...)
	}},
	{"server", func(t *testing.T, s *service, l *grpclimit.Limiter) pb.TestServiceClient {
		return dial(t, serve(t, s, onServer(l)...))
	}},
}

// onEverySide runs a test for each kind of call on each side.
func onEverySide(t *testing.T, test func(t *testing.T, start func(*service, *grpclimit.Limiter) func(context.Context) error, received int64)) {
	for _, side := range sides {
		for _, kind := range kinds {
			t.Run(side.name+"/"+kind.name, func(t *testing.T) {
				test(t, func(s *service, l *grpclimit.Limiter) func(context.Context) error {
					client := side.start(t, s, l)
					return func(ctx context.Context) error { return kind.call(ctx, client) }
				}, kind.received)
			})
		}
	}
}

// bucket is a limiter of one permit a second that holds one, by a clock that the test moves.
func bucket(t *testing.T) (*tokenbucket.RateLimiter, *clockwork.FakeClock) {
	t.Helper()
	clock := clockwork.NewFakeClock()
	limiter, err := tokenbucket.NewSmoothBursty("calls", 1, tokenbucket.WithClock(clock))
	require.NoError(t, err)
	return limiter, clock
}

// full tells whether the bucket's one permit is there.
func full(t *testing.T, limiter *tokenbucket.RateLimiter) bool {
	t.Helper()
	state, err := limiter.State(context.Background())
	require.NoError(t, err)
	return state.StoredPermits >= 1
}

// stub is a gate that answers what a test wants, and remembers what it was asked.
type stub struct {
	enter     func() (*gate.Admission, error) // nil: every call may begin
	penalize  func(ctx context.Context, key string, d time.Duration) error
	keys      []string // of Enter
	penalties []penalty
}

type penalty struct {
	key string
	d   time.Duration
}

func (g *stub) Enter(_ context.Context, key string) (*gate.Admission, error) {
	g.keys = append(g.keys, key)
	if g.enter == nil {
		return &gate.Admission{OK: true}, nil
	}
	return g.enter()
}

func (g *stub) Penalize(ctx context.Context, key string, d time.Duration) error {
	g.penalties = append(g.penalties, penalty{key, d})
	if g.penalize == nil {
		return nil
	}
	return g.penalize(ctx, key, d)
}

// retryInfo of a status, and whether it has one.
func retryInfo(err error) (time.Duration, bool) {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			return info.GetRetryDelay().AsDuration(), true
		}
	}
	return 0, false
}

func withRetryInfo(s *status.Status, d time.Duration) error {
	with, err := s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(d)})
	if err != nil {
		return err
	}
	return with.Err()
}
