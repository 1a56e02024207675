package httplimit

import (
	"encoding/binary"
	"net"
	"syscall"
)

// peer is the other end of a TCP connection.
type peer struct{ conn syscall.RawConn }

// newPeer returns nil if the state of the connection cannot be known.
func newPeer(conn net.Conn) *peer {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	return &peer{raw}
}

// state asks the system. It reads nothing from the connection.
func (p *peer) state() peerState {
	const closed, closeWait = 7, 8 // of the kernel's tcp_states.h
	var info int
	var err error
	if p.conn.Control(func(fd uintptr) { info, err = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_INFO) }) != nil || err != nil {
		return peerOpen
	}
	switch binary.NativeEndian.AppendUint32(nil, uint32(info))[0] { // the first byte of struct tcp_info
	case closed:
		return peerGone
	case closeWait:
		return peerFinished
	}
	return peerOpen
}
