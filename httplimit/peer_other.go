//go:build !linux

package httplimit

import "net"

// peer is the other end of a connection. Its state is known on Linux only.
type peer struct{}

func newPeer(net.Conn) *peer { return nil }

func (*peer) state() peerState { return peerOpen }
