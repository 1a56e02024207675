package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/cmd/internal/bound"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Rows with a window and a concurrency: gateways are processes, databases and Redis are servers, and the load is wrk's.

// slowUpstream notes when each of its calls began, and how many were under way.
type slowUpstream struct {
	began time.Time
	mu    sync.Mutex
	times []time.Duration
	now   int
	most  int
	late  time.Duration // the longest time of a call that is not limited
}

func (u *slowUpstream) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	u.mu.Lock()
	if sent, err := time.ParseDuration(r.URL.Query().Get("sent")); err == nil {
		u.late = max(u.late, time.Since(u.began)-sent)
		u.mu.Unlock()
		return
	}
	u.times = append(u.times, time.Since(u.began))
	u.now++
	u.most = max(u.most, u.now)
	u.mu.Unlock()
	time.Sleep(5*time.Millisecond + rand.N(60*time.Millisecond))
	u.mu.Lock()
	defer u.mu.Unlock()
	u.now--
}

func (u *slowUpstream) seen() (times []time.Duration, most int, late time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return bound.Sorted(u.times, func(d time.Duration) time.Duration { return d }), u.most, u.late
}

// probe measures how late the calls of a gateway reach the upstream because the machine has other things to do. The row /free has the same
// kinds of bounds as the row under test, so the calls need the same round trips, but it never refuses or delays a call.
func (u *slowUpstream) probe(ctx context.Context, p *process) {
	for ctx.Err() == nil {
		_, _, _, _ = get(fmt.Sprintf("%s/free?sent=%s", p.url, time.Since(u.began)))
		time.Sleep(10 * time.Millisecond)
	}
}

// boundColumns are the flags for the columns of these tests.
const boundColumns = "burst=burst,window=window,window_limit=window_limit,concurrent=concurrent"

// boundStats is what /stats says of such a row.
type boundStats struct {
	Name               string
	NoRate             bool           `json:"no_rate"`
	WindowSeconds      float64        `json:"window"`
	WindowLimit        int            `json:"window_limit"`
	Concurrent         int            `json:"concurrent"`
	RefusedBy          map[string]int `json:"refused_by"`
	WindowUsed         int            `json:"window_used"`
	ConcurrentUsed     int            `json:"concurrent_used"`
	ConcurrentUsedHere int            `json:"concurrent_used_here"`
	ConcurrentInForce  int            `json:"concurrent_in_force"`
	WindowInForce      int            `json:"window_limit_in_force"`
}

func (p *process) boundStats(t *testing.T) boundStats {
	t.Helper()
	var s struct{ Limits []boundStats }
	_, _, body, err := get(p.admin + "/stats")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal([]byte(body), &s))
	for _, l := range s.Limits {
		if l.Name == "/slow" {
			return l
		}
	}
	require.Fail(t, "no row /slow", body)
	return boundStats{}
}

// loadBy makes wrk call each gateway for the given time.
func loadBy(t *testing.T, wrk string, fleet []*process, lasts string) {
	var running sync.WaitGroup
	for _, p := range fleet {
		running.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			out, err := exec.CommandContext(ctx, wrk, "-t1", "-c12", "-d"+lasts, p.url+"/slow").CombinedOutput()
			t.Logf("%s", out)
			if err != nil {
				t.Errorf("wrk: %v", err)
			}
		})
	}
	running.Wait()
}

// Two gateways with one row of 50/s, 120 in any 5 s and 4 at once, before an upstream that takes its time: it sees no more than any of
// these, and about as much as the tightest allows. A row that says less is followed by both.
func TestRowWithAllBounds(t *testing.T) {
	t.Parallel()
	wrk := redistest.Program(t, "wrk")
	server := redistest.Start(t)
	eachServer(t, func(t *testing.T, table limitsTable) {
		upstream := &slowUpstream{began: time.Now()}
		place := httptest.NewServer(upstream)
		t.Cleanup(place.Close)
		args := []string{
			"--upstream", place.URL, "--limits", table.dsn, "--create-table", "--redis", server.Addr, "--key-prefix", table.server + ":",
			"--interval", "200ms", "--columns", boundColumns, "--store-timeout", "20s", // a busy machine is no outage
		}
		fleet := []*process{startGateway(t, args...), startGateway(t, args...)}
		quote := map[string]string{"MariaDB": "`", "PostgreSQL": `"`}[table.server]
		column := func(name string) string { return quote + name + quote }
		execSQL(t, table.DB, fmt.Sprintf("INSERT INTO t_ratelimite_conf (name, rate, max_wait, %s, %s, %s, %s) VALUES ('/slow', 50, 0.01, 5, 5, 120, 4), ('/free', 1000000, 0.01, 1000000, 5, 1000000, 1000)",
			column("burst"), column("window"), column("window_limit"), column("concurrent")))
		for _, p := range fleet {
			p.loads(t, 2)
		}
		probing, stop := context.WithCancel(t.Context())
		defer stop()
		for _, p := range fleet {
			go upstream.probe(probing, p)
		}
		calls := 0
		for round := 0; calls < 240 && round < 3; round++ { // 120 in each of two windows, unless the machine has other things to do
			from := time.Since(upstream.began)
			loadBy(t, wrk, fleet, "11s")
			times, _, _ := upstream.seen()
			calls = within(times, from, time.Since(upstream.began))
			t.Logf("%d calls in %v", calls, time.Since(upstream.began)-from)
		}
		stop()
		times, most, late := upstream.seen()
		jitter := 150*time.Millisecond + 2*late
		window, rate := bound.Busiest(times, 5*time.Second-jitter), bound.Fullest(times, 50)
		t.Logf("at most %d at once, %d in %v; %d in %v; late by %v", most, window.Events, window.Length(), rate.Events, rate.Length(), late)
		starved := late > 100*time.Millisecond // by others: then there is no saying how much the bounds would let through
		if !starved {
			require.GreaterOrEqual(t, calls, 240)
			require.Equal(t, 4, most)
		}
		require.LessOrEqual(t, most, 4)
		require.LessOrEqual(t, window.Events, 120)
		require.LessOrEqual(t, rate.Excess(50), 5+50*jitter.Seconds())
		refused := map[string]int{}
		for _, p := range fleet {
			var s boundStats
			eventually(t, func() error { // what Redis has to say is missing if it takes more than a second
				if s = p.boundStats(t); s.WindowInForce == 0 {
					return fmt.Errorf("%+v", s)
				}
				return nil
			})
			for by, n := range s.RefusedBy {
				refused[by] += n
			}
			require.Equal(t, 5.0, s.WindowSeconds)
			require.Equal(t, []int{120, 120, 4, 4}, []int{s.WindowLimit, s.WindowInForce, s.Concurrent, s.ConcurrentInForce})
			require.True(t, starved || s.WindowUsed > 0, "%+v", s)
		}
		t.Logf("refused by %v", refused)
		for _, by := range []string{"window", "concurrency", "limit"} {
			require.True(t, starved || refused[by] > 0, by)
		}

		// Nothing is left behind, and what a row says next is followed by the whole fleet.
		eventually(t, func() error {
			if s := fleet[0].boundStats(t); s.ConcurrentUsed != 0 || s.ConcurrentUsedHere != 0 {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
		execSQL(t, table.DB, "UPDATE t_ratelimite_conf SET rate = NULL, "+column("burst")+" = NULL, "+column("window")+" = 3600, "+column("window_limit")+" = 1 WHERE name = '/slow'") // eight calls do not outlast an hour
		for _, p := range fleet {
			p.waitFor(t, `to="at most 1 in any 1 h, at most 4 at once"`)
			require.GreaterOrEqual(t, p.calls(t, "/slow")[http.StatusTooManyRequests], 7, "the window is full, or one call fills it")
			_, header, _, err := get(p.url + "/slow")
			require.NoError(t, err)
			require.Regexp(t, "^[1-9][0-9]{0,3}$", header.Get("Retry-After"))
			require.True(t, p.boundStats(t).NoRate)
		}
		execSQL(t, table.DB, "UPDATE t_ratelimite_conf SET "+column("window_limit")+" = NULL")
		for _, p := range fleet {
			p.waitFor(t, "registry: a row is bad")
		}
	})
}

// A call keeps its place while its reply is read, and other clients get a Retry-After; a gateway alone needs no Redis for that.
func TestConcurrencyOfOneGateway(t *testing.T) {
	t.Parallel()
	for _, inbound := range []string{"true", "false"} {
		t.Run(inbound, func(t *testing.T) {
			t.Parallel()
			reached, release := make(chan bool), make(chan bool)
			upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(http.StatusOK)
				_, _ = w.Write([]byte(strings.Repeat("x", 1<<16)))
				_ = http.NewResponseController(w).Flush()
				reached <- true
				<-release
			}))
			t.Cleanup(upstream.Close)
			path := filepath.Join(t.TempDir(), "limits.yaml")
			require.NoError(t, os.WriteFile(path, []byte("limits:\n  - {name: /slow, rate: none, concurrent: 2}\n"), 0o600))
			p := startGateway(t, "--upstream", upstream.URL, "--limits", "file://"+path, "--store", "memory", "--inbound="+inbound)
			var calls sync.WaitGroup
			for range 2 {
				calls.Go(func() {
					status, _, body, err := get(p.url + "/slow")
					if err != nil || status != http.StatusOK || len(body) != 1<<16 {
						t.Errorf("%d %d %v", status, len(body), err)
					}
				})
				<-reached
			}
			status, header, body, err := get(p.url + "/slow")
			require.NoError(t, err)
			require.Equal(t, http.StatusTooManyRequests, status, body)
			require.Equal(t, "1", header.Get("Retry-After"))
			require.Equal(t, 2, p.boundStats(t).ConcurrentUsed)
			release <- true
			release <- true
			calls.Wait()
			go func() { <-reached; release <- true }()
			status, _, _, err = get(p.url + "/slow")
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, status)
			_, _, body, err = get(p.admin + "/metrics")
			require.NoError(t, err)
			for _, line := range []string{
				`tokenbucket_gateway_refusals_total{bucket="/slow",by="concurrency"} 1`, `tokenbucket_gateway_limit_concurrent_limit{bucket="/slow"} 2`,
				`tokenbucket_gateway_limit_concurrent_used{bucket="/slow"} 0`, `tokenbucket_gateway_limit_concurrent_used_here{bucket="/slow"} 0`,
			} {
				require.Contains(t, body, line)
			}
		})
	}
}
