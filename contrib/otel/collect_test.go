package otel_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/go-tokenbucket/tokenbucket"
	tbotel "github.com/go-tokenbucket/tokenbucket/contrib/otel"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetrytest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// sdk is OpenTelemetry's SDK with a reader and an exporter in memory.
type sdk struct {
	reader *sdkmetric.ManualReader
	meters *sdkmetric.MeterProvider
	spans  *tracetest.InMemoryExporter
	traces *sdktrace.TracerProvider
}

func newSDK(t testing.TB, opts ...sdktrace.TracerProviderOption) *sdk {
	x := &sdk{reader: sdkmetric.NewManualReader(), spans: tracetest.NewInMemoryExporter()}
	x.meters = sdkmetric.NewMeterProvider(sdkmetric.WithReader(x.reader))
	x.traces = sdktrace.NewTracerProvider(append(opts, sdktrace.WithSyncer(x.spans))...)
	t.Cleanup(func() {
		assert.NoError(t, x.meters.Shutdown(context.Background()))
		assert.NoError(t, x.traces.Shutdown(context.Background()))
	})
	return x
}

func (x *sdk) observe(t testing.TB, opts ...tbotel.Option) tokenbucket.Observer {
	t.Helper()
	observer, err := tbotel.New(x.with(opts)...)
	require.NoError(t, err)
	return observer
}

func (x *sdk) with(opts []tbotel.Option) []tbotel.Option {
	return append([]tbotel.Option{tbotel.WithMeterProvider(x.meters), tbotel.WithTracerProvider(x.traces)}, opts...)
}

func (x *sdk) metrics(t testing.TB) []metricdata.Metrics {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, x.reader.Collect(context.Background(), &all))
	if len(all.ScopeMetrics) == 0 {
		return nil
	}
	require.Len(t, all.ScopeMetrics, 1)
	require.Equal(t, tbotel.Scope, all.ScopeMetrics[0].Scope.Name)
	require.Contains(t, all.ScopeMetrics[0].Scope.SchemaURL, "opentelemetry.io/schemas/")
	return all.ScopeMetrics[0].Metrics
}

// open returns the adapter with an SDK of its own.
func open(t testing.TB) telemetrytest.Adapter[tbotel.Option] { return newSDK(t).adapter() }

func (x *sdk) adapter() telemetrytest.Adapter[tbotel.Option] {
	noSpans := tbotel.WithSpans(tbotel.NoSpans)
	return telemetrytest.Adapter[tbotel.Option]{
		Limiter: func(opts ...tbotel.Option) (tokenbucket.Observer, error) {
			return tbotel.New(x.with(append(opts, noSpans))...)
		},
		SlidingWindow: func(opts ...tbotel.Option) (slidingwindow.Observer, error) {
			return tbotel.NewSlidingWindow(x.with(opts)...)
		},
		Semaphore:      func(opts ...tbotel.Option) (semaphore.Observer, error) { return tbotel.NewSemaphore(x.with(opts)...) },
		WithBuckets:    tbotel.WithBuckets,
		WithMaxBuckets: tbotel.WithMaxBuckets,
		Collect:        x.collect,
	}
}

// collect returns all series under the names of contrib/prometheus, as the README says that they correspond.
func (x *sdk) collect(t testing.TB) telemetrytest.Series {
	t.Helper()
	into := telemetrytest.Series{}
	for _, m := range x.metrics(t) {
		switch data := m.Data.(type) {
		case metricdata.Sum[int64]:
			require.True(t, data.IsMonotonic)
			addPoints(into, m, "_total", data.DataPoints)
		case metricdata.Sum[float64]:
			require.True(t, data.IsMonotonic)
			addPoints(into, m, "_total", data.DataPoints)
		case metricdata.Gauge[int64]:
			addPoints(into, m, "", data.DataPoints)
		case metricdata.Histogram[int64]:
			addHistograms(into, m, data.DataPoints)
		case metricdata.Histogram[float64]:
			addHistograms(into, m, data.DataPoints)
		default:
			require.Fail(t, "unexpected type", "%s is a %T", m.Name, data)
		}
	}
	return into
}

func addPoints[N int64 | float64](into telemetrytest.Series, m metricdata.Metrics, suffix string, points []metricdata.DataPoint[N]) {
	namespace, name := prometheusName(m)
	for _, p := range points {
		labels, kind := prometheusLabels(namespace, p.Attributes)
		into[key(namespace+name+suffix, labels)] += float64(p.Value)
		if name == "_decisions" && kind != "" {
			delete(labels, "outcome")
			delete(labels, "by")
			labels["kind"] = kind
			into[key(namespace+"_failures_total", labels)] += float64(p.Value)
		}
	}
}

func addHistograms[N int64 | float64](into telemetrytest.Series, m metricdata.Metrics, points []metricdata.HistogramDataPoint[N]) {
	namespace, name := prometheusName(m)
	for _, p := range points {
		labels, kind := prometheusLabels(namespace, p.Attributes)
		if name == "_store_trip_duration_seconds" {
			labels["result"] = "answered"
			if kind != "" {
				labels["result"] = "failed"
				into[key(namespace+"_store_errors_total", map[string]string{"kind": kind})] += float64(p.Count)
			}
		}
		into[key(namespace+name+"_count", labels)] += float64(p.Count)
		into[key(namespace+name+"_sum", labels)] += float64(p.Sum)
		var below uint64
		for i, bound := range p.Bounds {
			below += p.BucketCounts[i]
			labels["le"] = fmt.Sprint(bound)
			into[key(namespace+name+"_bucket", labels)] += float64(below)
		}
	}
}

// prometheusName returns the package's name, and the rest of the metric's name.
func prometheusName(m metricdata.Metrics) (namespace, name string) {
	namespace, name, _ = strings.Cut(m.Name, ".")
	name = "_" + strings.ReplaceAll(name, ".", "_")
	if m.Unit == "s" {
		name += "_seconds"
	}
	return namespace, name
}

// prometheusLabels returns the labels, and the kind of an error by error.type.
func prometheusLabels(namespace string, set attribute.Set) (labels map[string]string, kind string) {
	labels = map[string]string{}
	for _, kv := range set.ToSlice() {
		name, value := strings.TrimPrefix(string(kv.Key), namespace+"."), kv.Value.Emit()
		switch name {
		case "error.type":
			kind = strings.ToLower(strings.TrimPrefix(value, "_"))
			continue
		case "decider":
			name = "by"
		case "lease.use":
			name = "use"
		case "name":
			name = "semaphore"
		}
		labels[name] = value
	}
	return labels, kind
}

func key(name string, labels map[string]string) string {
	var parts []string
	for _, label := range slices.Sorted(maps.Keys(labels)) {
		parts = append(parts, fmt.Sprintf("%s=%q", label, labels[label]))
	}
	return name + "{" + strings.Join(parts, ",") + "}"
}
