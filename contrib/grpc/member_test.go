package grpclimit_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// A refusal by several limits names the one that refused to this process, not to the caller. An upstream's pause holds back what the call used.
func TestSeveral(t *testing.T) {
	clock := tokenbucket.WithClock(clockwork.NewFakeClock())
	second, err := tokenbucket.NewSmoothBursty("second", 5, tokenbucket.WithInitialPermits(5), clock)
	require.NoError(t, err)
	tenant, err := tokenbucket.NewSmoothBursty("tenant acme", 0.1, clock)
	require.NoError(t, err)
	all, err := tokenbucket.All(second, tenant)
	require.NoError(t, err)
	l := interceptors(t, gate.One(all, 0))
	call := func() error {
		return l.UnaryClient(t.Context(), unary, nil, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			return withRetryInfo(status.New(codes.Unavailable, "busy"), 30*time.Second)
		})
	}
	require.Equal(t, codes.Unavailable, status.Code(call()))
	for _, l := range []*tokenbucket.RateLimiter{second, tenant} {
		b, err := l.State(t.Context())
		require.NoError(t, err)
		require.NotZero(t, b.HeldUntilMicros, l.Name())
	}
	err = call()
	var refused *grpclimit.Error
	require.True(t, errors.As(err, &refused))
	require.Equal(t, "tenant acme", refused.Member, "its permit is due 10 s after the pause")
	require.ErrorContains(t, err, `bucket "tenant acme": retry after`)
	require.NotContains(t, refused.GRPCStatus().Message(), "acme")
}
