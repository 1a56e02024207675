package main

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	console "github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Three gateways under load, while Redis is lost and comes back, publish in sum the upstream's counts, limit by limit, and at their end,
// that they have ended. A fourth, with --publish=false, publishes nothing.
func TestPublish(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	db, dsn := newLimits(t)
	var mu sync.Mutex
	served := map[string]int64{}
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		served[r.URL.Path]++
	}))
	defer upstream.Close()
	args := []string{"--upstream", upstream.URL, "--limits", dsn, "--redis", server.Addr, "--create-table", "--interval", "100ms", "--fail", "open"}
	gateways := []*process{startGateway(t, args...), startGateway(t, args...), startGateway(t, args...)}
	silent := startGateway(t, append(args, "--publish=false")...)
	for _, row := range []string{"('/few', 5, 0)", "('/many', 300, 0.5)", "('/zero', 0, 0)", "('/bad', -1, 0)"} {
		execSQL(t, db, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES "+row)
	}
	execSQL(t, db, "INSERT INTO t_ratelimite_conf (name, rate, max_wait, disabled) VALUES ('/off', 1, 0, 1)")
	for _, g := range append(gateways, silent) {
		g.loads(t, 2)
	}
	_, _, _, err := get(silent.url + "/silent")
	require.NoError(t, err)

	var refused atomic.Int64
	drive := func(d time.Duration) {
		var callers sync.WaitGroup
		for i := range 6 {
			callers.Go(func() {
				client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{}}
				defer client.CloseIdleConnections()
				for n, end := 0, time.Now().Add(d); time.Now().Before(end); n++ {
					path := []string{"/few", "/many", "/many", "/zero", "/off", "/bad"}[n%6]
					response, err := client.Get(gateways[i%3].url + path)
					if err != nil {
						continue
					}
					_ = response.Body.Close()
					if response.StatusCode != http.StatusOK {
						refused.Add(1)
					}
				}
			})
		}
		callers.Wait()
	}
	drive(3 * time.Second)
	require.NoError(t, server.Stop())
	drive(2 * time.Second)
	require.NoError(t, server.Continue())
	drive(2 * time.Second)
	for _, g := range gateways {
		require.NoError(t, g.Process.Signal(syscall.SIGTERM))
		require.Zero(t, g.exit(t))
	}

	ctx := context.Background()
	r := console.NewReader(server.Client(t))
	s, err := r.Snapshot(ctx)
	require.NoError(t, err)
	require.Empty(t, s.Skipped)
	require.Len(t, s.Instances, 3)
	for _, i := range s.Instances {
		require.True(t, i.Ended)
		require.Equal(t, "script", i.Store.Kind)
		require.Equal(t, "open", i.Store.Policy)
		require.Len(t, i.Rejected, 1)
		require.Equal(t, "/bad", i.Rejected[0].Name)
	}
	mu.Lock()
	want := maps.Clone(served)
	mu.Unlock()
	delete(want, "/silent")
	got, kept, lost := map[string]int64{}, map[string]int64{}, int64(0)
	for _, total := range s.Totals() {
		if n := total.Through(); n > 0 {
			got[total.Name] = n
		}
		lost += total.Refused + total.Failed
		points, err := r.History(ctx, total.Name, time.Time{})
		require.NoError(t, err)
		for _, p := range points {
			if n := p.Granted + p.Passed + p.WouldRefuse; n > 0 {
				kept[total.Name] += n
			}
		}
	}
	t.Logf("served %v, refused %d", want, refused.Load())
	require.Equal(t, want, got, "the counters")
	require.Equal(t, want, kept, "the history")
	require.Equal(t, refused.Load(), lost)
	events, err := r.Events(ctx, time.Time{})
	require.NoError(t, err)
	seen := map[string]int{}
	for _, e := range events {
		seen[fmt.Sprint(e.Kind, e.Limit)]++
	}
	for event, times := range map[string]int{"begins": 3, "ends": 3, "added/few": 1, "added/many": 1, "added/zero": 1, "added/off": 1} {
		require.Equal(t, times, seen[event], "%s of %v", event, seen)
	}
}
