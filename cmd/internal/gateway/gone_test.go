package gateway

import (
	"bufio"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// listening is a gateway on a real connection with one row.
func listening(t *testing.T, row registry.Limit, upstream http.HandlerFunc, args ...string) (p *proxy, limits *registry.Registry) {
	t.Helper()
	server := httptest.NewServer(upstream)
	t.Cleanup(server.Close)
	row.Name = "/*"
	limits, err := registry.New(registry.Static{row}, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores(), registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	p = openProxy(t, limits, append([]string{"--upstream", server.URL, "--admin", ""}, args...)...)
	s := &service{config: p.config, log: p.log, proxy: p, admin: &admin{config: p.config, proxy: p}}
	t.Cleanup(s.close)
	p.config.listen = redistest.FreeAddr()
	require.NoError(t, s.listen())
	return p, limits
}

func (p *proxy) dial(t *testing.T) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", p.config.listen)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
	return c
}

const anyRequest = "GET /events HTTP/1.1\r\nHost: h\r\n\r\n"

// A client that has sent a byte more than its request and leaves does not keep its place, with and without a bound of the connections.
func TestPlacesOfClientsThatSendMore(t *testing.T) {
	for _, args := range [][]string{nil, {"--max-connections", "0"}} {
		p, limits := listening(t, registry.Limit{NoRate: true, Concurrent: 1}, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, "data: 1\n\n")
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, args...)
		c := p.dial(t)
		_, err := io.WriteString(c, anyRequest)
		require.NoError(t, err)
		answers := bufio.NewReader(c)
		for line := ""; line != "data: 1\n"; {
			line, err = answers.ReadString('\n')
			require.NoError(t, err)
		}
		require.Equal(t, 1, inside(t, limits))
		_, err = io.WriteString(c, "\r\n")
		require.NoError(t, err)
		time.Sleep(20 * time.Millisecond) // so that the gateway reads it apart, usually
		require.NoError(t, c.Close())
		require.Eventually(t, func() bool { return inside(t, limits) == 0 && p.calls.inFlight.Load() == 0 }, 30*time.Second, time.Millisecond)
	}
}

// Nor does it keep its place in the queue of the rate, or reach the upstream.
func TestQueuesOfClientsThatSendMore(t *testing.T) {
	var received atomic.Int64
	p, _ := listening(t, registry.Limit{Rate: 0.01, MaxWait: 1e6 * time.Second}, func(http.ResponseWriter, *http.Request) { received.Add(1) })
	first := p.dial(t)
	_, err := io.WriteString(first, anyRequest)
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(first), nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, response.StatusCode)
	var clients []net.Conn
	for range 5 {
		c := p.dial(t)
		_, err := io.WriteString(c, anyRequest)
		require.NoError(t, err)
		clients = append(clients, c)
	}
	require.Eventually(t, func() bool { return p.calls.inFlight.Load() == 5 }, 30*time.Second, time.Millisecond)
	for _, c := range clients {
		_, err := io.WriteString(c, "\r\n")
		require.NoError(t, err)
	}
	time.Sleep(20 * time.Millisecond)
	for _, c := range clients {
		require.NoError(t, c.Close())
	}
	require.Eventually(t, func() bool { return p.calls.inFlight.Load() == 0 }, 30*time.Second, time.Millisecond)
	require.EqualValues(t, 1, received.Load())
}

// An informational response of the upstream keeps no field that concerns its connection.
func TestEarlyHints(t *testing.T) {
	p, _ := listening(t, registry.Limit{Rate: 1e6}, func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\nConnection: X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=1\r\nProxy-Authenticate: x\r\n\r\n"+
			"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		_ = conn.Close()
	})
	c := p.dial(t)
	_, err := io.WriteString(c, anyRequest)
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusEarlyHints, response.StatusCode)
	require.Equal(t, http.Header{"Link": {"</a.css>"}}, response.Header)
}

// --upstream-idle bounds the connections that are kept.
func TestIdleUpstreamConnections(t *testing.T) {
	for idle, want := range map[string]int64{"0": 3, "1": 1} {
		var opened atomic.Int64
		upstream := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		upstream.Config.ConnState = func(_ net.Conn, s http.ConnState) {
			if s == http.StateNew {
				opened.Add(1)
			}
		}
		upstream.Start()
		t.Cleanup(upstream.Close)
		server := newTestProxy(t, &keys{}, "--upstream", upstream.URL, "--upstream-idle", idle)
		for range 3 {
			status, _, _ := send(t, server, "/fares", nil)
			require.Equal(t, http.StatusOK, status)
		}
		require.Equal(t, want, opened.Load())
	}
}

// A client that closes its direction after its request is served, on every row.
func TestClientsThatFinishSending(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("elsewhere such a client cannot be told from one that has left")
	}
	for name, row := range map[string]registry.Limit{"rate": {Rate: 4, MaxWait: time.Minute}, "concurrency": {NoRate: true, Concurrent: 1}, "off": {Rate: 1, Disabled: true}} {
		for _, args := range [][]string{nil, {"--inbound"}, {"--max-connections", "0"}} {
			p, _ := listening(t, row, func(w http.ResponseWriter, r *http.Request) {
				time.Sleep(200 * time.Millisecond) // longer than the first probe takes to come
				_, _ = io.Copy(w, r.Body)
			}, args...)
			for _, request := range []string{anyRequest, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nfares"} {
				c := p.dial(t)
				_, err := io.WriteString(c, request)
				require.NoError(t, err)
				require.NoError(t, c.(*net.TCPConn).CloseWrite())
				all, err := io.ReadAll(c)
				require.NoError(t, err)
				require.Contains(t, string(all), "HTTP/1.1 200 OK", "%s %v", name, args)
			}
		}
	}
}
