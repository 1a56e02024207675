package gateway

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
)

// Of several values the lowest counts, also if a proxy has joined them with commas (RFC 9110, section 5.3).
func TestJoinedPriorities(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer upstream.Close()
	g := &lastPriority{p: 9}
	send(t, newTestProxy(t, g, "--upstream", upstream.URL, "--trusted-proxy", "127.0.0.1", "--priority", "header:x-priority"), "http://h/", http.Header{"X-Priority": {"normal, lowest"}})
	require.Equal(t, tokenbucket.Lowest, g.p)
}
