package grpclimit_test

import (
	"context"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
)

func TestKeys(t *testing.T) {
	in := func(kv ...string) context.Context {
		return metadata.NewIncomingContext(t.Context(), metadata.Pairs(kv...))
	}
	out := func(kv ...string) context.Context {
		return metadata.NewOutgoingContext(t.Context(), metadata.Pairs(kv...))
	}
	from := func(addr net.Addr) context.Context { return peer.NewContext(t.Context(), &peer.Peer{Addr: addr}) }
	tenant, sent := grpclimit.ByMetadata("X-Tenant"), grpclimit.ByOutgoingMetadata("X-Tenant")
	both := grpclimit.Join(tenant, grpclimit.ByMetadata("x-user"))
	for _, test := range []struct {
		name string
		key  grpclimit.KeyFunc
		ctx  context.Context
		want string
	}{
		{"method", grpclimit.ByMethod, t.Context(), unary},
		{"metadata", tenant, in("x-tenant", "acme"), "acme"},
		{"no metadata", tenant, t.Context(), ""},
		{"metadata without the name", tenant, in("x-other", "acme"), ""},
		{"twice", tenant, in("x-tenant", "acme", "x-tenant", "other"), "acme"},
		{"what is sent does not count", tenant, out("x-tenant", "acme"), ""},
		{"sent", sent, out("x-tenant", "acme"), "acme"},
		{"received does not count", sent, in("x-tenant", "acme"), ""},
		{"peer", grpclimit.ByPeer, from(&net.TCPAddr{IP: net.IPv4(192, 0, 2, 7), Port: 1}), "192.0.2.7"},
		{"peer, IPv4 as IPv6", grpclimit.ByPeer, from(text("[::ffff:192.0.2.7]:1")), "192.0.2.7"},
		{"peer, IPv6", grpclimit.ByPeer, from(&net.TCPAddr{IP: net.ParseIP("fe80::1"), Zone: "eth0", Port: 1}), "fe80::1"},
		{"peer, Unix socket", grpclimit.ByPeer, from(&net.UnixAddr{Name: "@", Net: "unix"}), "@"},
		{"peer without an address", grpclimit.ByPeer, from(nil), ""},
		{"no peer", grpclimit.ByPeer, t.Context(), ""},
		{"joined", both, in("x-tenant", "acme", "x-user", "1"), "acme|1"},
		{"joined, part with |", both, in("x-tenant", "acme|1", "x-user", ""), `acme\|1|`},
		{"joined, part with \\", both, in("x-tenant", `acme\`, "x-user", "1"), `acme\\|1`},
	} {
		require.Equal(t, test.want, test.key(test.ctx, unary), test.name)
	}
}

type text string

func (text) Network() string  { return "tcp" }
func (s text) String() string { return string(s) }

// Through a real server: the caller's metadata and address are there.
func TestKeysOnServer(t *testing.T) {
	for _, kind := range kinds {
		gate := &stub{}
		key := grpclimit.Join(grpclimit.ByMethod, grpclimit.ByPeer, grpclimit.ByMetadata("x-tenant"))
		client := dial(t, serve(t, &service{}, onServer(interceptors(t, gate, grpclimit.WithKey(key)))...))
		require.NoError(t, kind.call(metadata.AppendToOutgoingContext(limit(t), "x-tenant", "acme"), client))
		require.Equal(t, []string{"/grpc.testing.TestService/" + kind.name + "|127.0.0.1|acme"}, gate.keys)
	}
}
