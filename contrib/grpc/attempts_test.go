package grpclimit_test

import (
	"context"
	"sync"
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
