package redistest

import (
	"bytes"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// Proxy stands between a client and a server and loses what it is told to.
type Proxy struct {
	Addr string
	// Lose is asked for every request that contains Match, in order from 1, whether its reply shall be lost. The server
	// has executed the request by then.
	Match string
	Lose  func(n int64) bool

	seen atomic.Int64
}

// Seen is the number of matching requests that reached the server.
func (p *Proxy) Seen() int64 { return p.seen.Load() }

// StartProxy starts a proxy that lives as long as the test. After a lost reply the connection is silent until the client
// gives it up.
func StartProxy(t testing.TB, addr, match string, lose func(n int64) bool) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	need(t, err)
	p := &Proxy{Addr: l.Addr().String(), Match: match, Lose: lose}
	var conns sync.Map
	var running sync.WaitGroup
	t.Cleanup(func() {
		_ = l.Close()
		conns.Range(func(c, _ any) bool { _ = c.(net.Conn).Close(); return true })
		running.Wait()
	})
	running.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", addr)
			if err != nil {
				_ = client.Close()
				continue
			}
			conns.Store(client, nil)
			conns.Store(server, nil)
			var mute atomic.Bool
			running.Go(func() { p.forward(server, client, &mute) })
			running.Go(func() { p.back(client, server, &mute) })
		}
	})
	return p
}

// forward counts requests. Tests send small ones, so each arrives in one piece.
func (p *Proxy) forward(server, client net.Conn, mute *atomic.Bool) {
	defer func() { _ = server.Close() }()
	buf := make([]byte, 64<<10)
	for {
		n, err := client.Read(buf)
		if err != nil {
			return
		}
		if bytes.Contains(buf[:n], []byte(p.Match)) && p.Lose(p.seen.Add(1)) {
			mute.Store(true)
		}
		if _, err := server.Write(buf[:n]); err != nil {
			return
		}
	}
}

func (p *Proxy) back(client, server net.Conn, mute *atomic.Bool) {
	defer func() { _ = client.Close() }()
	buf := make([]byte, 64<<10)
	for {
		n, err := server.Read(buf)
		if err != nil {
			return
		}
		if mute.Load() {
			_, _ = io.Copy(io.Discard, server)
			return
		}
		if _, err := client.Write(buf[:n]); err != nil {
			return
		}
	}
}
