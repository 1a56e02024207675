package prometheus_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry/telemetrytest"

	"github.com/go-tokenbucket/tokenbucket"
	tbprometheus "github.com/go-tokenbucket/tokenbucket/contrib/prometheus"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.Dialing) }

func observe(t testing.TB, opts ...tbprometheus.Option) (*prometheus.Registry, tokenbucket.Observer) {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	observer, err := tbprometheus.New(registry, opts...)
	require.NoError(t, err)
	return registry, observer
}

// scrape reads the metrics as a Prometheus server does: over HTTP, in its text format. Keys are as in
// decisions_total{bucket="fares",…}, labels in order of name; of histograms there are _count, _sum and _bucket with its le.
func scrape(t testing.TB, registry *prometheus.Registry) map[string]float64 {
	t.Helper()
	server := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}))
	defer server.Close()
	answer, err := server.Client().Get(server.URL)
	require.NoError(t, err)
	defer answer.Body.Close()
	require.Equal(t, http.StatusOK, answer.StatusCode)
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	require.NoError(t, err)
	series := map[string]float64{}
	for name, family := range families {
		name = strings.TrimPrefix(name, "tokenbucket_")
		for _, m := range family.Metric {
			labels := m.GetLabel()
			key := func(suffix string, more ...*dto.LabelPair) string {
				var parts []string
				for _, l := range append(more, labels...) {
					parts = append(parts, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
				}
				sort.Strings(parts)
				return name + suffix + "{" + strings.Join(parts, ",") + "}"
			}
			switch h := m.GetHistogram(); {
			case h != nil:
				series[key("_count")] = float64(h.GetSampleCount())
				series[key("_sum")] = h.GetSampleSum()
				for _, b := range h.Bucket {
					le, value := "le", fmt.Sprint(b.GetUpperBound())
					series[key("_bucket", &dto.LabelPair{Name: &le, Value: &value})] = float64(b.GetCumulativeCount())
				}
			default:
				series[key("")] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return series
}

// Every figure of every metric, as a server scrapes them.
func TestScrape(t *testing.T) {
	registry, observer := observe(t)
	telemetrytest.Happen(observer)
	got := scrape(t, registry)
	assert.Equal(t, map[string]float64{
		`decisions_total{bucket="fares",by="store",outcome="granted",shadow="false"}`:    2,
		`decisions_total{bucket="fares",by="lease",outcome="granted",shadow="false"}`:    1,
		`decisions_total{bucket="fares",by="store",outcome="refused",shadow="false"}`:    1,
		`decisions_total{bucket="fares",by="snapshot",outcome="refused",shadow="false"}`: 2,
		`decisions_total{bucket="fares",by="snapshot",outcome="refused",shadow="true"}`:  1,
		`decisions_total{bucket="fares",by="store",outcome="granted",shadow="true"}`:     1,
		`decisions_total{bucket="fares",by="switch",outcome="granted",shadow="false"}`:   1,
		`decisions_total{bucket="fares",by="policy",outcome="granted",shadow="false"}`:   1,
		`decisions_total{bucket="fares",by="policy",outcome="failed",shadow="false"}`:    1,
		`decisions_total{bucket="fares",by="store",outcome="failed",shadow="false"}`:     2,
		`decisions_total{bucket="fares",by="check",outcome="failed",shadow="false"}`:     2,
		`decisions_total{bucket="hotels",by="unknown",outcome="granted",shadow="false"}`: 1,
	}, telemetrytest.Of(got, "decisions_total"))
	assert.Equal(t, map[string]float64{
		`permits_total{bucket="fares",by="store",outcome="granted",shadow="false"}`:    3,
		`permits_total{bucket="fares",by="lease",outcome="granted",shadow="false"}`:    1,
		`permits_total{bucket="fares",by="store",outcome="refused",shadow="false"}`:    3,
		`permits_total{bucket="fares",by="snapshot",outcome="refused",shadow="false"}`: 2,
		`permits_total{bucket="fares",by="snapshot",outcome="refused",shadow="true"}`:  1,
		`permits_total{bucket="fares",by="store",outcome="granted",shadow="true"}`:     1,
		`permits_total{bucket="fares",by="switch",outcome="granted",shadow="false"}`:   1,
		`permits_total{bucket="fares",by="policy",outcome="granted",shadow="false"}`:   1,
		`permits_total{bucket="fares",by="policy",outcome="failed",shadow="false"}`:    1,
		`permits_total{bucket="fares",by="store",outcome="failed",shadow="false"}`:     5,
		`permits_total{bucket="fares",by="check",outcome="failed",shadow="false"}`:     0,
		`permits_total{bucket="hotels",by="unknown",outcome="granted",shadow="false"}`: 1,
	}, telemetrytest.Of(got, "permits_total"))
	assert.Equal(t, map[string]float64{
		`failures_total{bucket="fares",kind="unavailable",shadow="false"}`: 1,
		`failures_total{bucket="fares",kind="timeout",shadow="false"}`:     1,
		`failures_total{bucket="fares",kind="canceled",shadow="false"}`:    1,
		`failures_total{bucket="fares",kind="invalid",shadow="false"}`:     2,
		`lease_permits_total{bucket="fares",use="used"}`:                   12,
		`lease_permits_total{bucket="fares",use="unused"}`:                 3,
		`store_errors_total{kind="timeout"}`:                               1,
		`store_errors_total{kind="unavailable"}`:                           0,
		`store_errors_total{kind="lock"}`:                                  0,
		`store_errors_total{kind="corrupt"}`:                               0,
		`store_errors_total{kind="other"}`:                                 0,
	}, telemetrytest.Of(got, "failures_total", "lease_permits_total", "store_errors_total"))

	// 200 ms and four times 0 by fares, one 0 by hotels; the minute of the shadow is by itself.
	for key, want := range map[string]float64{
		`wait_duration_seconds_count{bucket="fares",shadow="false"}`:             5,
		`wait_duration_seconds_sum{bucket="fares",shadow="false"}`:               0.2,
		`wait_duration_seconds_bucket{bucket="fares",le="0.001",shadow="false"}`: 4,
		`wait_duration_seconds_bucket{bucket="fares",le="0.1",shadow="false"}`:   4,
		`wait_duration_seconds_bucket{bucket="fares",le="0.25",shadow="false"}`:  5,
		`wait_duration_seconds_count{bucket="fares",shadow="true"}`:              1,
		`wait_duration_seconds_bucket{bucket="fares",le="30",shadow="true"}`:     0,
		`wait_duration_seconds_bucket{bucket="fares",le="60",shadow="true"}`:     1,
		`wait_duration_seconds_count{bucket="hotels",shadow="false"}`:            1,
		`store_trip_duration_seconds_count{result="answered"}`:                   2,
		`store_trip_duration_seconds_sum{result="answered"}`:                     0.0005,
		`store_trip_duration_seconds_bucket{le="0.00025",result="answered"}`:     1,
		`store_trip_duration_seconds_count{result="failed"}`:                     1,
		`store_trip_duration_seconds_bucket{le="0.5",result="failed"}`:           0,
		`store_trip_duration_seconds_bucket{le="1",result="failed"}`:             1,
		`batch_requests_count{}`:             3,
		`batch_requests_sum{}`:               64,
		`batch_requests_bucket{le="4"}`:      2,
		`lock_wait_duration_seconds_count{}`: 1,
		`lock_wait_duration_seconds_sum{}`:   0.02,
	} {
		value, there := got[key]
		if assert.True(t, there, key) {
			assert.InDelta(t, want, value, 1e-9, key)
		}
	}
}

// The store begins as up, is down while it is said to be, whoever is told, and a policy is in force only meanwhile.
func TestHealth(t *testing.T) {
	registry, observer := observe(t)
	state := func(up, outages, away, closed, open, share float64) {
		t.Helper()
		assert.Equal(t, map[string]float64{
			`store_up{}`: up, `store_outages_total{}`: outages, `store_away_seconds_total{}`: away,
			`policy_in_force{policy="FailClosed"}`: closed, `policy_in_force{policy="FailOpen"}`: open, `policy_in_force{policy="LocalShare"}`: share,
		}, telemetrytest.Of(scrape(t, registry), "store_up", "store_outages", "store_away", "policy"))
	}
	state(1, 0, 0, 0, 0, 0)
	down := tokenbucket.Health{Bucket: "fares", Down: true, Policy: tokenbucket.FailOpen, Err: telemetrytest.ErrOther}
	observer.Health(down)
	state(0, 1, 0, 0, 1, 0)
	down.Bucket, down.Policy = "hotels", tokenbucket.LocalShare(4)
	observer.Health(down) // of another limiter: the same outage
	state(0, 1, 0, 0, 1, 1)
	observer.Health(tokenbucket.Health{Bucket: "rooms", After: 1500 * time.Millisecond})
	state(1, 1, 1.5, 0, 0, 0)
	observer.Health(tokenbucket.Health{Bucket: "hotels", After: 1600 * time.Millisecond}) // known already
	state(1, 1, 1.5, 0, 0, 0)
	down.Policy = tokenbucket.FailClosed
	observer.Health(down)
	state(0, 2, 1.5, 1, 0, 0)
}

// Names, units and help are as Prometheus wants them.
func TestLint(t *testing.T) {
	registry, observer := observe(t)
	telemetrytest.Happen(observer)
	families, err := registry.Gather()
	require.NoError(t, err)
	require.Len(t, families, 13, "there is something to look at")
	problems, err := testutil.GatherAndLint(registry)
	require.NoError(t, err)
	assert.Empty(t, problems)
}

// What goes wrong is told apart.
func TestKinds(t *testing.T) {
	for _, c := range []struct {
		err         error
		call, batch string
	}{
		{telemetrytest.Wrap(tokenbucket.ErrStoreTimeout), "timeout", "timeout"},
		{telemetrytest.Wrap(tokenbucket.ErrCorruptState), "corrupt", "corrupt"},
		{context.DeadlineExceeded, "deadline", "timeout"},
		{telemetrytest.ErrOther, "other", "other"},
	} {
		registry, observer := observe(t)
		observer.Decision(t.Context(), tokenbucket.Decision{Bucket: "fares", Permits: 1, Err: c.err})
		observer.Trip(tokenbucket.Trip{Bucket: "fares", Requests: 1, Err: c.err})
		got := scrape(t, registry)
		assert.Equal(t, map[string]float64{fmt.Sprintf(`failures_total{bucket=%q,kind=%q,shadow="false"}`, "fares", c.call): 1}, telemetrytest.Of(got, "failures_total"), "%v", c.err)
		assert.Equal(t, 1.0, got[fmt.Sprintf("store_errors_total{kind=%q}", c.batch)], "%v", c.err)
		assert.Equal(t, 1.0, telemetrytest.Sum(telemetrytest.Of(got, "store_errors_total")))
	}
}

// However many buckets there are and whoever counts: no more series than were allowed, no count lost, while scrapes go on.
func TestMaxBuckets(t *testing.T) {
	const most, names, goroutines = 10, 500, 8
	registry, observer := observe(t, tbprometheus.WithMaxBuckets(most))
	var running sync.WaitGroup
	for range goroutines {
		running.Go(func() {
			for i := range names {
				name := fmt.Sprint("client-", i)
				observer.Decision(context.Background(), tokenbucket.Decision{Bucket: name, Permits: 2, Granted: true})
				observer.Decision(context.Background(), tokenbucket.Decision{Bucket: name, Permits: 1, Err: telemetrytest.ErrOther})
				observer.Lease(name, 3, 1)
				observer.Trip(tokenbucket.Trip{Bucket: name, Requests: 1})
				observer.Health(tokenbucket.Health{Bucket: name, Down: i%2 == 0})
			}
		})
	}
	for range 5 {
		_, err := registry.Gather()
		require.NoError(t, err)
	}
	running.Wait()
	got := scrape(t, registry)
	for metric, each := range map[string]float64{
		`decisions_total{`: 2, `permits_total{`: 3, `failures_total{`: 1, `lease_permits_total{`: 3, `wait_duration_seconds_count{`: 1,
	} {
		assert.Equal(t, each*names*goroutines, telemetrytest.Sum(telemetrytest.Of(got, metric)), metric)
	}
	granted := telemetrytest.Of(got, `wait_duration_seconds_count{`)
	assert.Len(t, granted, most+1)
	rest := granted[`wait_duration_seconds_count{bucket="other",shadow="false"}`]
	assert.Equal(t, float64((names-most)*goroutines), rest, "each of the first ten has all that is its own")
}

// Bucket names become labels as the caller wants; an empty one is none, and what is not UTF-8 does no harm.
func TestWithBuckets(t *testing.T) {
	registry, observer := observe(t, tbprometheus.WithBuckets(func(name string) string {
		tenant, _, _ := strings.Cut(name, "/")
		return tenant
	}))
	for _, name := range []string{"a/1", "a/2", "b/1", "/3", "\xff/4"} {
		observer.Decision(t.Context(), tokenbucket.Decision{Bucket: name, Permits: 1})
	}
	assert.Equal(t, map[string]float64{
		`decisions_total{bucket="a",by="store",outcome="refused",shadow="false"}`:      2,
		`decisions_total{bucket="b",by="store",outcome="refused",shadow="false"}`:      1,
		`decisions_total{by="store",outcome="refused",shadow="false"}`:                 1,
		`decisions_total{bucket="\ufffd",by="store",outcome="refused",shadow="false"}`: 1,
	}, relabel(telemetrytest.Of(scrape(t, registry), "decisions_total")))
}

// relabel writes the replacement character as %q does not, and leaves out labels that are empty, as a server does.
func relabel(series map[string]float64) map[string]float64 {
	cleaned := map[string]float64{}
	for key, v := range series {
		key = strings.ReplaceAll(strings.ReplaceAll(key, `bucket="",`, ""), "\uFFFD", `\ufffd`)
		cleaned[key] = v
	}
	return cleaned
}

// Two observers of one registerer count together; what they disagree about is an error.
func TestTwice(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	for range 2 {
		observer, err := tbprometheus.New(registry)
		require.NoError(t, err)
		observer.Decision(t.Context(), tokenbucket.Decision{Bucket: "fares", Permits: 1, Granted: true})
		observer.Decision(t.Context(), tokenbucket.Decision{Bucket: "fares", Permits: 1, Granted: true})
	}
	got := scrape(t, registry)
	assert.Equal(t, 4.0, got[`decisions_total{bucket="fares",by="store",outcome="granted",shadow="false"}`])

	_, err := tbprometheus.New(registry, tbprometheus.WithMaxBuckets(7))
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	assert.ErrorContains(t, err, "max buckets 7")
	_, err = tbprometheus.New(registry, tbprometheus.WithWaitBounds(1, 2))
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	assert.ErrorContains(t, err, "[1 2]")
	_, err = tbprometheus.New(prometheus.WrapRegistererWith(prometheus.Labels{"store": "eu"}, registry))
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, "the same names with and without a label")
}

// Two stores in one process, told apart by a label of the registerer's.
func TestTwoStores(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	for i, store := range []string{"eu", "us", "eu"} {
		observer, err := tbprometheus.New(prometheus.WrapRegistererWith(prometheus.Labels{"store": store}, registry))
		require.NoError(t, err)
		observer.Health(tokenbucket.Health{Down: i == 0})
	}
	observer, err := tbprometheus.New(prometheus.WrapRegistererWith(prometheus.Labels{"store": "eu"}, registry))
	require.NoError(t, err)
	observer.Health(tokenbucket.Health{Down: true})
	assert.Equal(t, map[string]float64{`store_up{store="eu"}`: 0, `store_up{store="us"}`: 1}, telemetrytest.Of(scrape(t, registry), "store_up"))
}

// Metrics of somebody else under the same names are an error that says so, and nothing is registered.
func TestTaken(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(prometheus.NewGauge(prometheus.GaugeOpts{Name: "tokenbucket_store_up", Help: "Mine."})))
	_, err := tbprometheus.New(registry)
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	assert.ErrorContains(t, err, "tokenbucket_store_up")
	families, err := registry.Gather()
	require.NoError(t, err)
	assert.Len(t, families, 1)
}

func TestInvalid(t *testing.T) {
	for want, opts := range map[string][]tbprometheus.Option{
		"option nil":       {nil},
		"buckets nil":      {tbprometheus.WithBuckets(nil)},
		"max buckets 0":    {tbprometheus.WithMaxBuckets(0)},
		"max buckets 1000": {tbprometheus.WithMaxBuckets(10_001)},
		"wait bounds []":   {tbprometheus.WithWaitBounds()},
		"wait bounds [0 1": {tbprometheus.WithWaitBounds(0, 1)},
		"wait bounds [2 2": {tbprometheus.WithWaitBounds(2, 2)},
	} {
		registry := prometheus.NewPedanticRegistry()
		_, err := tbprometheus.New(registry, opts...)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, want)
		assert.ErrorContains(t, err, want)
		families, err := registry.Gather()
		require.NoError(t, err)
		assert.Empty(t, families, "nothing is registered")
	}
	_, err := tbprometheus.New(nil)
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	_, err = tbprometheus.New((*prometheus.Registry)(nil))
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
}
