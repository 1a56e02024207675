package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// The alerts and the board in a real Prometheus.

// The alert rules pass the tests of alerts_test.yaml, and rules that blink do not.
func TestAlertRules(t *testing.T) {
	t.Parallel()
	program := redistest.Program(t, "promtool")
	run := func(dir string) (string, error) {
		c := exec.Command(program, "test", "rules", "alerts_test.yaml")
		c.Dir = dir
		out, err := c.CombinedOutput()
		return string(out), err
	}
	out, err := run(deploy + "prometheus")
	require.NoError(t, err, out)

	dir := t.TempDir() // rules that blink, as those did that looked for limits that are held
	for _, name := range []string{"alerts.yaml", "alerts_test.yaml"} {
		text, err := os.ReadFile(deploy + "prometheus/" + name)
		require.NoError(t, err)
		wrong := strings.Replace(string(text), "tokenbucket_gateway_limits_lost > 0", "tokenbucket_gateway_limits_held > 0", 1)
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(wrong), 0o600))
	}
	out, err = run(dir)
	require.Error(t, err)
	require.Contains(t, out, "TokenbucketLimitsGone")
}

// prometheus is a server that scrapes gateways.
type prometheus struct{ url string }

func startPrometheus(t *testing.T, every time.Duration, targets ...string) *prometheus {
	program := redistest.Program(t, "prometheus")
	dir := t.TempDir()
	for i, target := range targets {
		targets[i] = fmt.Sprintf("%q", strings.TrimPrefix(target, "http://"))
	}
	rules, err := filepath.Abs(deploy + "prometheus/alerts.yaml")
	require.NoError(t, err)
	config := fmt.Sprintf("global: {scrape_interval: %v, evaluation_interval: %v}\nrule_files: [%s]\nscrape_configs:\n  - job_name: tokenbucket\n    static_configs: [{targets: [%s]}]\n",
		every, every, rules, strings.Join(targets, ", "))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "prometheus.yml"), []byte(config), 0o600))
	address := redistest.FreeAddr()
	log := new(output)
	c := exec.Command(program, "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address)
	c.Stdout, c.Stderr = log, log
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		if t.Failed() {
			t.Logf("%.5000s", log)
		}
	})
	p := &prometheus{"http://" + address}
	eventually(t, func() error {
		status, _, _, err := get(p.url + "/-/ready")
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%d", status)
		}
		return err
	})
	return p
}

// series returns the labels of the series that a query has since then.
func (p *prometheus) series(t *testing.T, query string, since time.Time) (labels []map[string]string) {
	t.Helper()
	ask := url.Values{"query": {query}, "start": {since.Format(time.RFC3339)}, "end": {time.Now().Format(time.RFC3339)}, "step": {"1"}}
	_, _, text, err := get(p.url + "/api/v1/query_range?" + ask.Encode())
	require.NoError(t, err)
	var answer struct {
		Status, Error string
		Data          struct {
			Result []struct {
				Metric map[string]string
				Values [][2]any
			}
		}
	}
	require.NoError(t, json.Unmarshal([]byte(text), &answer), text)
	require.Equal(t, "success", answer.Status, "%s: %s", query, answer.Error)
	for _, r := range answer.Data.Result {
		if slices.ContainsFunc(r.Values, func(v [2]any) bool { return v[1] != "NaN" }) {
			labels = append(labels, r.Metric)
		}
	}
	return labels
}

// largest returns the largest value of a query since then.
func (p *prometheus) largest(t *testing.T, query string, since time.Time) float64 {
	t.Helper()
	seconds := int(time.Since(since).Seconds()) + 1
	_, _, text, err := get(p.url + "/api/v1/query?" + url.Values{"query": {fmt.Sprintf("max(max_over_time((%s)[%ds:1s]))", query, seconds)}}.Encode())
	require.NoError(t, err)
	var answer struct {
		Data struct{ Result []struct{ Value [2]any } }
	}
	require.NoError(t, json.Unmarshal([]byte(text), &answer), text)
	require.Len(t, answer.Data.Result, 1, text)
	var v float64
	_, err = fmt.Sscan(answer.Data.Result[0].Value[1].(string), &v)
	require.NoError(t, err)
	return v
}

// Each panel of the board has data of two gateways that a real Prometheus scrapes, when everything is chosen: rows with a rate, a window
// or a concurrency, calls without a row, and faults. No wait is above what its row allows. TOKENBUCKET_BOARD=5m has it run for longer.
func TestBoardOnPrometheus(t *testing.T) {
	t.Parallel()
	lasts := 12 * time.Second
	if text := os.Getenv("TOKENBUCKET_BOARD"); text != "" {
		var err error
		lasts, err = time.ParseDuration(text)
		require.NoError(t, err)
	}
	redis := redistest.Start(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/busy" {
			w.Header().Set("Retry-After", "2")
			w.WriteHeader(http.StatusTooManyRequests)
		}
		time.Sleep(5 * time.Millisecond)
	}))
	t.Cleanup(upstream.Close)
	rows := []string{"/rate", "/waits", "/window", "/places", "/busy", "/dead", "/off", "/zero", "/bad"}
	file := newLimitsFile(t, "limits:\n  - {name: /rate, rate: 2, cache: 0}\n  - {name: /waits, rate: 20, cache: 0.3}\n"+
		"  - {name: /window, rate: none, window: 5s, window_limit: 30}\n  - {name: /places, rate: none, concurrent: 2}\n  - {name: /busy, rate: 1000, penalty: 429}\n"+
		"  - {name: /dead, rate: 1000}\n  - {name: /off, rate: 1, disabled: true}\n  - {name: /zero, rate: 0}\n  - {name: /bad}\n")
	var gateways []*process
	var targets []string
	for range 2 {
		p := startGateway(t, "--upstream", upstream.URL, "--upstream", "/dead=http://127.0.0.1:1", "--limits", "file://"+string(file), "--redis", redis.Addr,
			"--switch", "redis:switch", "--interval", "500ms")
		gateways, targets = append(gateways, p), append(targets, p.admin)
	}
	server := startPrometheus(t, time.Second, targets...)
	began := time.Now()
	ctx, stop := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	t.Cleanup(func() { stop(); callers.Wait() })
	for _, p := range gateways {
		for _, path := range append([]string{"/no/row", "/places", "/places", "/waits", "/waits", "/waits", "/waits", "/waits", "/waits", "/waits"}, rows...) {
			callers.Go(func() {
				for ctx.Err() == nil {
					_, _, _, _ = get(p.url + path) // many are refused
					time.Sleep(20 * time.Millisecond)
				}
			})
		}
	}
	time.Sleep(lasts)
	panels := readPanels(t)
	for _, panel := range panels {
		if panel.fault() {
			continue
		}
		for _, query := range panel.queries() {
			eventually(t, func() error { // a busy machine scrapes seldom
				if len(server.series(t, query, began)) == 0 {
					return fmt.Errorf("%s: no data: %s", panel.Title, query)
				}
				return nil
			})
		}
	}
	seen := func(title string) (buckets []string) {
		all := map[string]bool{}
		for _, query := range panels[title].queries() {
			for _, s := range server.series(t, query, began) {
				all[s["bucket"]] = true
			}
		}
		return slices.Sorted(maps.Keys(all))
	}
	eventually(t, func() error {
		passed := slices.DeleteFunc(seen("Passed, by limit"), func(s string) bool { return s == "/busy" })
		if want := []string{"/dead", "/off", "/places", "/rate", "/waits", "/window", "other"}; !slices.Equal(want, passed) { // All is everything
			return fmt.Errorf("passed: %v", passed)
		}
		refused := seen("Refused, by limit")
		for _, want := range []string{"/rate", "/waits", "/window", "/zero", "/bad"} {
			if !slices.Contains(refused, want) {
				return fmt.Errorf("refused: %v", refused)
			}
		}
		return nil
	})
	require.Equal(t, []string{"/window"}, seen("Use of windows"))
	require.Equal(t, []string{"/places"}, seen("Use of concurrency"))
	for _, query := range panels["Waits for a permit, by limit"].queries() {
		query = strings.ReplaceAll(query, `bucket=~".*"`, `bucket="/waits"`)
		require.LessOrEqual(t, server.largest(t, query, began), 0.3, "the row lets a call wait for 300 ms")
		require.Positive(t, server.largest(t, query, began))
	}
	require.InDelta(t, 1, server.largest(t, panels["Use of windows"].queries()[0], began), 0.1)
	require.Positive(t, server.largest(t, panels["Calls without a row"].queries()[0], began))

	require.NoError(t, redis.Kill())
	eventually(t, func() error {
		for _, panel := range panels {
			for _, query := range panel.queries() {
				if len(server.series(t, query, began)) == 0 {
					return fmt.Errorf("%s: no data: %s", panel.Title, query)
				}
			}
		}
		return nil
	})
}

// boardPanel is one of the board.
type boardPanel struct {
	Type, Title string
	Targets     []struct{ Expr string }
}

// fault reports whether the panel has data only when something is wrong.
func (p *boardPanel) fault() bool {
	return slices.Contains([]string{"Calls failed by the limiter", "Errors of Redis", "Upstream errors", "Outages of Redis"}, p.Title)
}

// queries are those of the panel when everything is chosen.
func (p *boardPanel) queries() (all []string) {
	chosen := strings.NewReplacer("$job", "tokenbucket", "$instance", ".*", "$bucket", ".*", "$__rate_interval", "5s")
	for _, target := range p.Targets {
		all = append(all, chosen.Replace(target.Expr))
	}
	return all
}

// readPanels reads the board, whose choice of everything is a pattern that everything matches.
func readPanels(t *testing.T) map[string]*boardPanel {
	text, err := os.ReadFile(deploy + "grafana/boards/tokenbucket.json")
	require.NoError(t, err)
	var board struct {
		Panels     []*boardPanel
		Templating struct {
			List []struct{ Name, AllValue string }
		}
	}
	require.NoError(t, json.Unmarshal(text, &board))
	for _, v := range board.Templating.List {
		if regexp.MustCompile("^(instance|bucket)$").MatchString(v.Name) {
			require.Equal(t, ".*", v.AllValue, v.Name)
		}
	}
	panels := map[string]*boardPanel{}
	for _, p := range board.Panels {
		if p.Type != "row" {
			panels[p.Title] = p
		}
	}
	return panels
}
