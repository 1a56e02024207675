package console_test

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
)

const (
	writerToken = "ann's-own-secret-token"
	readerToken = "bob's-own-secret-token"
)

func users() []console.User {
	return []console.User{{Name: "ann", Token: writerToken, Write: true}, {Name: "bob", Token: readerToken}}
}

// newConsole makes one of the example's figures.
func newConsole(t *testing.T, config console.Config) *console.Console {
	if config.Source == nil {
		config.Source = fleettest.Example()
	}
	if config.Log == nil {
		config.Log = slog.New(slog.DiscardHandler)
	}
	c, err := console.New(config)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// local is a request of this machine.
func local(method, path string, headers ...string) *http.Request {
	r := httptest.NewRequest(method, "http://127.0.0.1:8081"+path, nil)
	r.RemoteAddr = "127.0.0.1:50000"
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

func ask(c http.Handler, r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	c.ServeHTTP(w, r)
	return w
}

func networks(texts ...string) (all []netip.Prefix) {
	for _, s := range texts {
		all = append(all, netip.MustParsePrefix(s))
	}
	return all
}

func contains(t *testing.T, w *httptest.ResponseRecorder, parts ...string) {
	t.Helper()
	for _, p := range parts {
		require.True(t, strings.Contains(w.Body.String(), p), "%q is not in the page:\n%s", p, w.Body.String())
	}
}
