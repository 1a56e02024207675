package gateway

import (
	"bufio"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// pipes is a listener whose connections are in memory, so that their time can be the test's.
type pipes struct {
	calls chan net.Conn
	done  chan struct{}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.calls:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error { close(p.done); return nil }

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// Whoever announces a body to the admin port and does not send it has no connection for ever.
func TestSlowBodies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, err := given(t, enough, nil, "")
		require.NoError(t, err)
		c, err := o.parse()
		require.NoError(t, err)
		p, err := newProxy(c, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		a := &admin{config: c, proxy: p}
		p.metrics.add(a)
		l := &pipes{make(chan net.Conn), make(chan struct{})}
		server := &http.Server{Handler: a.handler(), ReadHeaderTimeout: 10 * time.Second}
		go func() { _ = server.Serve(l) }()
		defer func() { _ = server.Close() }()
		ours, theirs := net.Pipe()
		l.calls <- theirs
		began := time.Now()
		go func() { _, _ = io.WriteString(ours, "POST /healthz HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n") }()
		_, err = io.Copy(io.Discard, bufio.NewReader(ours))
		require.NoError(t, err)
		require.LessOrEqual(t, time.Since(began), time.Minute)
	})
}
