package httplimit_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// watched serves a handler with WatchClients until the test ends.
func watched(t *testing.T, handler http.Handler) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := &http.Server{Handler: handler}
	watching := httplimit.WatchClients(server, l)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(watching) }()
	t.Cleanup(func() { _ = server.Close(); <-ended })
	return l.Addr().String()
}

func connect(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
	return c
}

// A client that has sent more than its request and leaves ends the wait of its request, and takes no permit.
func TestClientsThatSendMoreAndLeave(t *testing.T) {
	for name, more := range map[string]string{
		"nothing":             "",
		"a line end":          "\r\n",
		"a request":           "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
		"two requests":        "GET / HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n",
		"more than is waited": strings.Repeat("x", 1<<20),
	} {
		t.Run(name, func(t *testing.T) {
			began, ended, served := make(chan bool, 9), make(chan error, 9), make(chan bool, 9)
			l := bursty(t, 0.001, tb.WithInitialPermits(0))
			h := limited(t, gate.One(l, time.Hour), http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served <- true }))
			c := connect(t, watched(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				began <- true
				h.ServeHTTP(w, r)
				ended <- r.Context().Err()
			})))
			_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
			require.NoError(t, err)
			<-began
			_, _ = io.WriteString(c, more)
			if name != "more than is waited" {
				time.Sleep(20 * time.Millisecond) // so that the server reads it apart, usually
				require.NoError(t, c.Close())
			}
			select {
			case err := <-ended:
				require.ErrorIs(t, err, context.Canceled)
			case <-time.After(30 * time.Second):
				t.Fatal("the request still waits")
			}
			require.Empty(t, served)
		})
	}
}

// Pipelined requests are served in turn, with their bodies, however they are cut into packets.
func TestPipelinedRequests(t *testing.T) {
	addr := watched(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		time.Sleep(time.Duration(len(r.URL.Path)%4) * time.Millisecond)
		_, _ = fmt.Fprintf(w, "%s %d", r.URL.Path, len(body))
	}))
	var all sync.WaitGroup
	for cut := range 12 {
		all.Go(func() {
			var text strings.Builder
			var want []string
			for i := range 40 {
				path, n := "/"+strings.Repeat("x", i), 0
				if i%3 == 0 {
					n = i * 97
				}
				_, _ = fmt.Fprintf(&text, "POST %s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", path, n, strings.Repeat("b", n))
				want = append(want, fmt.Sprintf("%s %d", path, n))
			}
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = c.Close() }()
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			go func() {
				for rest, size := text.String(), 1+cut*cut*31; rest != ""; {
					n := min(size, len(rest))
					_, _ = io.WriteString(c, rest[:n])
					rest = rest[n:]
					if size < 100 {
						size = size*3 + 1
					}
				}
			}()
			answers := bufio.NewReader(c)
			for _, w := range want {
				response, err := http.ReadResponse(answers, nil)
				if err != nil {
					t.Errorf("cut %d: %s: %v", cut, w, err)
					return
				}
				body, err := io.ReadAll(response.Body)
				if string(body) != w || err != nil {
					t.Errorf("cut %d: %q, want %q: %v", cut, body, w, err)
				}
			}
		})
	}
	all.Wait()
}

// A hijacked connection is the handler's own: nothing is lost, deadlines hold, and each direction can be closed.
func TestHijackedConnections(t *testing.T) {
	began := make(chan bool, 1)
	addr := watched(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began <- true
		time.Sleep(20 * time.Millisecond) // the client sends more
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		_ = conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		first := make([]byte, 5)
		if _, err := io.ReadFull(buffered, first); err != nil || string(first) != "early" {
			t.Errorf("%q %v", first, err)
		}
		if _, err := buffered.ReadByte(); err == nil {
			t.Error("no deadline")
		}
		_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
		_, _ = conn.Write([]byte("go on\n"))
		rest, err := io.ReadAll(conn)
		_, _ = fmt.Fprintf(conn, "%d %v", len(rest), err)
	}))
	c := connect(t, addr)
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	<-began
	_, _ = io.WriteString(c, "early")
	answers := bufio.NewReader(c)
	line, err := answers.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "go on\n", line)
	_, _ = io.WriteString(c, strings.Repeat("x", 1<<20))
	require.NoError(t, c.(*net.TCPConn).CloseWrite())
	text, err := io.ReadAll(answers)
	require.NoError(t, err)
	require.Equal(t, "1048576 <nil>", string(text))
}

// interrupted is a watched connection whose read of one byte returns late: once net/http has interrupted it.
type interrupted struct {
	net.Conn
	read, interrupt chan bool
}

func (c *interrupted) NetConn() net.Conn { return c.Conn }

func (c *interrupted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if len(p) == 1 && n == 1 {
		c.read <- true
		<-c.interrupt
	}
	return n, err
}

func (c *interrupted) SetReadDeadline(t time.Time) error {
	err := c.Conn.SetReadDeadline(t)
	if !t.IsZero() && time.Until(t) < 0 {
		time.Sleep(10 * time.Millisecond) // the watch sees the deadline, usually
		c.interrupt <- true
	}
	return err
}

type interrupting struct {
	net.Listener
	read, interrupt chan bool
}

func (l interrupting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return &interrupted{c, l.read, l.interrupt}, err
}

// A next request whose first byte comes while net/http interrupts its read is not that of a client that has left.
func TestNextRequestAsNetHTTPInterruptsItsRead(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	began := make(chan bool, 1)
	next := interrupting{read: make(chan bool, 1), interrupt: make(chan bool, 1)}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			began <- true
			<-next.read // of the first byte of the next request
		}
		_, _ = fmt.Fprint(w, r.Context().Err())
	})}
	next.Listener = httplimit.WatchClients(server, l)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(next) }()
	t.Cleanup(func() { _ = server.Close(); <-ended })

	c := connect(t, l.Addr().String())
	answers := bufio.NewReader(c)
	_, err = io.WriteString(c, "POST / HTTP/1.1\r\nHost: h\r\n\r\n")
	require.NoError(t, err)
	<-began
	for _, more := range []string{"G", "ET / HTTP/1.1\r\nHost: h\r\n\r\n"} {
		_, err = io.WriteString(c, more)
		require.NoError(t, err)
		response, err := http.ReadResponse(answers, nil)
		require.NoError(t, err)
		text, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		require.Equal(t, "<nil>", string(text))
	}
}
