package gateway

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

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
