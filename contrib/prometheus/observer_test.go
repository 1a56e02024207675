package prometheus_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sort"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket"
	tbprometheus "github.com/go-tokenbucket/tokenbucket/contrib/prometheus"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetrytest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.Dialing) }

type adapter = telemetrytest.Adapter[tbprometheus.Option]

// open returns the adapter with an empty registry.
func open(testing.TB) adapter { return adapterOf(prometheus.NewPedanticRegistry()) }

func adapterOf(registry *prometheus.Registry) adapter {
	return adapter{
		Limiter: func(opts ...tbprometheus.Option) (tokenbucket.Observer, error) {
			return tbprometheus.New(registry, opts...)
		},
		SlidingWindow: func(opts ...tbprometheus.Option) (slidingwindow.Observer, error) {
			return tbprometheus.NewSlidingWindow(registry, opts...)
		},
		Semaphore: func(opts ...tbprometheus.Option) (semaphore.Observer, error) {
			return tbprometheus.NewSemaphore(registry, opts...)
		},
		WithBuckets:    tbprometheus.WithBuckets,
		WithMaxBuckets: tbprometheus.WithMaxBuckets,
		Collect:        func(t testing.TB) telemetrytest.Series { return scrape(t, registry) },
	}
}

func observe(t testing.TB, opts ...tbprometheus.Option) (*prometheus.Registry, tokenbucket.Observer) {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	observer, err := tbprometheus.New(registry, opts...)
	require.NoError(t, err)
	return registry, observer
}

// scrape returns the metrics as a Prometheus server reads them, in its text format. Empty labels are left out, as a server leaves them out.
func scrape(t testing.TB, registry *prometheus.Registry) telemetrytest.Series {
	t.Helper()
	reply := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}).
		ServeHTTP(reply, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	require.Equal(t, http.StatusOK, reply.Code)
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(reply.Body)
	require.NoError(t, err)
	series := telemetrytest.Series{}
	for name, family := range families {
		for _, m := range family.Metric {
			key := func(suffix string, more ...*dto.LabelPair) string {
				var parts []string
				for _, l := range append(more, m.GetLabel()...) {
					if l.GetValue() != "" {
						parts = append(parts, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
					}
				}
				sort.Strings(parts)
				return name + suffix + "{" + strings.Join(parts, ",") + "}"
			}
			h := m.GetHistogram()
			if h == nil {
				series[key("")] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
				continue
			}
			series[key("_count")] = float64(h.GetSampleCount())
			series[key("_sum")] = h.GetSampleSum()
			for _, b := range h.Bucket {
				le, value := "le", fmt.Sprint(b.GetUpperBound())
				series[key("_bucket", &dto.LabelPair{Name: &le, Value: &value})] = float64(b.GetCumulativeCount())
			}
		}
	}
	return series
}

func TestConformance(t *testing.T) { telemetrytest.Run(t, open) }

// The series of the store exist before the first event, so that an alert notices the first error.
func TestSeriesOfStore(t *testing.T) {
	registry, _ := observe(t)
	got := scrape(t, registry)
	for _, key := range []string{
		`tokenbucket_store_errors_total{kind="timeout"}`, `tokenbucket_store_errors_total{kind="unavailable"}`,
		`tokenbucket_store_errors_total{kind="lock"}`, `tokenbucket_store_errors_total{kind="corrupt"}`,
		`tokenbucket_store_errors_total{kind="other"}`, `tokenbucket_store_outages_total{}`, `tokenbucket_store_away_seconds_total{}`,
		`tokenbucket_store_trip_duration_seconds_count{result="answered"}`, `tokenbucket_store_trip_duration_seconds_count{result="failed"}`,
		`tokenbucket_batch_requests_count{}`, `tokenbucket_lock_wait_duration_seconds_count{}`,
		`tokenbucket_policy_in_force{policy="FailClosed"}`, `tokenbucket_policy_in_force{policy="FailOpen"}`,
		`tokenbucket_policy_in_force{policy="LocalShare"}`,
	} {
		require.Contains(t, got, key)
	}
	require.Equal(t, telemetrytest.Series{"tokenbucket_store_up{}": 1}, got.Of(""), "all others are 0")
}

// Names, units and help texts follow Prometheus' conventions.
func TestLint(t *testing.T) {
	registry, observer := observe(t)
	telemetrytest.Report(observer)
	families, err := registry.Gather()
	require.NoError(t, err)
	require.Len(t, families, 14)
	problems, err := testutil.GatherAndLint(registry)
	require.NoError(t, err)
	require.Empty(t, problems)
}

// Two observers of one registerer count together. Their bounds must be the same.
func TestTwice(t *testing.T) {
	a := open(t)
	for range 2 {
		observer, err := a.Limiter()
		require.NoError(t, err)
		observer.Decision(t.Context(), tokenbucket.Decision{Bucket: "fares", Permits: 1, Granted: true})
		window, err := a.SlidingWindow()
		require.NoError(t, err)
		window.Decision(t.Context(), slidingwindow.Decision{Limiter: "fares", Permits: 1, Granted: true})
	}
	got := a.Collect(t)
	assert.Equal(t, 2.0, got[`tokenbucket_decisions_total{bucket="fares",by="store",outcome="granted",shadow="false"}`])
	assert.Equal(t, 2.0, got[`slidingwindow_decisions_total{by="store",limiter="fares",outcome="granted"}`])

	_, err := a.Limiter(tbprometheus.WithMaxBuckets(7))
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	assert.ErrorContains(t, err, "max buckets 7")
	_, err = a.SlidingWindow(tbprometheus.WithWaitBounds(1, 2))
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	assert.ErrorContains(t, err, "[1 2]")
}

// Two stores in one process are told apart by a label of the registerer. It must not be mixed with one that lacks the label.
func TestTwoStores(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	for i, store := range []string{"eu", "us", "eu"} {
		observer, err := tbprometheus.New(prometheus.WrapRegistererWith(prometheus.Labels{"store": store}, registry))
		require.NoError(t, err)
		observer.Health(tokenbucket.Health{Down: i == 2})
	}
	got := scrape(t, registry)
	require.Equal(t, telemetrytest.Series{`tokenbucket_store_up{store="us"}`: 1}, got.Of("tokenbucket_store_up"))
	require.Contains(t, got, `tokenbucket_store_up{store="eu"}`)
	_, err := tbprometheus.New(registry)
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
}

// A metric of another collector under the same name is an error that names it, and nothing is registered.
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

func TestWithWaitBounds(t *testing.T) {
	registry, observer := observe(t, tbprometheus.WithWaitBounds(1, 2))
	telemetrytest.Report(observer)
	bounds := 0
	for key := range scrape(t, registry) {
		if strings.HasPrefix(key, `tokenbucket_wait_duration_seconds_bucket{bucket="fares"`) && strings.Contains(key, `shadow="false"`) {
			bounds++
		}
	}
	require.Equal(t, 3, bounds, "and +Inf")
}

func TestInvalid(t *testing.T) {
	for want, opt := range map[string]tbprometheus.Option{
		"wait bounds []":   tbprometheus.WithWaitBounds(),
		"wait bounds [0 1": tbprometheus.WithWaitBounds(0, 1),
		"wait bounds [2 2": tbprometheus.WithWaitBounds(2, 2),
	} {
		_, err := tbprometheus.New(prometheus.NewPedanticRegistry(), opt)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
		require.ErrorContains(t, err, want)
	}
	_, err := tbprometheus.New(nil)
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	_, err = tbprometheus.New((*prometheus.Registry)(nil))
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	_, err = tbprometheus.NewSlidingWindow(nil)
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
}
