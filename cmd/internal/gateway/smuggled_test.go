package gateway

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// An upstream that answers GET and its like without reading their bodies takes what it has not read for the next request of the connection.
// So it gets none on a connection that goes on: calls within a body would not be counted, and their answers be other clients'.
func TestCallsWithinBodies(t *testing.T) {
	for _, method := range []string{"GET", "HEAD", "DELETE", "OPTIONS", "TRACE"} {
		for _, framing := range []string{"Content-Length: %[1]d\r\n\r\n%[2]s", "Transfer-Encoding: chunked\r\n\r\n%[1]x\r\n%[2]s\r\n0\r\n\r\n"} {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			var running sync.WaitGroup
			var mu sync.Mutex
			var served []string
			closed := false
			running.Go(func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					running.Go(func() {
						defer func() { _ = c.Close() }()
						from := bufio.NewReader(c)
						for {
							head, err := http.ReadRequest(from)
							if err != nil {
								return
							}
							_, _ = from.Peek(max(0, int(head.ContentLength))) // the body has arrived, but is not read
							mu.Lock()
							served, closed = append(served, head.URL.Path), head.Close
							mu.Unlock()
							_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
							if head.Close {
								lingeringClose(c)
								return
							}
						}
					})
				}
			})
			p := openProxy(t, &keys{}, "--upstream", "http://"+l.Addr().String())
			server := httptest.NewServer(p)
			body := "GET /limited HTTP/1.1\r\nHost: h\r\n\r\n"
			status, _ := raw(t, server, method+" /free HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"+fmt.Sprintf(framing, len(body), body))
			server.Close()
			p.base.CloseIdleConnections()
			require.NoError(t, l.Close())
			running.Wait()
			require.Equal(t, http.StatusOK, status)
			require.NotContains(t, served, "/limited", "%s %s", method, framing)
			require.True(t, closed, "%s %s", method, framing)
		}
	}
}

// Closing a socket that holds unread bytes resets it, and the reset can overtake the response. As servers do, lingeringClose ends the sending
// side and reads on until the client has closed its own.
func lingeringClose(c net.Conn) {
	_ = c.(*net.TCPConn).CloseWrite()
	_, _ = io.Copy(io.Discard, c)
}
