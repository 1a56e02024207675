package grpclimit_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// A call has the priority of its method, or the one that its caller sent.
func TestPriority(t *testing.T) {
	byMethod := grpclimit.PriorityByMethod(map[string]tokenbucket.Priority{"/shop/Search": tokenbucket.Low})
	for _, tt := range []struct {
		by     grpclimit.PriorityFunc
		method string
		sent   []string
		want   tokenbucket.Priority
	}{
		{byMethod, "/shop/Book", nil, tokenbucket.Normal},
		{byMethod, "/shop/Search", []string{"lowest"}, tokenbucket.Low},
		{grpclimit.PriorityByMetadata("priority"), "/shop/Book", []string{"lowest", "low"}, tokenbucket.Lowest},
		{grpclimit.PriorityByMetadata("Priority"), "/shop/Book", []string{" LOW "}, tokenbucket.Low},
		{grpclimit.PriorityByMetadata("priority"), "/shop/Book", []string{"high"}, tokenbucket.Normal},
		{grpclimit.PriorityByMetadata("priority"), "/shop/Book", nil, tokenbucket.Normal},
	} {
		g := &lastPriority{p: 9}
		l, err := grpclimit.New(g, grpclimit.WithPriority(tt.by))
		require.NoError(t, err)
		ctx := metadata.NewIncomingContext(t.Context(), metadata.MD{"priority": tt.sent})
		_, err = l.UnaryServer(ctx, nil, &grpc.UnaryServerInfo{FullMethod: tt.method}, func(context.Context, any) (any, error) { return nil, nil })
		require.NoError(t, err)
		require.Equal(t, tt.want, g.p, "%s %v", tt.method, tt.sent)
	}
	_, err := grpclimit.New(&lastPriority{}, grpclimit.WithPriority(grpclimit.PriorityByMetadata("no name")))
	require.ErrorContains(t, err, "priority function")
}

// lastPriority is a gate that records the priority of the last call.
type lastPriority struct {
	p tokenbucket.Priority
	gate.Gate
}

func (g *lastPriority) Enter(ctx context.Context, _ string) (*gate.Admission, error) {
	g.p = gate.PriorityOf(ctx)
	return &gate.Admission{OK: true}, nil
}
