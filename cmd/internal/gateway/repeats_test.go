package gateway

import (
	"crypto/tls"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/tries/triestest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// The transport repeats a call over each kept connection of an upstream that dies. The upstream never receives more calls than the row's window
// allows. A place of the call is free for its next try.
func TestRepeatedCallsTakePermits(t *testing.T) {
	for name, c := range map[string]struct {
		concurrent int
		args       []string
	}{
		"outbound":              {},
		"outbound, concurrency": {concurrent: 1},
		"inbound":               {args: []string{"--inbound"}},
		"inbound, concurrency":  {concurrent: 1, args: []string{"--inbound"}},
	} {
		t.Run(name, func(t *testing.T) {
			limits, err := registry.New(registry.Static{{Name: "/*", NoRate: true, Window: time.Hour, WindowLimit: 3, Concurrent: c.concurrent}},
				tokenbucket.NewMemoryStore(), registry.WithLocalWindows(), registry.WithLocalSemaphores(), registry.WithLogger(slog.New(slog.DiscardHandler)))
			require.NoError(t, err)
			t.Cleanup(limits.Close)
			upstream := triestest.NewMortal(t)
			p := openProxy(t, limits, append(c.args, "--upstream", "http://"+upstream.Addr().String())...)
			p.metrics.limits.Store(limits)
			upstream.Keep(t, p.base, 5)
			server := httptest.NewServer(p)
			t.Cleanup(server.Close)
			for range 5 {
				status, header, _ := send(t, server, "/fares", nil)
				if status == http.StatusTooManyRequests {
					require.NotEmpty(t, header.Get("Retry-After"))
					continue
				}
				require.Equal(t, http.StatusBadGateway, status, "the upstream may have received the call")
			}
			require.EqualValues(t, 3, upstream.Received.Load())
			require.EqualValues(t, 1, p.calls.upstreamErrors.Load())
			require.EqualValues(t, 4, p.calls.refused.Load())
			require.Equal(t, map[string]int{passed: 2, refusedCall: 1}, results(t, p, "tokenbucket_gateway_repeats_total"))
			require.Equal(t, map[string]int{passed: 1, refusedCall: 4}, results(t, p, "tokenbucket_gateway_admissions_total"))
			require.Eventually(t, func() bool { return p.calls.inFlight.Load() == 0 && inside(t, limits) == 0 }, time.Minute, time.Millisecond)
		})
	}
}

// results returns the values of a counter by its label result.
func results(t *testing.T, p *proxy, name string) map[string]int {
	t.Helper()
	families, err := p.metrics.calls.Gather()
	require.NoError(t, err)
	all := map[string]int{}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			for _, label := range m.GetLabel() {
				if n := int(m.GetCounter().GetValue()); label.GetName() == "result" && n > 0 {
					all[label.GetValue()] += n
				}
			}
		}
	}
	return all
}

// Over HTTP/2, too, a call that holds a place is not repeated without a permit.
func TestRepeatedCallsOverHTTP2(t *testing.T) {
	limits, err := registry.New(registry.Static{{Name: "/*", NoRate: true, Window: time.Hour, WindowLimit: 1, Concurrent: 1}},
		tokenbucket.NewMemoryStore(), registry.WithLocalWindows(), registry.WithLocalSemaphores(), registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	const refusedStream = 7
	addr, received := triestest.NewRefuser(t, refusedStream)
	p := openProxy(t, limits, "--upstream", "https://"+addr)
	p.base.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	server := httptest.NewServer(p)
	t.Cleanup(server.Close)
	status, _, _ := send(t, server, "/fares", nil)
	require.Equal(t, http.StatusBadGateway, status)
	require.EqualValues(t, 1, received.Load())
}
