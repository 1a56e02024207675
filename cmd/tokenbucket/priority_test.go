package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// A gateway reports the calls of a row by priority, in /stats and at the console, if some are below normal.
func TestFiguresByPriority(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(upstream.Close)
	file := newLimitsFile(t, "limits:\n  - {name: /a, rate: 0.001, cache: 0}\n  - {name: /normal, rate: 0.001, cache: 0}\n  - {name: /low, rate: 1000, cache: 1, priority: low}\n"+
		"  - {name: /trial, rate: 0.001, cache: 0, shadow: true}\n  - {name: /waits, rate: 0.02, cache: 100}\n")
	p := startGateway(t, "--upstream", upstream.URL, "--limits", "file://"+string(file), "--redis", redis.Addr, "--priority", "header:X-Priority", "--trusted-proxy", "127.0.0.1",
		"--store-timeout", "20s") // a busy machine is no outage
	call := func(ctx context.Context, path, priority string) {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+path, nil)
		require.NoError(t, err)
		r.Header.Set("X-Priority", priority)
		if response, err := http.DefaultClient.Do(r); err == nil {
			_ = response.Body.Close()
		}
	}
	for _, name := range []string{"/a", "/normal", "/low", "/trial"} {
		p.calls(t, name)
	}
	for range 3 {
		call(t.Context(), "/a", "lowest")
		call(t.Context(), "/trial", "low")
	}
	var waiting sync.WaitGroup
	ctx, leave := context.WithCancel(t.Context())
	call(ctx, "/waits", "normal")
	waiting.Go(func() { call(ctx, "/waits", "lowest") })
	defer waiting.Wait()
	defer leave()

	byPriority := func() map[string]string {
		var s struct {
			Limits []struct {
				Name       string
				Priorities json.RawMessage
			}
		}
		_, _, body, err := get(p.admin + "/stats")
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal([]byte(body), &s))
		all := map[string]string{}
		for _, l := range s.Limits {
			all[l.Name] = string(l.Priorities)
		}
		return all
	}
	eventually(t, func() error {
		var got map[string]struct{ Granted, Waiting int }
		if err := json.Unmarshal([]byte(byPriority()["/waits"]), &got); err != nil || got["lowest"].Waiting != 1 || got["normal"].Waiting != 0 || got["normal"].Granted != 1 {
			return fmt.Errorf("%v: %v", got, err)
		}
		return nil
	})
	all := byPriority()
	require.Empty(t, all["/normal"])
	require.JSONEq(t, `{"normal":{"granted":1,"refused":7,"failed":0,"waited_seconds":0,"waiting":0},"lowest":{"granted":0,"refused":3,"failed":0,"waited_seconds":0,"waiting":0}}`, all["/a"])
	require.JSONEq(t, `{"normal":{"granted":1,"refused":0,"failed":0,"would_refuse":7,"waited_seconds":0,"waiting":0},"low":{"granted":0,"refused":0,"failed":0,"would_refuse":3,"waited_seconds":0,"waiting":0}}`, all["/trial"])
	require.Contains(t, all["/low"], `"low": {`)

	shows(t, p.admin+"/console/limit?name=%2Fwaits", `<td data-title="Priority">lowest</td><td data-title="Granted/s" class="number">0</td><td data-title="Refused/s" class="number">0</td><td data-title="Waiting" class="number">1</td>`)
	shows(t, p.admin+"/console/limit?name=%2Fnormal", `aria-labelledby="priorities-title" hidden>`)
}
