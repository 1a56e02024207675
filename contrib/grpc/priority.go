package grpclimit

import (
	"context"
	"strings"

	"google.golang.org/grpc/metadata"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// PriorityFunc returns the priority of a call. ctx is the call's, as for a [KeyFunc]. It must be safe for concurrent use.
type PriorityFunc func(ctx context.Context, fullMethod string) tokenbucket.Priority

// WithPriority sets the function that returns a call's priority. The gate gets it with the call's context (gate.WithPriority), and the
// priority of the limit counts if it is lower. By default the priority is that of the call's context, or else tokenbucket.Normal.
func WithPriority(priority PriorityFunc) Option {
	return func(l *Limiter) {
		if priority == nil {
			l.fail("priority function", "nil", "a function (PriorityByMetadata makes none of a bad name)")
		}
		l.priority = priority
	}
}

// PriorityByMethod returns a PriorityFunc by full method, "/package.Service/Method". Methods that are not in the map are Normal. The map must
// not be changed afterwards.
func PriorityByMethod(priorities map[string]tokenbucket.Priority) PriorityFunc {
	return func(_ context.Context, fullMethod string) tokenbucket.Priority { return priorities[fullMethod] }
}

// PriorityByMetadata is for servers. It returns a PriorityFunc for a metadata value, normal, low or lowest, that the caller sent: the first
// if there are several. Any other value is Normal. Callers choose it, so they must be trusted to lower their own priority. It returns nil,
// which [WithPriority] refuses, unless the name is valid in gRPC metadata: see [ByMetadata].
func PriorityByMetadata(name string) PriorityFunc {
	value := byMetadata(name, metadata.FromIncomingContext)
	if value == nil {
		return nil
	}
	return func(ctx context.Context, fullMethod string) tokenbucket.Priority {
		p, _ := tokenbucket.ParsePriority(strings.TrimSpace(value(ctx, fullMethod))) // Normal if there is an error
		return p
	}
}

// prioritized returns the context of a call with its priority.
func (l *Limiter) prioritized(ctx context.Context, method string) context.Context {
	if l.priority == nil {
		return ctx
	}
	return gate.WithPriority(ctx, l.priority(ctx, method))
}
