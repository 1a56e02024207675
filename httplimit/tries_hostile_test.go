package httplimit_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/internal/tries/triestest"
)

// A request with the context of a response's Request, which does not end with its call, is a request of its own: it takes one permit, and holds
// one place, whether it goes through the Transport or not.
func TestHostileContextOfResponses(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
	defer server.Close()
	for name, again := range map[string]func(r *http.Request) *http.Request{
		"its context": func(r *http.Request) *http.Request { return get(t, server.URL).WithContext(r.Context()) },
		"a clone":     func(r *http.Request) *http.Request { return r.Clone(r.Context()) },
		"itself":      func(r *http.Request) *http.Request { return r },
	} {
		for _, around := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, through the Transport: %t", name, around), func(t *testing.T) {
				base := &http.Transport{}
				defer base.CloseIdleConnections()
				g := &counted{left: 9}
				var tr http.RoundTripper = transport(t, g, httplimit.WithBase(base))
				response, err := tr.RoundTrip(get(t, server.URL))
				require.NoError(t, err)
				_, _ = io.Copy(io.Discard, response.Body)
				_ = response.Body.Close()
				require.Equal(t, 1, g.asked)
				require.Zero(t, g.inside)
				want := 2
				if !around {
					tr, want = base, 1
				}
				next, err := tr.RoundTrip(again(response.Request))
				require.NoError(t, err)
				_, _ = io.Copy(io.Discard, next.Body)
				_ = next.Body.Close()
				require.Equal(t, want, g.asked)
				require.Zero(t, g.inside, "no call is in progress")
			})
		}
	}
}

// A panic of the gate, or of an option, in a further try leaves no connection behind.
func TestHostilePanicsOfTries(t *testing.T) {
	upstream := triestest.NewMortal(t)
	base := &http.Transport{MaxConnsPerHost: 1, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err == nil {
			t.Cleanup(func() { _ = c.Close() }) // before that of the upstream, which waits for its connections
		}
		return c, err
	}}
	upstream.Keep(t, base, 1)
	g := &counted{left: 9}
	calls := 0
	failing := gateOf(func(ctx context.Context) (*gate.Admission, error) {
		if calls++; calls == 2 {
			panic("of a gate")
		}
		return g.Enter(ctx, "")
	})
	tr := transport(t, failing, httplimit.WithBase(base))
	require.Panics(t, func() { _, _ = tr.RoundTrip(get(t, upstream.URL())) })
	require.Zero(t, g.inside)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	response, err := tr.RoundTrip(get(t, upstream.URL()).WithContext(ctx))
	require.NoError(t, err)
	_ = response.Body.Close()
}

type gateOf func(ctx context.Context) (*gate.Admission, error)

func (g gateOf) Enter(ctx context.Context, _ string) (*gate.Admission, error) { return g(ctx) }
func (g gateOf) Penalize(context.Context, string, time.Duration) error        { return nil }

// Shutdown of a server ends with watched connections that have sent more than their request, and leaves no goroutine.
func TestHostileShutdown(t *testing.T) {
	var requests atomic.Int64
	server := &http.Server{IdleTimeout: 200 * time.Millisecond, ReadTimeout: 2 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		time.Sleep(50 * time.Millisecond)
	})}
	addr := hostileServe(t, httplimit.WatchClients, server)
	for i := range 20 {
		c := connect(t, addr)
		_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx")
		require.NoError(t, err)
		if i%2 == 0 {
			time.Sleep(10 * time.Millisecond)
			_, _ = io.WriteString(c, "\r\n")
		}
	}
	require.Eventually(t, func() bool { return requests.Load() == 20 }, 10*time.Second, time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	require.NoError(t, server.Shutdown(ctx))
	left := func() string {
		all := make([]byte, 1<<20)
		return string(all[:runtime.Stack(all, true)])
	}
	require.Eventually(t, func() bool { return !strings.Contains(left(), "readAhead") }, 5*time.Second, 10*time.Millisecond, "goroutines")
}
