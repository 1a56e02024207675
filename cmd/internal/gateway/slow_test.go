package gateway

import (
	"bufio"
	"io"
	"net"
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

// A client that announces a body to the admin port and does not send it loses its connection after a while.
func TestSlowBodies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := openProxy(t, nil, "--upstream", "http://u:1")
		a := &admin{config: p.config, proxy: p}
		p.metrics.add(a)
		ours := inMemory(t, p.config.adminServer(a))()
		began := time.Now()
		_, err := io.WriteString(ours, "POST /healthz HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n")
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, bufio.NewReader(ours))
		require.NoError(t, err)
		require.LessOrEqual(t, time.Since(began), time.Minute)
	})
}

// A client that does not read what it has asked the admin port for has its connection closed.
func TestSlowReadersOfTheAdminPort(t *testing.T) {
	for _, path := range []string{"/healthz", "/readyz", "/stats", "/metrics", "/console/"} {
		t.Run(path, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := openProxy(t, nil, "--upstream", "http://u:1")
				a := &admin{config: p.config, proxy: p}
				p.metrics.add(a)
				ours := inMemory(t, p.config.adminServer(a))()
				_, err := io.WriteString(ours, "GET "+path+" HTTP/1.1\r\nHost: localhost\r\n\r\n")
				require.NoError(t, err)
				time.Sleep(answerTime + time.Second)
				synctest.Wait()
				_, err = ours.Read(make([]byte, 1))
				require.ErrorIs(t, err, io.EOF, "nothing is written any more")
			})
		})
	}
}
