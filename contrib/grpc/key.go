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

// KeyFunc makes the key of a call: calls of one key share a bucket. ctx is the call's: a server finds the caller's metadata
// and address in it, a client what it is about to send. It must be safe for concurrent use.
type KeyFunc func(ctx context.Context, fullMethod string) string

// ByMethod keys by the full method, "/package.Service/Method". It is the default.
func ByMethod(_ context.Context, fullMethod string) string { return fullMethod }

// ByMetadata is for servers. It keys by a value that the caller sent, the first if there are several; calls without it
// share the key "". Who can choose the value can choose a fresh bucket: check it first, or use a gate that knows its keys.
// It is nil, which [WithKey] refuses, unless the name is one of gRPC metadata: letters, digits and "-_.".
func ByMetadata(name string) KeyFunc { return byMetadata(name, metadata.FromIncomingContext) }

// ByOutgoingMetadata is for clients: ByMetadata, by what they are about to send.
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

// ByPeer is for servers. It keys by the IP address of the other end of the connection, without port and zone; a proxy is
// one peer for all its clients. A peer without an IP address, on a Unix socket, is keyed by its address as it is, an unknown
// one by "". A client with IPv6 commonly has 2^64 addresses, and as many keys.
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

// Join keys by several things at once: the key is gate.Key of the parts. It is nil, which [WithKey] refuses, without parts or if a part is
// nil.
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
