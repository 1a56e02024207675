package httplimit_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// lastPriority is a gate that records the priority of the last call.
type lastPriority struct{ p tb.Priority }

func (g *lastPriority) Enter(ctx context.Context, _ string) (*gate.Admission, error) {
	g.p = gate.PriorityOf(ctx)
	return &gate.Admission{OK: true}, nil
}

func (g *lastPriority) Penalize(context.Context, string, time.Duration) error { return nil }

// byTier is the priority that a trusted proxy has written.
func byTier(r *http.Request) tb.Priority {
	p, _ := tb.ParsePriority(r.Header.Get("X-Priority"))
	return p
}

// A request has the priority that the function returns, and what it causes has it, too.
func TestPriority(t *testing.T) {
	in, out := &lastPriority{p: 9}, &lastPriority{p: 9}
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer upstream.Close()
	client := &http.Client{Transport: transport(t, out)}
	defer client.CloseIdleConnections()
	h := limited(t, in, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		call, err := http.NewRequestWithContext(r.Context(), http.MethodGet, upstream.URL, nil)
		require.NoError(t, err)
		response, err := client.Do(call)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
	}), httplimit.WithPriority(byTier))
	for text, want := range map[string]tb.Priority{"": tb.Normal, "low": tb.Low, "lowest": tb.Lowest, "high": tb.Normal} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("X-Priority", text)
		h.ServeHTTP(httptest.NewRecorder(), r)
		require.Equal(t, want, in.p)
		require.Equal(t, want, out.p, "of a call that the request causes")
	}
	client.Transport = transport(t, out, httplimit.WithPriority(func(*http.Request) tb.Priority { return tb.Lowest }))
	response, err := client.Get(upstream.URL)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, tb.Lowest, out.p)
	_, err = httplimit.NewTransport(out, httplimit.WithPriority(nil))
	require.ErrorIs(t, err, tb.ErrInvalidConfig)
	require.ErrorContains(t, err, "priority function")
}
