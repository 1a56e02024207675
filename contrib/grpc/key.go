package grpclimit

import (
	"context"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// KeyFunc returns the key of a call. Calls with the same key share a bucket. ctx is the call's: on a server it has the
// caller's metadata and address, on a client the outgoing metadata. It must be safe for concurrent use.
type KeyFunc func(ctx context.Context, fullMethod string) string

// ByMethod returns the full method, "/package.Service/Method". It is the default.
func ByMethod(_ context.Context, fullMethod string) string { return fullMethod }

// ByMetadata is for servers. It returns a KeyFunc for a metadata value that the caller sent, the first if there are several;
// calls without it share the key "". A caller that chooses the value chooses its bucket: validate it first, or use a gate
// with known keys only. ByMetadata returns nil, which [WithKey] refuses, unless the name is valid in gRPC metadata: letters,
// digits and "-_.".
func ByMetadata(name string) KeyFunc { return byMetadata(name, metadata.FromIncomingContext) }

// ByOutgoingMetadata is ByMetadata for clients, by the outgoing metadata.
func ByOutgoingMetadata(name string) KeyFunc { return byMetadata(name, metadata.FromOutgoingContext) }

func byMetadata(name string, from func(context.Context) (metadata.MD, bool)) KeyFunc {
	if name == "" || strings.Trim(strings.ToLower(name), "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" {
		return nil
	}
	return func(ctx context.Context, _ string) string {
		md, _ := from(ctx)
		if values := md.Get(name); len(values) > 0 {
			return values[0]
		}
		return ""
	}
}

// ByPeer is for servers. It returns the IP address of the connection's peer, without port and zone; all clients of a proxy
// are one peer. A peer without an IP address, on a Unix socket, is keyed by its address as it is, an unknown one by "". A
// client with IPv6 commonly has 2^64 addresses, and as many keys.
func ByPeer(ctx context.Context, _ string) string {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return ""
	}
	addr, err := netip.ParseAddrPort(p.Addr.String())
	if err != nil {
		return p.Addr.String()
	}
	return addr.Addr().WithZone("").Unmap().String()
}

// Join returns a KeyFunc that combines several: its key is gate.Key of the parts. It returns nil, which [WithKey] refuses,
// without parts or if a part is nil.
func Join(parts ...KeyFunc) KeyFunc {
	if len(parts) == 0 || slices.ContainsFunc(parts, func(f KeyFunc) bool { return f == nil }) {
		return nil
	}
	parts = slices.Clone(parts)
	return func(ctx context.Context, fullMethod string) string {
		keys := make([]string, len(parts))
		for i, part := range parts {
			keys[i] = part(ctx, fullMethod)
		}
		return gate.Key(keys...)
	}
}
