package gateway

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A client may close its direction of an upgraded stream, and gets what the upstream replies to all that it has sent.
func TestHalfClosedUpgrades(t *testing.T) {
	for name, row := range map[string]registry.Limit{"rate": {Rate: 1e6}, "concurrency": {NoRate: true, Concurrent: 1}} {
		for _, args := range [][]string{nil, {"--inbound"}, {"--max-connections", "0"}} {
			p, limits := listening(t, row, func(w http.ResponseWriter, _ *http.Request) {
				conn, buffered, err := w.(http.Hijacker).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				defer func() { _ = conn.Close() }()
				_, _ = conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"))
				all, _ := io.ReadAll(buffered)
				_, _ = fmt.Fprintf(conn, "%d bytes", len(all))
			}, args...)
			c := p.dial(t)
			_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
			require.NoError(t, err)
			answers := bufio.NewReader(c)
			response, err := http.ReadResponse(answers, nil)
			require.NoError(t, err)
			require.Equal(t, http.StatusSwitchingProtocols, response.StatusCode)
			_, err = c.Write(make([]byte, 100_000))
			require.NoError(t, err)
			require.NoError(t, c.(*net.TCPConn).CloseWrite())
			text, err := io.ReadAll(answers)
			require.NoError(t, err)
			require.Equal(t, "100000 bytes", string(text), "%s %v", name, args)
			require.Eventually(t, func() bool { return p.calls.inFlight.Load() == 0 }, 30*time.Second, time.Millisecond)
			if row.Concurrent > 0 {
				require.Zero(t, inside(t, limits))
			}
		}
	}
}

// An upstream that switches to a protocol that the client has not requested keeps no place, although its response is never closed.
func TestUnaskedUpgradeKeepsNoPlace(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n"))
		_ = conn.Close()
	}))
	defer upstream.Close()
	row := registry.Limit{Name: "/a", Row: "1", NoRate: true, Concurrent: 1}
	limits, err := registry.New(registry.Static{row}, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores())
	require.NoError(t, err)
	defer limits.Close()
	server := newTestProxy(t, limits, "--upstream", upstream.URL)
	for range 2 {
		status, _, _ := send(t, server, "http://x/a", http.Header{"Connection": {"Upgrade"}, "Upgrade": {"websocket"}})
		require.Equal(t, http.StatusBadGateway, status)
		require.Eventually(t, func() bool {
			u, _, err := limits.Usage(context.Background(), "/a")
			return err == nil && u.Inside == 0
		}, 30*time.Second, time.Millisecond, "the call has ended")
	}
}
