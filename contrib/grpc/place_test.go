package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/gate/gatetest"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// rows is a registry with these, which all calls of a test share by a key.
func rows(t *testing.T, limits ...registry.Limit) *registry.Registry {
	t.Helper()
	r, err := registry.New(registry.Static(limits), tokenbucket.NewMemoryStore(), registry.WithLogger(slog.New(slog.DiscardHandler)),
		registry.WithLocalWindows(), registry.WithLocalSemaphores())
	require.NoError(t, err)
	t.Cleanup(r.Close)
	return r
}

func keyed(key string) grpclimit.Option {
	return grpclimit.WithKey(func(context.Context, string) string { return key })
}

// empty waits until no call of a row is under way: the other end hears of a call's end later.
func empty(t *testing.T, r *registry.Registry, key string) {
	t.Helper()
	require.NoError(t, redistest.Poll(30*time.Second, func() error {
		u, _, err := r.Usage(limit(t), key)
		if err == nil && (u.Inside != 0 || u.Places != 0) {
			err = fmt.Errorf("%d inside, %d places taken", u.Inside, u.Places)
		}
		return err
	}))
}

// A row with a concurrency lets so many calls in at once, on either side and of each kind.
func TestConcurrency(t *testing.T) {
	onEverySide(t, func(t *testing.T, start func(*service, *grpclimit.Limiter) func(context.Context) error, _ int64) {
		r := rows(t, registry.Limit{Name: "calls", NoRate: true, Concurrent: 1})
		inside, goOn := make(chan struct{}), make(chan struct{})
		s := &service{answer: func(context.Context) error {
			inside <- struct{}{}
			<-goOn
			return nil
		}}
		call := start(s, interceptors(t, r, keyed("calls")))
		first := make(chan error, 1)
		go func() { first <- call(limit(t)) }()
		<-inside
		err := call(limit(t))
		require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
		after, ok := retryInfo(err)
		require.True(t, ok)
		require.Equal(t, time.Second, after)
		close(goOn)
		require.NoError(t, <-first)
		empty(t, r, "calls")
		go func() { first <- call(limit(t)) }()
		<-inside
		require.NoError(t, <-first)
		empty(t, r, "calls")
	})
}

// A row with a window counts calls, and one with a rate besides makes them wait.
func TestWindow(t *testing.T) {
	onEverySide(t, func(t *testing.T, start func(*service, *grpclimit.Limiter) func(context.Context) error, _ int64) {
		r := rows(t, registry.Limit{Name: "calls", Rate: 50, MaxWait: time.Second, Window: time.Hour, WindowLimit: 3, Concurrent: 5})
		s := &service{}
		call := start(s, interceptors(t, r, keyed("calls")))
		for range 3 {
			require.NoError(t, call(limit(t)))
		}
		err := call(limit(t))
		require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
		after, _ := retryInfo(err)
		require.Greater(t, after, 50*time.Minute)
		require.EqualValues(t, 3, s.calls.Load())
		empty(t, r, "calls")
	})
}

// crowd is a service whose calls end in many ways.
type crowd struct {
	pb.UnimplementedTestServiceServer
	inside, most atomic.Int64
}

func (s *crowd) enter() (leave func()) {
	n := s.inside.Add(1)
	for most := s.most.Load(); n > most && !s.most.CompareAndSwap(most, n); most = s.most.Load() {
	}
	return func() { s.inside.Add(-1) }
}

func (s *crowd) UnaryCall(ctx context.Context, r *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	defer s.enter()()
	return &pb.SimpleResponse{}, s.end(ctx, r.GetResponseSize())
}

func (s *crowd) StreamingInputCall(stream grpc.ClientStreamingServer[pb.StreamingInputCallRequest, pb.StreamingInputCallResponse]) error {
	defer s.enter()()
	r, err := stream.Recv()
	if err != nil {
		return err
	}
	if err := s.end(stream.Context(), int32(len(r.GetPayload().GetBody()))); err != nil {
		return err
	}
	return stream.SendAndClose(&pb.StreamingInputCallResponse{})
}

func (s *crowd) FullDuplexCall(stream grpc.BidiStreamingServer[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse]) error {
	defer s.enter()()
	for {
		r, err := stream.Recv()
		if err != nil {
			return over(err)
		}
		if err := s.end(stream.Context(), int32(len(r.GetPayload().GetBody()))); err != nil {
			return err
		}
		if err := stream.Send(&pb.StreamingOutputCallResponse{}); err != nil {
			return err
		}
	}
}

func (s *crowd) end(ctx context.Context, how int32) error {
	switch how {
	case 1:
		return status.Error(codes.Aborted, "aborted")
	case 2:
		panic("the handler")
	case 3:
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

// recovered keeps a panic of a handler from the process.
func recovered(err *error) {
	if r := recover(); r != nil {
		*err = status.Error(codes.Internal, fmt.Sprint(r))
	}
}

// Whatever becomes of calls and streams, on either side, no place is kept.
func TestRandomEnds(t *testing.T) {
	const callers, places, calls = 8, 4, 40
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	onServers := rows(t, registry.Limit{Name: "calls", NoRate: true, Concurrent: places})
	onClients := rows(t, registry.Limit{Name: "calls", NoRate: true, Concurrent: places + 2})
	s := &crowd{}
	limited, client := interceptors(t, onServers, keyed("calls")), interceptors(t, onClients, keyed("calls"))
	messages := rows(t, registry.Limit{Name: "calls", NoRate: true, Concurrent: places})
	addr := start(t, s, limited)
	addrOfMessages := start(t, &crowd{}, interceptors(t, messages, keyed("calls"), grpclimit.WithMessages()))
	var passed atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			for range calls {
				to := addr
				if random.IntN(3) == 0 {
					to = addrOfMessages
				}
				if err := once(random, to, client); err == nil {
					passed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	empty(t, onServers, "calls")
	empty(t, onClients, "calls")
	empty(t, messages, "calls")
	require.LessOrEqual(t, s.most.Load(), int64(places))
	require.Positive(t, passed.Load())
}

// start starts a server that survives the panics of its handlers.
func start(t *testing.T, s *crowd, l *grpclimit.Limiter) (addr string) {
	t.Helper()
	return serve(t, s,
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (_ any, err error) {
			defer recovered(&err)
			return handler(ctx, req)
		}, l.UnaryServer),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
			defer recovered(&err)
			return handler(srv, stream)
		}, l.StreamServer))
}

// once makes a call, and ends it somehow.
func once(random *rand.Rand, addr string, l *grpclimit.Limiter) error {
	conn, err := grpc.NewClient("passthrough:///"+addr, append(onClient(l), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(context.Background())
	if random.IntN(3) > 0 {
		defer cancel() // else the connection's end is the stream's
	} else {
		defer func() {
			_ = conn.Close()
			time.AfterFunc(time.Minute, cancel) // not before the test has looked
		}()
	}
	how, kind := random.IntN(4), random.IntN(3)
	if how == 3 {
		time.AfterFunc(time.Duration(random.IntN(20))*time.Millisecond, cancel)
	}
	client, payload := pb.NewTestServiceClient(conn), &pb.Payload{Body: make([]byte, how)}
	switch kind {
	case 0:
		_, err := client.UnaryCall(ctx, &pb.SimpleRequest{ResponseSize: int32(how)})
		return err
	case 1:
		stream, err := client.StreamingInputCall(ctx)
		if err != nil {
			return err
		}
		_ = stream.Send(&pb.StreamingInputCallRequest{Payload: payload})
		if random.IntN(3) == 0 {
			return errors.New("abandoned")
		}
		_, err = stream.CloseAndRecv()
		return err
	}
	stream, err := client.FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	for range 1 + random.IntN(3) {
		_ = stream.Send(&pb.StreamingOutputCallRequest{Payload: payload})
		switch random.IntN(5) {
		case 0:
			return errors.New("abandoned")
		case 1:
			_ = stream.CloseSend()
			return stream.Send(&pb.StreamingOutputCallRequest{}) // after the end: an error of its own
		case 2:
			if _, err := stream.Header(); err != nil {
				return err
			}
		default:
			if _, err := stream.Recv(); err != nil {
				return over(err)
			}
		}
	}
	return nil
}

// ended is a stream whose methods answer what a test wants.
type ended struct {
	grpc.ClientStream
	err    error
	header metadata.MD
}

func (s *ended) RecvMsg(any) error            { return s.err }
func (s *ended) SendMsg(any) error            { return s.err }
func (s *ended) Header() (metadata.MD, error) { return s.header, nil }

// A client's stream leaves where gRPC says that it has ended, and not before.
func TestStreamEnds(t *testing.T) {
	alive := metadata.MD{}
	for name, test := range map[string]struct {
		desc   grpc.StreamDesc
		stream ended
		do     func(s grpc.ClientStream, cancel func())
		ends   bool
	}{
		"nothing":                {grpc.StreamDesc{ServerStreams: true}, ended{header: alive}, func(grpc.ClientStream, func()) {}, false},
		"a message":              {grpc.StreamDesc{ServerStreams: true}, ended{}, func(s grpc.ClientStream, _ func()) { _ = s.RecvMsg(nil) }, false},
		"sent":                   {grpc.StreamDesc{}, ended{}, func(s grpc.ClientStream, _ func()) { _ = s.SendMsg(nil) }, false},
		"header":                 {grpc.StreamDesc{}, ended{header: alive}, func(s grpc.ClientStream, _ func()) { _, _ = s.Header() }, false},
		"drained":                {grpc.StreamDesc{ServerStreams: true}, ended{err: io.EOF}, func(s grpc.ClientStream, _ func()) { _ = s.RecvMsg(nil) }, true},
		"failed":                 {grpc.StreamDesc{ServerStreams: true}, ended{err: errors.New("lost")}, func(s grpc.ClientStream, _ func()) { _ = s.RecvMsg(nil) }, true},
		"the only answer":        {grpc.StreamDesc{ClientStreams: true}, ended{}, func(s grpc.ClientStream, _ func()) { _ = s.RecvMsg(nil) }, true},
		"not sent":               {grpc.StreamDesc{ClientStreams: true}, ended{err: io.EOF}, func(s grpc.ClientStream, _ func()) { _ = s.SendMsg(nil) }, true},
		"no header":              {grpc.StreamDesc{ServerStreams: true}, ended{}, func(s grpc.ClientStream, _ func()) { _, _ = s.Header() }, true},
		"cancelled":              {grpc.StreamDesc{ServerStreams: true}, ended{}, func(_ grpc.ClientStream, cancel func()) { cancel() }, true},
		"drained, and cancelled": {grpc.StreamDesc{ServerStreams: true}, ended{err: io.EOF}, func(s grpc.ClientStream, cancel func()) { _ = s.RecvMsg(nil); cancel() }, true},
	} {
		t.Run(name, func(t *testing.T) {
			gate := &places{left: make(chan struct{}, 10)}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			stream, err := interceptors(t, gate).StreamClient(ctx, &test.desc, nil, unary, func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
				return &test.stream, nil
			})
			require.NoError(t, err)
			test.do(stream, cancel)
			if test.ends {
				<-gate.left
			}
			require.Empty(t, gate.left)
		})
	}
}

// places is a gate that gives each call a place, and counts those that are given back.
type places struct {
	stub
	left chan struct{}
}

func (g *places) Enter(context.Context, string) (*gate.Admission, error) {
	return &gate.Admission{OK: true, Release: func() { g.left <- struct{}{} }}, nil
}

// A call that never begins holds nothing, and neither does one that panics.
func TestNotOpened(t *testing.T) {
	gate := &places{left: make(chan struct{}, 10)}
	l := interceptors(t, gate)
	open := func(ctx context.Context, streamer grpc.Streamer) {
		_, _ = l.StreamClient(ctx, &grpc.StreamDesc{}, nil, unary, streamer)
	}
	open(t.Context(), func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
		return nil, errors.New("no connection")
	})
	require.Len(t, gate.left, 1)
	require.Panics(t, func() {
		open(t.Context(), func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
			panic("no connection")
		})
	})
	require.Len(t, gate.left, 2)
	require.Panics(t, func() {
		_ = l.UnaryClient(t.Context(), unary, nil, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			panic("no connection")
		})
	})
	require.Len(t, gate.left, 3)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	open(gone, nil)
	require.Len(t, gate.left, 4)
}

// A call that is not let through holds nothing.
func TestNotLetThrough(t *testing.T) {
	gatetest.TestNotLetThrough(t, func(ctx context.Context, t *testing.T, g gate.Gate) error {
		return interceptors(t, g).UnaryClient(ctx, unary, nil, nil, nil, nil)
	})
}

// A message is under way until the service asks for the next one, or returns; one that comes after that holds nothing.
func TestMessagesHold(t *testing.T) {
	gate := &places{left: make(chan struct{}, 10)}
	l := interceptors(t, gate, grpclimit.WithMessages())
	var late grpc.ServerStream
	err := l.StreamServer(nil, &fakeStream{ctx: t.Context()}, &grpc.StreamServerInfo{FullMethod: unary}, func(_ any, stream grpc.ServerStream) error {
		late = stream
		for i := range 3 {
			require.NoError(t, stream.RecvMsg(nil))
			require.Len(t, gate.left, i)
		}
		return nil
	})
	require.NoError(t, err)
	require.Len(t, gate.left, 3)
	require.NoError(t, late.RecvMsg(nil))
	require.Len(t, gate.left, 4)
}
