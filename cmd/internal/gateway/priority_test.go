package gateway

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// lastPriority is a gate that records the priority of the last call.
type lastPriority struct{ p tokenbucket.Priority }

func (g *lastPriority) Enter(ctx context.Context, _ string) (*gate.Admission, error) {
	g.p = gate.PriorityOf(ctx)
	return &gate.Admission{OK: true}, nil
}

func (g *lastPriority) Penalize(context.Context, string, time.Duration) error { return nil }

// The field of --priority counts only from trusted proxies, in each mode. From others it is neither honoured nor forwarded.
func TestPriority(t *testing.T) {
	var got http.Header
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.Header }))
	defer upstream.Close()
	for _, mode := range [][]string{nil, {"--inbound"}} {
		args := append([]string{"--upstream", upstream.URL, "--priority", "header:x-priority"}, mode...)
		trusting := append([]string{"--trusted-proxy", "127.0.0.1"}, args...)
		for _, tt := range []struct {
			args   []string
			values []string
			want   tokenbucket.Priority
			sent   bool
		}{
			{args, []string{"lowest"}, tokenbucket.Normal, false},
			{trusting, []string{"lowest"}, tokenbucket.Lowest, true},
			{trusting, []string{" Low "}, tokenbucket.Low, true},
			{trusting, []string{"low", "lowest", "normal"}, tokenbucket.Lowest, true},
			{trusting, []string{"high"}, tokenbucket.Normal, true},
			{trusting, nil, tokenbucket.Normal, false},
		} {
			g := &lastPriority{p: 9}
			send(t, newTestProxy(t, g, tt.args...), "http://h/", http.Header{"X-Priority": tt.values, "X_priority": {"lowest"}})
			require.Equal(t, tt.want, g.p, "%v %v", tt.args, tt.values)
			require.Equal(t, tt.sent, got["X-Priority"] != nil)
			require.Empty(t, got["X_priority"])
		}
	}
	g := &lastPriority{p: 9}
	send(t, newTestProxy(t, g, "--upstream", upstream.URL, "--trusted-proxy", "127.0.0.1"), "http://h/", http.Header{"X-Priority": {"low"}})
	require.Equal(t, tokenbucket.Normal, g.p, "without the setting")
	for _, bad := range []string{"X-Priority", "header:", "header:a b", "client", ""} {
		_, err := parseArgs(t, "--priority", bad)
		require.ErrorContains(t, err, "want none or header:NAME", bad)
	}
}
