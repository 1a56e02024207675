package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
	metricspb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// scrape reads /metrics as Prometheus does.
func (p *process) scrape(t *testing.T) map[string]*dto.MetricFamily {
	t.Helper()
	status, header, body, err := get(p.admin + "/metrics")
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, header.Get("Content-Type"), "text/plain")
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(body))
	require.NoError(t, err)
	return families
}

// value returns the sum of the values with the given labels: name=value.
func value(families map[string]*dto.MetricFamily, name string, labels ...string) (sum float64) {
	for _, m := range families[name].GetMetric() {
		has := map[string]bool{}
		for _, l := range m.GetLabel() {
			has[l.GetName()+"="+l.GetValue()] = true
		}
		all := true
		for _, l := range labels {
			all = all && has[l]
		}
		if all {
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

// A gateway counts the results of calls, limit by limit, in /metrics and /stats alike; clients make no series.
func TestMetrics(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	db, dsn := newLimits(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/busy" {
			w.Header().Set("Retry-After", "30")
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer upstream.Close()
	p := startGateway(t, "--upstream", upstream.URL, "--upstream", "/dead=http://127.0.0.1:1", "--limits", dsn, "--redis", redis.Addr, "--create-table", "--interval", "100ms", "--switch", "sql",
		"--unknown", "1000", "--store-timeout", "20s") // a busy machine is no outage
	for _, row := range []string{"('/a', 0.001, 0)", "('/waits', 10, 5)", "('/zero', 0, 0)", "('/bad', -1, 0)", "('/busy', 100, 0)"} {
		execSQL(t, db, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES "+row)
	}
	execSQL(t, db, "INSERT INTO t_ratelimite_conf (name, rate, max_wait, `window`, window_limit, concurrent) VALUES ('/all', 100000, 0, 60, 1, 5)")
	p.loads(t, 2)
	require.Equal(t, map[int]int{200: 1, 429: 7}, p.calls(t, "/a"))
	for _, want := range []int{http.StatusOK, http.StatusTooManyRequests} { // by the window
		status, _, _, err := get(p.url + "/all")
		require.NoError(t, err)
		require.Equal(t, want, status)
	}
	var waiting errgroup.Group
	for range 8 { // at once: one after another they would wait for nothing on a busy machine
		waiting.Go(func() error {
			status, _, _, err := get(p.url + "/waits")
			if err == nil && status != http.StatusOK {
				err = fmt.Errorf("%d", status)
			}
			return err
		})
	}
	require.NoError(t, waiting.Wait())
	p.calls(t, "/zero")
	p.calls(t, "/bad")
	for i := range 20 {
		_, _, _, err := get(fmt.Sprintf("%s/made/up/%d", p.url, i))
		require.NoError(t, err)
	}
	_, _, _, err := get(p.url + "/busy")
	require.NoError(t, err)
	now := time.Now()
	_, _, _, err = get(p.url + "/dead")
	require.NoError(t, err)

	m := p.scrape(t)
	for what, want := range map[string]float64{
		"tokenbucket_decisions_total bucket=/a outcome=granted":                              1,
		"tokenbucket_decisions_total bucket=/a outcome=refused":                              7,
		"tokenbucket_decisions_total bucket=/waits outcome=granted":                          8,
		"tokenbucket_wait_duration_seconds bucket=/waits":                                    8,
		"tokenbucket_decisions_total bucket=other outcome=granted":                           21,
		"tokenbucket_gateway_bypassed_total bucket=/zero by=zero result=refused":             8,
		"tokenbucket_gateway_bypassed_total bucket=/bad by=bad_row result=refused":           8,
		"tokenbucket_gateway_penalties_total bucket=/busy":                                   1,
		"tokenbucket_gateway_limit_rate bucket=/waits":                                       10,
		"tokenbucket_gateway_limit_max_permits bucket=/waits":                                10,
		"tokenbucket_gateway_limit_held_until_timestamp_seconds bucket=/a":                   0,
		"tokenbucket_gateway_refusals_total bucket=/all by=window":                           1,
		"tokenbucket_gateway_limit_window_used bucket=/all":                                  1,
		"tokenbucket_gateway_limit_window_limit bucket=/all":                                 1,
		"tokenbucket_gateway_limit_concurrent_limit bucket=/all":                             5,
		"tokenbucket_gateway_limits":                                                         5,
		"tokenbucket_gateway_limits_held":                                                    0,
		"tokenbucket_gateway_limits_lost":                                                    0,
		"tokenbucket_gateway_limits_before_loss":                                             0,
		"tokenbucket_gateway_admissions_total":                                               56,
		"tokenbucket_gateway_admissions_total result=refused":                                24,
		"tokenbucket_gateway_limit_max_wait_seconds bucket=/waits":                           5,
		"tokenbucket_gateway_bad_rows":                                                       1,
		"tokenbucket_gateway_bad_names":                                                      1,
		"tokenbucket_gateway_loads_total result=failed":                                      0,
		"tokenbucket_gateway_switch_on":                                                      1,
		"tokenbucket_gateway_redis_up":                                                       1,
		"tokenbucket_gateway_refused_total":                                                  24,
		"tokenbucket_gateway_calls_total":                                                    56,
		"tokenbucket_gateway_upstream_errors_total upstream=http://127.0.0.1:1 kind=refused": 1,
		"tokenbucket_store_up":                                                               1,
		"tokenbucket_gateway_draining":                                                       0,
	} {
		name, labels, _ := strings.Cut(what, " ")
		require.Contains(t, m, name)
		require.Equal(t, want, value(m, name, strings.Fields(labels)...), what)
	}
	require.Positive(t, value(m, "tokenbucket_gateway_loads_total", "result=good"))
	require.InDelta(t, float64(now.Unix())+30, value(m, "tokenbucket_gateway_limit_held_until_timestamp_seconds", "bucket=/busy"), 10)
	documented(t, m)
	buckets := map[string]bool{}
	for _, f := range m {
		for _, s := range f.GetMetric() {
			for _, l := range s.GetLabel() {
				if l.GetName() == "bucket" {
					buckets[l.GetValue()] = true
				}
			}
		}
	}
	require.Equal(t, map[string]bool{"/a": true, "/waits": true, "/zero": true, "/bad": true, "/busy": true, "/all": true, "other": true}, buckets)

	limits := map[string]limitStats{}
	for _, l := range p.stats(t).Limits {
		limits[l.Name] = l
	}
	require.Equal(t, []float64{1, 7}, []float64{limits["/a"].Granted, limits["/a"].Refused})
	require.Equal(t, []float64{8, 0}, []float64{limits["/zero"].Refused, limits["/zero"].Bypassed})
	require.Equal(t, 10.0, limits["/waits"].RateInForce)
	require.Greater(t, limits["/waits"].WaitedSeconds, 0.3)
	require.WithinDuration(t, now.Add(30*time.Second), limits["/busy"].HeldUntil, 10*time.Second)
	require.Equal(t, 21.0, p.stats(t).Others.Granted)
	require.Regexp(t, `level=INFO msg="an upstream's Retry-After penalizes a bucket, so the fleet sends no call of it until then" key=/busy retryAfter=30s until=\S+ times=1`, p.out.String())

	execSQL(t, db, "INSERT INTO t_ratelimite_switch (name, enabled) VALUES ('global', 0)")
	p.becomes(t, http.StatusOK, "the switch is off")
	p.calls(t, "/a")
	m = p.scrape(t)
	require.Zero(t, value(m, "tokenbucket_gateway_switch_on"))
	require.Equal(t, 8.0, value(m, "tokenbucket_gateway_bypassed_total", "by=switch", "result=passed", "bucket=/a"))
}

// documented checks that every metric that a document names is exported.
func documented(t *testing.T, m map[string]*dto.MetricFamily) {
	t.Helper()
	text, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	names := regexp.MustCompile(`\btokenbucket_gateway_[a-z_]+`).FindAllString(string(text), -1)
	require.NotEmpty(t, names)
	for _, name := range names {
		require.NotNil(t, m[name], name)
	}
}

// An OpenTelemetry collector gets what /metrics has.
func TestOTLP(t *testing.T) {
	t.Parallel()
	got := make(chan *metricspb.ExportMetricsServiceRequest, 100)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		request := new(metricspb.ExportMetricsServiceRequest)
		if err != nil || r.URL.Path != "/v1/metrics" || proto.Unmarshal(body, request) != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		got <- request
	}))
	defer collector.Close()
	h, upstream := newHold(t)
	close(h.release)
	p := startGateway(t, memoryArgs(t, upstream, "--otlp", collector.URL, "--otlp-interval", "100ms", "--unknown", "1000")...)
	_, _, _, err := get(p.url + "/quick")
	require.NoError(t, err)
	names := map[string]bool{}
	eventually(t, func() error {
		for _, r := range (<-got).GetResourceMetrics() {
			for _, s := range r.GetScopeMetrics() {
				for _, m := range s.GetMetrics() {
					names[m.GetName()] = true
				}
			}
		}
		for _, want := range []string{"tokenbucket_decisions_total", "tokenbucket_wait_duration_seconds", "tokenbucket_gateway_limits", "tokenbucket_gateway_limits_age_seconds"} {
			if !names[want] {
				return fmt.Errorf("%s is not exported", want)
			}
		}
		return nil
	})
	collector.CloseClientConnections()
	collector.Close()
	p.waitFor(t, `level=WARN msg="metrics could not be exported"`)
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	require.Equal(t, exitOK, p.exit(t))
}
