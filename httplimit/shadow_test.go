package httplimit_test

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Calls of a limit in shadow pass at once, inbound and outbound, and nobody is told of a limit that does not limit.
func TestShadowPasses(t *testing.T) {
	limits, err := registry.New(registry.Static{{Name: "/fares", Rate: 0.001, Shadow: true}}, tb.NewMemoryStore(),
		registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	defer limits.Close()
	h := limited(t, limits, ok)
	for range 5 {
		began := time.Now()
		response := serve(t, h)
		require.Equal(t, http.StatusOK, response.StatusCode)
		require.Empty(t, response.Header["Ratelimit"])
		require.Empty(t, response.Header["Retry-After"])
		require.Less(t, time.Since(began), 10*time.Second, "one permit takes 1000 s")
	}
	upstream := httptest.NewServer(ok)
	defer upstream.Close()
	transport, err := httplimit.NewTransport(limits)
	require.NoError(t, err)
	client := &http.Client{Transport: transport}
	for range 5 {
		response, err := client.Get(upstream.URL + "/fares")
		require.NoError(t, err)
		require.Equal(t, "ok", text(t, response))
	}
}
