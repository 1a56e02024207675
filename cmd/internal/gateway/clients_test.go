package gateway

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// entered is a registry that counts the calls it has let pass.
type entered struct {
	*registry.Registry
	calls atomic.Int64
}

// Enter implements gate.Gate.
func (e *entered) Enter(ctx context.Context, key string) (*gate.Admission, error) {
	a, err := e.Registry.Enter(ctx, key)
	if err == nil && a.OK {
		e.calls.Add(1)
	}
	return a, err
}

// places is a gateway on a real connection, with a row of three places and an upstream of endless answers.
func places(t *testing.T, args ...string) (limits *entered, addr string) {
	t.Helper()
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/endless":
			for block := make([]byte, 64<<10); ; {
				if _, err := w.Write(block); err != nil {
					return
				}
			}
		case "/socket":
			c, _, err := w.(http.Hijacker).Hijack()
			if err == nil {
				_, err = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
				for err == nil {
					_, err = c.Write(make([]byte, 64<<10))
				}
				_ = c.Close()
			}
		case "/events":
			w.Header().Set("Content-Type", "text/event-stream")
			for i := range 10 {
				_, _ = fmt.Fprintf(w, "data: %d\n\n", i)
				_ = http.NewResponseController(w).Flush()
				time.Sleep(300 * time.Millisecond)
			}
		default:
			_, _ = io.Copy(io.Discard, r.Body)
		}
	}))
	t.Cleanup(upstream.Close)
	rows, err := registry.New(registry.Static{{Name: "/*", NoRate: true, Concurrent: 3}}, tokenbucket.NewMemoryStore(),
		registry.WithLocalSemaphores(), registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(rows.Close)
	limits = &entered{Registry: rows}
	p := openProxy(t, limits, append([]string{"--upstream", upstream.URL, "--listen", "127.0.0.1:0", "--admin", ""}, args...)...)
	s := &service{config: p.config, log: p.log, proxy: p, admin: &admin{config: p.config, proxy: p}}
	t.Cleanup(s.close)
	p.config.listen = redistest.FreeAddr()
	require.NoError(t, s.listen())
	return limits, p.config.listen
}

// Clients that are slow on purpose, in every way, do not keep a row of three places longer than the timeouts say.
func TestPlacesOfSlowClients(t *testing.T) {
	for name, request := range map[string]string{
		"read nothing":             "GET /endless HTTP/1.1\r\nHost: h\r\n\r\n",
		"read nothing of a socket": "GET /socket HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
		"read slowly":              "GET /endless?slowly HTTP/1.1\r\nHost: h\r\n\r\n",
		"send nothing":             "POST /body HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n",
		"send slowly":              "POST /body?slowly HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limits, addr := places(t, "--response-timeout", "3s", "--body-timeout", "3s", "--response-rate", "1000000", "--body-rate", "1000")
			inside := func() int {
				u, _, err := limits.Usage(t.Context(), "/*")
				require.NoError(t, err)
				return u.Inside
			}
			stop := make(chan struct{})
			var clients sync.WaitGroup
			defer clients.Wait()
			defer close(stop)
			for range 3 {
				c, err := net.Dial("tcp", addr)
				require.NoError(t, err)
				defer func() { _ = c.Close() }()
				_, err = io.WriteString(c, request)
				require.NoError(t, err)
				if !strings.Contains(request, "slowly") {
					continue
				}
				clients.Go(func() {
					for err := error(nil); err == nil; {
						if strings.HasPrefix(request, "POST") {
							_, err = c.Write([]byte("x"))
						} else {
							_, err = c.Read(make([]byte, 100))
						}
						select {
						case <-stop:
							return
						case <-time.After(10 * time.Millisecond):
						}
					}
				})
			}
			require.Eventually(t, func() bool { return limits.calls.Load() == 3 }, 30*time.Second, time.Millisecond, "each has had a place")
			require.Eventually(t, func() bool { return inside() == 0 }, 60*time.Second, 10*time.Millisecond, "the places are free again")
			response, err := http.Get("http://" + addr + "/other")
			require.NoError(t, err)
			_ = response.Body.Close()
			require.Equal(t, http.StatusOK, response.StatusCode)
		})
	}
}

// An upgraded connection keeps its place until it ends.
func TestUpgradedConnectionsKeepTheirPlace(t *testing.T) {
	for _, way := range []string{"--inbound=false", "--inbound"} {
		limits, addr := places(t, way)
		inside := func() int {
			u, _, err := limits.Usage(t.Context(), "/*")
			require.NoError(t, err)
			return u.Inside
		}
		var sockets []net.Conn
		for range 3 {
			c, err := net.Dial("tcp", addr)
			require.NoError(t, err)
			defer func() { _ = c.Close() }()
			_, err = io.WriteString(c, "GET /socket HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
			require.NoError(t, err)
			status := make([]byte, len("HTTP/1.1 101"))
			_, err = io.ReadFull(c, status)
			require.NoError(t, err)
			require.Equal(t, "HTTP/1.1 101", string(status))
			sockets = append(sockets, c)
		}
		require.Equal(t, 3, inside())
		response, err := http.Get("http://" + addr + "/other")
		require.NoError(t, err)
		_ = response.Body.Close()
		require.Equal(t, http.StatusTooManyRequests, response.StatusCode)
		for _, c := range sockets {
			require.NoError(t, c.Close())
		}
		require.Eventually(t, func() bool { return inside() == 0 }, 30*time.Second, time.Millisecond)
	}
}

// A stream of events outlasts --response-timeout, and so does the connection's next call.
func TestStreamsOutlastTheTimeout(t *testing.T) {
	_, addr := places(t, "--response-timeout", "1s")
	client := http.Client{Transport: &http.Transport{MaxIdleConns: 1}}
	defer client.CloseIdleConnections()
	for range 2 {
		response, err := client.Get("http://" + addr + "/events")
		require.NoError(t, err)
		text, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		require.Equal(t, 10, strings.Count(string(text), "data: "))
		_ = response.Body.Close()
	}
}
