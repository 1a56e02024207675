package grpclimit_test

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// counted is a gate that admits so many calls, with one place.
type counted struct {
	mu           sync.Mutex
	left, inside int
}

func (g *counted) Enter(context.Context, string) (*gate.Admission, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left == 0 || g.inside > 0 {
		return &gate.Admission{RetryAfter: 3 * time.Second, By: gate.ByWindow}, nil
	}
	g.left--
	g.inside++
	return &gate.Admission{OK: true, Release: func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.inside--
	}}, nil
}

func (g *counted) Penalize(context.Context, string, time.Duration) error { return nil }

func (g *counted) empty() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.inside == 0
}

const retries = `{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.001s", "maxBackoff": "0.001s",
	"backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`

// Each attempt by a retry policy takes a permit, or is not sent. The place of the attempt before is free for it.
func TestAttemptsTakePermits(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			s := &service{answer: func(context.Context) error { return status.Error(codes.Unavailable, "down") }}
			g := &counted{left: 2}
			client := dial(t, serve(t, s), append(onClient(interceptors(t, g)), grpc.WithDefaultServiceConfig(retries))...)
			err := kind.call(limit(t), client)
			require.ErrorIs(t, err, grpclimit.ErrRefused)
			require.Equal(t, codes.ResourceExhausted, status.Code(err))
			require.EqualValues(t, 2, s.calls.Load())
			require.Eventually(t, g.empty, time.Minute, time.Millisecond)

			g.mu.Lock()
			g.left = 9
			g.mu.Unlock()
			s.calls.Store(0)
			require.Equal(t, codes.Unavailable, status.Code(kind.call(limit(t), client)))
			require.EqualValues(t, 5, s.calls.Load())
			require.Eventually(t, g.empty, time.Minute, time.Millisecond)
			require.Equal(t, 4, g.left)
		})
	}
}

type token struct{ metadata map[string]string }

func (c token) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return c.metadata, nil
}
func (c token) RequireTransportSecurity() bool { return c.metadata["secure"] != "" }

// The credentials of a call stay as they are.
func TestAttemptsWithCredentials(t *testing.T) {
	var got metadata.MD
	s := &service{answer: func(ctx context.Context) error {
		got, _ = metadata.FromIncomingContext(ctx)
		return nil
	}}
	client := dial(t, serve(t, s), append(onClient(interceptors(t, &counted{left: 9})),
		grpc.WithDefaultCallOptions(grpc.PerRPCCredentials(token{map[string]string{"a": "default"}})))...)
	_, err := client.UnaryCall(limit(t), &pb.SimpleRequest{})
	require.NoError(t, err)
	require.Equal(t, []string{"default"}, got["a"])
	_, err = client.UnaryCall(limit(t), &pb.SimpleRequest{}, grpc.PerRPCCredentials(token{map[string]string{"a": "own"}}))
	require.NoError(t, err)
	require.Equal(t, []string{"own"}, got["a"])
	_, err = client.UnaryCall(limit(t), &pb.SimpleRequest{}, grpc.PerRPCCredentials(token{map[string]string{"secure": "1"}}))
	require.Equal(t, codes.Unauthenticated, status.Code(err))
}

// asked is credentials without metadata, which count the attempts.
type asked struct{ n *atomic.Int64 }

func (a asked) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	a.n.Add(1)
	return nil, nil
}
func (asked) RequireTransportSecurity() bool { return false }

// A refused attempt ends the call, whatever the retry policy retries.
func TestRefusedAttemptsAreNotRetried(t *testing.T) {
	policy := strings.Replace(retries, `"UNAVAILABLE"`, `"UNAVAILABLE", "RESOURCE_EXHAUSTED"`, 1)
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			s := &service{answer: func(context.Context) error { return status.Error(codes.Unavailable, "down") }}
			g, a := &counted{left: 1}, asked{new(atomic.Int64)}
			client := dial(t, serve(t, s), append(onClient(interceptors(t, g)), grpc.WithDefaultServiceConfig(policy),
				grpc.WithDefaultCallOptions(grpc.PerRPCCredentials(a)))...)
			err := kind.call(limit(t), client)
			require.ErrorIs(t, err, grpclimit.ErrRefused)
			require.Equal(t, codes.ResourceExhausted, status.Code(err))
			require.EqualValues(t, 1, s.calls.Load())
			require.EqualValues(t, 2, a.n.Load(), "attempts")
		})
	}
}

// further returns interceptors that stand further in than the Limiter's, and change context and options.
func further(change func(ctx context.Context, opts []grpc.CallOption) (context.Context, []grpc.CallOption)) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			ctx, opts = change(ctx, opts)
			return invoker(ctx, method, req, reply, cc, opts...)
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			ctx, opts = change(ctx, opts)
			return streamer(ctx, desc, cc, method, opts...)
		}),
	}
}

// An attempt that waits for its permit ends with its own context, which an interceptor further in may end.
func TestAttemptsEndWithTheirContext(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			s := &service{answer: func(context.Context) error { return status.Error(codes.Unavailable, "down") }}
			g := &second{waits: make(chan bool, 1)}
			client := dial(t, serve(t, s), slices.Concat(onClient(interceptors(t, g)), further(func(ctx context.Context, opts []grpc.CallOption) (context.Context, []grpc.CallOption) {
				ctx, cancel := context.WithCancel(ctx)
				go func() {
					<-g.waits
					cancel()
				}()
				return ctx, opts
			}), []grpc.DialOption{grpc.WithDefaultServiceConfig(retries)})...)
			ctx, cancel := context.WithTimeout(limit(t), 30*time.Second)
			defer cancel()
			require.Equal(t, codes.Canceled, status.Code(kind.call(ctx, client)))
			require.EqualValues(t, 1, s.calls.Load())
		})
	}
}

// second is a gate whose second call waits until its context ends.
type second struct {
	asked atomic.Int64
	waits chan bool
}

func (g *second) Enter(ctx context.Context, _ string) (*gate.Admission, error) {
	if g.asked.Add(1) == 1 {
		return &gate.Admission{OK: true}, nil
	}
	g.waits <- true
	<-ctx.Done()
	return nil, ctx.Err()
}

func (g *second) Penalize(context.Context, string, time.Duration) error { return nil }

// Credentials of an interceptor further in do not hide the attempts of a client that is dialed with CountAttempts, of two Limiters either. Without it
// there is a warning.
func TestAttemptsBehindOtherCredentials(t *testing.T) {
	replaces := further(func(ctx context.Context, opts []grpc.CallOption) (context.Context, []grpc.CallOption) {
		return ctx, append(opts, grpc.PerRPCCredentials(token{map[string]string{"a": "b"}}))
	})
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			s := &service{answer: func(context.Context) error { return status.Error(codes.Unavailable, "down") }}
			outer, inner := &counted{left: 9}, &counted{left: 2}
			client := dial(t, serve(t, s), slices.Concat(onClient(interceptors(t, outer)), onClient(interceptors(t, inner)), replaces,
				[]grpc.DialOption{grpclimit.CountAttempts(), grpc.WithDefaultServiceConfig(retries)})...)
			require.ErrorIs(t, kind.call(limit(t), client), grpclimit.ErrRefused)
			require.EqualValues(t, 2, s.calls.Load())
			require.Equal(t, 6, outer.left)
			require.Eventually(t, outer.empty, time.Minute, time.Millisecond)
			require.Eventually(t, inner.empty, time.Minute, time.Millisecond)

			var log bytes.Buffer
			s.answer = nil
			limiter := interceptors(t, &counted{left: 2}, grpclimit.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
			client = dial(t, serve(t, s), append(onClient(limiter), replaces...)...)
			for range 2 {
				require.NoError(t, kind.call(limit(t), client))
			}
			require.Equal(t, 1, strings.Count(log.String(), "CountAttempts"), log.String())
		})
	}
}

// The place of a later attempt goes back when its stream is abandoned, even if the first one had none.
func TestPlacesOfLaterAttempts(t *testing.T) {
	s := &service{}
	s.answer = func(ctx context.Context) error {
		if s.calls.Load() == 1 {
			return status.Error(codes.Unavailable, "down")
		}
		_ = grpc.SendHeader(ctx, nil)
		<-ctx.Done()
		return ctx.Err()
	}
	g := &counted{left: 1}
	first := true
	client := dial(t, serve(t, s), append(onClient(interceptors(t, gateOf(func(ctx context.Context) (*gate.Admission, error) {
		if first {
			first = false
			return &gate.Admission{OK: true}, nil
		}
		return g.Enter(ctx, "")
	}))), grpc.WithDefaultServiceConfig(retries))...)
	ctx, cancel := context.WithCancel(limit(t))
	defer cancel()
	stream, err := client.FullDuplexCall(ctx)
	require.NoError(t, err)
	_, err = stream.Header()
	require.NoError(t, err)
	require.False(t, g.empty())
	cancel()
	require.Eventually(t, g.empty, 30*time.Second, time.Millisecond)
}

type gateOf func(ctx context.Context) (*gate.Admission, error)

func (g gateOf) Enter(ctx context.Context, _ string) (*gate.Admission, error) { return g(ctx) }
func (g gateOf) Penalize(context.Context, string, time.Duration) error        { return nil }
