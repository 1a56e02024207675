package otel_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/stdout/stdoutmetric"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry/telemetrytest"

	"github.com/go-tokenbucket/tokenbucket"
	tbotel "github.com/go-tokenbucket/tokenbucket/contrib/otel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.Dialing) }

// telemetry is the real SDK with a reader and an exporter that keep what they get.
type telemetry struct {
	reader *sdkmetric.ManualReader
	meters *sdkmetric.MeterProvider
	spans  *tracetest.InMemoryExporter
	traces *sdktrace.TracerProvider
}

func newTelemetry(t testing.TB, opts ...sdktrace.TracerProviderOption) *telemetry {
	x := &telemetry{reader: sdkmetric.NewManualReader(), spans: tracetest.NewInMemoryExporter()}
	x.meters = sdkmetric.NewMeterProvider(sdkmetric.WithReader(x.reader))
	x.traces = sdktrace.NewTracerProvider(append(opts, sdktrace.WithSyncer(x.spans))...)
	t.Cleanup(func() {
		assert.NoError(t, x.meters.Shutdown(context.Background()))
		assert.NoError(t, x.traces.Shutdown(context.Background()))
	})
	return x
}

func (x *telemetry) observe(t testing.TB, opts ...tbotel.Option) tokenbucket.Observer {
	t.Helper()
	observer, err := tbotel.New(append([]tbotel.Option{tbotel.WithMeterProvider(x.meters), tbotel.WithTracerProvider(x.traces)}, opts...)...)
	require.NoError(t, err)
	return observer
}

// collect reads all metrics. Keys are as in decisions{bucket=fares,…}, attributes in order of key, without the namespace; of
// histograms there are :count, :sum and :le(bound).
func (x *telemetry) collect(t testing.TB) map[string]float64 {
	t.Helper()
	series := map[string]float64{}
	for _, m := range x.metrics(t) {
		add(series, m)
	}
	return series
}

func (x *telemetry) metrics(t testing.TB) []metricdata.Metrics {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, x.reader.Collect(context.Background(), &all))
	require.Len(t, all.ScopeMetrics, 1)
	require.Equal(t, tbotel.Scope, all.ScopeMetrics[0].Scope.Name)
	require.Contains(t, all.ScopeMetrics[0].Scope.SchemaURL, "opentelemetry.io/schemas/")
	return all.ScopeMetrics[0].Metrics
}

func add(series map[string]float64, m metricdata.Metrics) {
	name := strings.TrimPrefix(m.Name, "tokenbucket.")
	switch data := m.Data.(type) {
	case metricdata.Sum[int64]:
		for _, p := range data.DataPoints {
			series[name+key(p.Attributes)] = float64(p.Value)
		}
	case metricdata.Sum[float64]:
		for _, p := range data.DataPoints {
			series[name+key(p.Attributes)] = p.Value
		}
	case metricdata.Gauge[int64]:
		for _, p := range data.DataPoints {
			series[name+key(p.Attributes)] = float64(p.Value)
		}
	case metricdata.Histogram[int64]:
		for _, p := range data.DataPoints {
			histogram(series, name, p)
		}
	case metricdata.Histogram[float64]:
		for _, p := range data.DataPoints {
			histogram(series, name, p)
		}
	default:
		panic(fmt.Sprintf("%s is a %T", m.Name, data))
	}
}

func histogram[N int64 | float64](series map[string]float64, name string, p metricdata.HistogramDataPoint[N]) {
	at := key(p.Attributes)
	series[name+":count"+at] = float64(p.Count)
	series[name+":sum"+at] = float64(p.Sum)
	var below uint64
	for i, bound := range p.Bounds {
		below += p.BucketCounts[i]
		series[fmt.Sprintf("%s:le(%v)%s", name, bound, at)] = float64(below)
	}
}

func key(set attribute.Set) string {
	var parts []string
	for _, kv := range set.ToSlice() {
		parts = append(parts, strings.TrimPrefix(string(kv.Key), "tokenbucket.")+"="+kv.Value.Emit())
	}
	sort.Strings(parts)
	return "{" + strings.Join(parts, ",") + "}"
}

// Every figure of every metric.
func TestMetrics(t *testing.T) {
	x := newTelemetry(t)
	telemetrytest.Happen(x.observe(t))
	got := x.collect(t)
	assert.Equal(t, map[string]float64{
		"decisions{bucket=fares,decider=store,outcome=granted,shadow=false}":                        2,
		"decisions{bucket=fares,decider=lease,outcome=granted,shadow=false}":                        1,
		"decisions{bucket=fares,decider=store,outcome=refused,shadow=false}":                        1,
		"decisions{bucket=fares,decider=snapshot,outcome=refused,shadow=false}":                     2,
		"decisions{bucket=fares,decider=snapshot,outcome=refused,shadow=true}":                      1,
		"decisions{bucket=fares,decider=store,outcome=granted,shadow=true}":                         1,
		"decisions{bucket=fares,decider=switch,outcome=granted,shadow=false}":                       1,
		"decisions{bucket=fares,decider=policy,outcome=granted,shadow=false}":                       1,
		"decisions{bucket=fares,decider=policy,error.type=unavailable,outcome=failed,shadow=false}": 1,
		"decisions{bucket=fares,decider=store,error.type=timeout,outcome=failed,shadow=false}":      1,
		"decisions{bucket=fares,decider=store,error.type=canceled,outcome=failed,shadow=false}":     1,
		"decisions{bucket=fares,decider=check,error.type=invalid,outcome=failed,shadow=false}":      2,
		"decisions{bucket=hotels,decider=unknown,outcome=granted,shadow=false}":                     1,
	}, telemetrytest.Of(got, "decisions"))
	assert.Equal(t, map[string]float64{
		"permits{bucket=fares,decider=store,outcome=granted,shadow=false}":                        3,
		"permits{bucket=fares,decider=lease,outcome=granted,shadow=false}":                        1,
		"permits{bucket=fares,decider=store,outcome=refused,shadow=false}":                        3,
		"permits{bucket=fares,decider=snapshot,outcome=refused,shadow=false}":                     2,
		"permits{bucket=fares,decider=snapshot,outcome=refused,shadow=true}":                      1,
		"permits{bucket=fares,decider=store,outcome=granted,shadow=true}":                         1,
		"permits{bucket=fares,decider=switch,outcome=granted,shadow=false}":                       1,
		"permits{bucket=fares,decider=policy,outcome=granted,shadow=false}":                       1,
		"permits{bucket=fares,decider=policy,error.type=unavailable,outcome=failed,shadow=false}": 1,
		"permits{bucket=fares,decider=store,error.type=timeout,outcome=failed,shadow=false}":      4,
		"permits{bucket=fares,decider=store,error.type=canceled,outcome=failed,shadow=false}":     1,
		"permits{bucket=hotels,decider=unknown,outcome=granted,shadow=false}":                     1,
	}, telemetrytest.Of(got, "permits"))
	assert.Equal(t, map[string]float64{
		"lease.permits{bucket=fares,lease.use=used}":   12,
		"lease.permits{bucket=fares,lease.use=unused}": 3,
		"store.up{}":                         1,
		"store.outages{}":                    1,
		"store.away{}":                       1.5,
		"policy.in_force{policy=FailClosed}": 0,
		"policy.in_force{policy=FailOpen}":   0,
		"policy.in_force{policy=LocalShare}": 0,
	}, telemetrytest.Of(got, "lease", "store.up", "store.outages", "store.away", "policy"))

	// 200 ms and four times 0 by fares, one 0 by hotels; the minute of the shadow is by itself.
	for key, want := range map[string]float64{
		"wait.duration:count{bucket=fares,shadow=false}":     5,
		"wait.duration:sum{bucket=fares,shadow=false}":       0.2,
		"wait.duration:le(0.001){bucket=fares,shadow=false}": 4,
		"wait.duration:le(0.1){bucket=fares,shadow=false}":   4,
		"wait.duration:le(0.25){bucket=fares,shadow=false}":  5,
		"wait.duration:le(30){bucket=fares,shadow=true}":     0,
		"wait.duration:le(60){bucket=fares,shadow=true}":     1,
		"wait.duration:count{bucket=hotels,shadow=false}":    1,
		"store.trip.duration:count{}":                        2,
		"store.trip.duration:sum{}":                          0.0005,
		"store.trip.duration:le(0.00025){}":                  1,
		"store.trip.duration:count{error.type=timeout}":      1,
		"store.trip.duration:le(0.5){error.type=timeout}":    0,
		"store.trip.duration:le(1){error.type=timeout}":      1,
		"batch.requests:count{}":                             3,
		"batch.requests:sum{}":                               64,
		"batch.requests:le(4){}":                             2,
		"lock.wait.duration:count{}":                         1,
		"lock.wait.duration:sum{}":                           0.02,
	} {
		value, there := got[key]
		if assert.True(t, there, key) {
			assert.InDelta(t, want, value, 1e-9, key)
		}
	}
}

// Names and units are by the conventions, the schema of which is named, and everything is described.
func TestInstruments(t *testing.T) {
	x := newTelemetry(t)
	telemetrytest.Happen(x.observe(t))
	units := map[string]string{}
	for _, m := range x.metrics(t) {
		assert.NotEmpty(t, m.Description, m.Name)
		units[m.Name] = m.Unit
	}
	assert.Equal(t, map[string]string{
		"tokenbucket.decisions": "{decision}", "tokenbucket.permits": "{permit}", "tokenbucket.lease.permits": "{permit}",
		"tokenbucket.wait.duration": "s", "tokenbucket.store.trip.duration": "s", "tokenbucket.lock.wait.duration": "s",
		"tokenbucket.batch.requests": "{request}", "tokenbucket.store.outages": "{outage}", "tokenbucket.store.away": "s",
		"tokenbucket.store.up": "{store}", "tokenbucket.policy.in_force": "{policy}",
	}, units)
}

// The store begins as up, is down while it is said to be, whoever is told, and a policy is in force only meanwhile.
func TestHealth(t *testing.T) {
	x := newTelemetry(t)
	observer := x.observe(t)
	state := func(up, outages, closed, open, share float64) {
		t.Helper()
		got := x.collect(t)
		assert.Equal(t, map[string]float64{
			"store.up{}": up, "policy.in_force{policy=FailClosed}": closed, "policy.in_force{policy=FailOpen}": open,
			"policy.in_force{policy=LocalShare}": share,
		}, telemetrytest.Of(got, "store.up", "policy"))
		assert.Equal(t, outages, got["store.outages{}"])
	}
	state(1, 0, 0, 0, 0)
	down := tokenbucket.Health{Bucket: "fares", Down: true, Policy: tokenbucket.FailOpen, Err: telemetrytest.ErrOther}
	observer.Health(down)
	state(0, 1, 0, 1, 0)
	down.Bucket, down.Policy = "hotels", tokenbucket.LocalShare(4)
	observer.Health(down) // of another limiter: the same outage
	state(0, 1, 0, 1, 1)
	observer.Health(tokenbucket.Health{Bucket: "rooms", After: 1500 * time.Millisecond})
	observer.Health(tokenbucket.Health{Bucket: "hotels", After: 1600 * time.Millisecond}) // known already
	state(1, 1, 0, 0, 0)
	assert.Equal(t, 1.5, x.collect(t)["store.away{}"])
	down.Policy = tokenbucket.FailClosed
	observer.Health(down)
	state(0, 2, 1, 0, 0)
}

// Two stores in one process are told apart by an attribute, their gauges too.
func TestTwoStores(t *testing.T) {
	x := newTelemetry(t)
	store := attribute.Key("store")
	eu := x.observe(t, tbotel.WithAttributes(store.String("eu")))
	us := x.observe(t, tbotel.WithAttributes(store.String("us")))
	eu.Health(tokenbucket.Health{Down: true})
	us.Decision(t.Context(), tokenbucket.Decision{Bucket: "fares", Permits: 1, Err: telemetrytest.ErrOther})
	got := x.collect(t)
	assert.Equal(t, map[string]float64{"store.up{store=eu}": 0, "store.up{store=us}": 1}, telemetrytest.Of(got, "store.up"))
	assert.Equal(t, map[string]float64{"decisions{bucket=fares,decider=store,error.type=_OTHER,outcome=failed,shadow=false,store=us}": 1}, telemetrytest.Of(got, "decisions"))
	spans := x.spans.GetSpans()
	require.Len(t, spans, 1)
	assert.Contains(t, spans[0].Attributes, store.String("us"))
}

// Calls that waited or failed have a span in the caller's trace, as long as they took and ending when they did.
func TestSpans(t *testing.T) {
	x := newTelemetry(t)
	observer := x.observe(t)
	ctx, parent := x.traces.Tracer("test").Start(t.Context(), "request")
	before := time.Now()
	for _, d := range telemetrytest.Decisions {
		observer.Decision(ctx, d)
	}
	after := time.Now()
	parent.End()
	spans := x.spans.GetSpans()
	require.Len(t, spans, 1+5+1, "one that waited, five that failed, and the parent")
	waited, failed := spans[0], spans[2]
	for _, s := range spans[:6] {
		assert.Equal(t, "tokenbucket.acquire", s.Name)
		assert.Equal(t, trace.SpanKindInternal, s.SpanKind)
		assert.Equal(t, parent.SpanContext().SpanID(), s.Parent.SpanID())
		assert.Equal(t, parent.SpanContext().TraceID(), s.SpanContext.TraceID())
		assert.False(t, s.EndTime.Before(before.Round(0)), "%v is before %v", s.EndTime, before)
		assert.False(t, s.EndTime.After(after.Round(0)), "%v is after %v", s.EndTime, after)
	}
	assert.Equal(t, 201*time.Millisecond, waited.EndTime.Sub(waited.StartTime))
	assert.Equal(t, codes.Unset, waited.Status.Code)
	assert.ElementsMatch(t, []attribute.KeyValue{
		attribute.String("tokenbucket.bucket", "fares"), attribute.Int("tokenbucket.permits", 2),
		attribute.String("tokenbucket.outcome", "granted"), attribute.String("tokenbucket.decider", "store"),
		attribute.Bool("tokenbucket.shadow", false), attribute.Float64("tokenbucket.wait", 0.2),
	}, waited.Attributes)
	assert.Equal(t, time.Second, failed.EndTime.Sub(failed.StartTime))
	assert.Equal(t, codes.Error, failed.Status.Code)
	assert.Contains(t, failed.Status.Description, "store timeout")
	assert.Contains(t, failed.Attributes, attribute.String("error.type", "timeout"))
	assert.Contains(t, failed.Attributes, attribute.String("tokenbucket.outcome", "failed"))
}

// All calls have spans, or none, or those that the sampler takes.
func TestWithSpans(t *testing.T) {
	for spans, want := range map[tbotel.Spans]int{tbotel.SpansOfWaits: 6, tbotel.AllSpans: len(telemetrytest.Decisions), tbotel.NoSpans: 0} {
		x := newTelemetry(t)
		telemetrytest.Happen(x.observe(t, tbotel.WithSpans(spans)))
		assert.Len(t, x.spans.GetSpans(), want, "%d", spans)
	}
	x := newTelemetry(t, sdktrace.WithSampler(sdktrace.NeverSample()))
	telemetrytest.Happen(x.observe(t, tbotel.WithSpans(tbotel.AllSpans)))
	assert.Empty(t, x.spans.GetSpans())
	assert.Equal(t, 16.0, telemetrytest.Sum(telemetrytest.Of(x.collect(t), "decisions")), "metrics do not depend on it")
}

// What goes wrong is told apart by error.type.
func TestErrorTypes(t *testing.T) {
	late := &tokenbucket.WaitError{Bucket: "fares", Permits: 1, Wait: time.Second, Reason: context.DeadlineExceeded}
	never := &tokenbucket.WaitError{Bucket: "fares", Permits: 9, Wait: time.Second, Reason: tokenbucket.ErrNeverGranted}
	for _, c := range []struct {
		err         error
		call, batch string
	}{
		{telemetrytest.Wrap(tokenbucket.ErrStoreTimeout), "timeout", "timeout"},
		{fmt.Errorf("%w: %w", tokenbucket.ErrStoreTimeout, context.DeadlineExceeded), "timeout", "timeout"},
		{fmt.Errorf("%w: %w", tokenbucket.ErrStoreUnavailable, tokenbucket.ErrStoreTimeout), "unavailable", "unavailable"},
		{telemetrytest.Wrap(tokenbucket.ErrLockNotObtained), "lock", "lock"},
		{telemetrytest.Wrap(tokenbucket.ErrCorruptState), "corrupt", "corrupt"},
		{telemetrytest.Wrap(tokenbucket.ErrInvalidPermits), "invalid", "_OTHER"},
		{telemetrytest.Wrap(tokenbucket.ErrInvalidConfig), "invalid", "_OTHER"},
		{late, "deadline", "timeout"},
		{never, "invalid", "_OTHER"},
		{context.DeadlineExceeded, "deadline", "timeout"},
		{telemetrytest.Wrap(context.Canceled), "canceled", "_OTHER"},
		{telemetrytest.ErrOther, "_OTHER", "_OTHER"},
		{telemetrytest.Wrap(redis.ErrPoolTimeout), "timeout", "timeout"},
		{telemetrytest.Wrap(io.EOF), "unavailable", "unavailable"},
		{ping(t), "unavailable", "unavailable"},
	} {
		x := newTelemetry(t)
		observer := x.observe(t)
		observer.Decision(t.Context(), tokenbucket.Decision{Bucket: "fares", Permits: 1, Err: c.err})
		observer.Trip(tokenbucket.Trip{Bucket: "fares", Requests: 1, Err: c.err})
		got := x.collect(t)
		assert.Equal(t, 1.0, got["decisions{bucket=fares,decider=store,error.type="+c.call+",outcome=failed,shadow=false}"], "%v", c.err)
		assert.Equal(t, map[string]float64{"store.trip.duration:count{error.type=" + c.batch + "}": 1}, telemetrytest.Of(got, "store.trip.duration:count"), "%v", c.err)
		spans := x.spans.GetSpans()
		require.Len(t, spans, 1)
		assert.Contains(t, spans[0].Attributes, attribute.String("error.type", c.call))
	}
}

// ping fails as a Redis that is not there does.
func ping(t *testing.T) error {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, DialerRetries: 1})
	defer func() { _ = client.Close() }()
	err := client.Ping(context.Background()).Err()
	require.Error(t, err)
	return err
}

// However many buckets there are and whoever counts: no more attribute sets than were allowed, no count lost, while the
// reader collects.
func TestMaxBuckets(t *testing.T) {
	const most, names, goroutines = 10, 500, 8
	x := newTelemetry(t)
	observer := x.observe(t, tbotel.WithMaxBuckets(most), tbotel.WithSpans(tbotel.NoSpans))
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
		x.collect(t)
	}
	running.Wait()
	got := x.collect(t)
	for metric, each := range map[string]float64{"decisions{": 2, "permits{": 3, "lease.permits{": 3, "wait.duration:count{": 1} {
		assert.Equal(t, each*names*goroutines, telemetrytest.Sum(telemetrytest.Of(got, metric)), metric)
	}
	granted := telemetrytest.Of(got, "wait.duration:count{")
	assert.Len(t, granted, most+1)
	assert.Equal(t, float64((names-most)*goroutines), granted["wait.duration:count{bucket=other,shadow=false}"])
}

// Bucket names become attributes as the caller wants; an empty one is none, and what is not UTF-8 does no harm. Spans keep
// the name.
func TestWithBuckets(t *testing.T) {
	x := newTelemetry(t)
	observer := x.observe(t, tbotel.WithBuckets(func(name string) string {
		tenant, _, _ := strings.Cut(name, "/")
		return tenant
	}), tbotel.WithSpans(tbotel.AllSpans))
	for _, name := range []string{"a/1", "a/2", "b/1", "/3", "\xff/4"} {
		observer.Decision(t.Context(), tokenbucket.Decision{Bucket: name, Permits: 1})
	}
	assert.Equal(t, map[string]float64{
		"decisions{bucket=a,decider=store,outcome=refused,shadow=false}":      2,
		"decisions{bucket=b,decider=store,outcome=refused,shadow=false}":      1,
		"decisions{decider=store,outcome=refused,shadow=false}":               1,
		"decisions{bucket=\uFFFD,decider=store,outcome=refused,shadow=false}": 1,
	}, telemetrytest.Of(x.collect(t), "decisions"))
	assert.Contains(t, x.spans.GetSpans()[0].Attributes, attribute.String("tokenbucket.bucket", "a/1"))
}

// What an exporter writes, read back: the path that metrics and spans take in a process.
func TestExported(t *testing.T) {
	var metrics, spans bytes.Buffer
	metricExporter, err := stdoutmetric.New(stdoutmetric.WithWriter(&metrics))
	require.NoError(t, err)
	traceExporter, err := stdouttrace.New(stdouttrace.WithWriter(&spans))
	require.NoError(t, err)
	meters := sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewPeriodicReader(metricExporter, sdkmetric.WithInterval(time.Hour))))
	traces := sdktrace.NewTracerProvider(sdktrace.WithBatcher(traceExporter))
	observer, err := tbotel.New(tbotel.WithMeterProvider(meters), tbotel.WithTracerProvider(traces))
	require.NoError(t, err)
	telemetrytest.Happen(observer)
	require.NoError(t, meters.Shutdown(context.Background()))
	require.NoError(t, traces.Shutdown(context.Background()))

	type attributes []struct {
		Key   string
		Value struct{ Value any }
	}
	var written struct {
		ScopeMetrics []struct {
			Metrics []struct {
				Name, Unit string
				Data       struct {
					IsMonotonic bool
					DataPoints  []struct {
						Attributes attributes
						Value, Sum float64
						Count      int
					}
				}
			}
		}
	}
	require.NoError(t, json.Unmarshal(metrics.Bytes(), &written))
	require.Len(t, written.ScopeMetrics, 1)
	var decided, waited float64
	for _, m := range written.ScopeMetrics[0].Metrics {
		for _, p := range m.Data.DataPoints {
			switch m.Name {
			case "tokenbucket.decisions":
				assert.True(t, m.Data.IsMonotonic)
				decided += p.Value
			case "tokenbucket.wait.duration":
				assert.Equal(t, "s", m.Unit)
				waited += p.Sum
			}
		}
	}
	assert.Equal(t, float64(len(telemetrytest.Decisions)), decided)
	assert.InDelta(t, 60.2, waited, 1e-9)

	var statuses []string
	for decoder := json.NewDecoder(&spans); ; {
		var span struct {
			Name       string
			Status     struct{ Code string }
			Attributes attributes
		}
		err := decoder.Decode(&span)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		assert.Equal(t, "tokenbucket.acquire", span.Name)
		assert.NotEmpty(t, span.Attributes)
		statuses = append(statuses, span.Status.Code)
	}
	assert.Equal(t, []string{"Unset", "Error", "Error", "Error", "Error", "Error"}, statuses)
}

type broken struct{ noop.MeterProvider }

func (broken) Meter(string, ...metric.MeterOption) metric.Meter { return brokenMeter{} }

type brokenMeter struct{ noop.Meter }

func (brokenMeter) Int64Counter(string, ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return nil, telemetrytest.ErrOther
}

func TestInvalid(t *testing.T) {
	for want, opt := range map[string]tbotel.Option{
		"option nil":           nil,
		"meter provider nil":   tbotel.WithMeterProvider(nil),
		"tracer provider nil":  tbotel.WithTracerProvider((*sdktrace.TracerProvider)(nil)),
		"spans 3":              tbotel.WithSpans(3),
		"buckets nil":          tbotel.WithBuckets(nil),
		"max buckets 0":        tbotel.WithMaxBuckets(0),
		"max buckets 10001":    tbotel.WithMaxBuckets(10_001),
		`attribute ""`:         tbotel.WithAttributes(attribute.KeyValue{}),
		"configuration: never": tbotel.WithMeterProvider(broken{}),
	} {
		_, err := tbotel.New(opt)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, want)
		assert.ErrorContains(t, err, want)
	}
	_, err := tbotel.New(tbotel.WithMeterProvider(broken{}))
	require.ErrorIs(t, err, telemetrytest.ErrOther)
}
