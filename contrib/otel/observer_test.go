package otel_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
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
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket"
	tbotel "github.com/go-tokenbucket/tokenbucket/contrib/otel"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetrytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.Dialing) }

func TestConformance(t *testing.T) { telemetrytest.Run(t, open) }

// Names, units and attributes of all metrics.
func TestInstruments(t *testing.T) {
	x := newSDK(t)
	telemetrytest.ReportAll(t, x.adapter())
	got := map[string]string{}
	for _, m := range x.metrics(t) {
		assert.NotEmpty(t, m.Description, m.Name)
		got[m.Name] = m.Unit + " " + strings.Join(attributeKeys(m), " ")
	}
	const limiter = " error.type tokenbucket.bucket tokenbucket.decider tokenbucket.outcome tokenbucket.priority tokenbucket.shadow"
	const window = " error.type slidingwindow.decider slidingwindow.limiter slidingwindow.outcome"
	const sem = " error.type semaphore.name semaphore.outcome"
	require.Equal(t, map[string]string{
		"tokenbucket.decisions":           "{decision}" + limiter,
		"tokenbucket.permits":             "{permit}" + limiter,
		"tokenbucket.wait.duration":       "s tokenbucket.bucket tokenbucket.priority tokenbucket.shadow",
		"tokenbucket.lease.permits":       "{permit} tokenbucket.bucket tokenbucket.lease.use",
		"tokenbucket.lost.permits":        "{permit} tokenbucket.bucket",
		"tokenbucket.store.trip.duration": "s error.type",
		"tokenbucket.batch.requests":      "{request} ",
		"tokenbucket.lock.wait.duration":  "s ",
		"tokenbucket.store.up":            "{store} ",
		"tokenbucket.store.outages":       "{outage} ",
		"tokenbucket.store.away":          "s ",
		"tokenbucket.policy.in_force":     "{policy} tokenbucket.policy",

		"slidingwindow.decisions":           "{decision}" + window,
		"slidingwindow.permits":             "{permit}" + window,
		"slidingwindow.wait.duration":       "s slidingwindow.limiter",
		"slidingwindow.store.trip.duration": "s error.type",
		"slidingwindow.batch.requests":      "{request} ",
		"slidingwindow.store.up":            "{store} ",
		"slidingwindow.store.outages":       "{outage} ",
		"slidingwindow.store.away":          "s ",

		"semaphore.decisions":           "{decision}" + sem,
		"semaphore.permits":             "{permit}" + sem,
		"semaphore.wait.duration":       "s semaphore.name",
		"semaphore.held.duration":       "s semaphore.end semaphore.name",
		"semaphore.store.trip.duration": "s error.type",
		"semaphore.batch.requests":      "{request} ",
		"semaphore.store.up":            "{store} ",
		"semaphore.store.outages":       "{outage} ",
		"semaphore.store.away":          "s ",
	}, got)
}

// attributeKeys returns the keys of all attributes that any point of a metric has.
func attributeKeys(m metricdata.Metrics) []string {
	keys := map[string]bool{}
	add := func(set attribute.Set) {
		for _, kv := range set.ToSlice() {
			keys[string(kv.Key)] = true
		}
	}
	switch data := m.Data.(type) {
	case metricdata.Sum[int64]:
		for _, p := range data.DataPoints {
			add(p.Attributes)
		}
	case metricdata.Gauge[int64]:
		for _, p := range data.DataPoints {
			add(p.Attributes)
		}
	case metricdata.Histogram[float64]:
		for _, p := range data.DataPoints {
			add(p.Attributes)
		}
	}
	return slices.Sorted(maps.Keys(keys))
}

// The attribute error.type is the kind of the error, in metrics and in spans. An error without a kind has the conventions' value for that.
func TestErrorType(t *testing.T) {
	for want, err := range map[string]error{
		"timeout": telemetrytest.Wrap(tokenbucket.ErrStoreTimeout), "canceled": context.Canceled, "_OTHER": telemetrytest.ErrOther,
	} {
		x := newSDK(t)
		x.observe(t).Decision(t.Context(), tokenbucket.Decision{Bucket: "fares", Permits: 1, Err: err})
		for _, m := range x.metrics(t) {
			if m.Name == "tokenbucket.decisions" {
				got, _ := m.Data.(metricdata.Sum[int64]).DataPoints[0].Attributes.Value("error.type")
				require.Equal(t, want, got.AsString())
			}
		}
		spans := x.spans.GetSpans()
		require.Len(t, spans, 1)
		require.Contains(t, spans[0].Attributes, attribute.String("error.type", want))
	}
}

// Two stores in one process are told apart by an attribute of all metrics and spans.
func TestTwoStores(t *testing.T) {
	x := newSDK(t)
	store := attribute.Key("store")
	eu := x.observe(t, tbotel.WithAttributes(store.String("eu")))
	us := x.observe(t, tbotel.WithAttributes(store.String("us")))
	eu.Health(tokenbucket.Health{Down: true})
	us.Decision(t.Context(), tokenbucket.Decision{Bucket: "fares", Permits: 1, Err: telemetrytest.ErrOther})
	got := x.collect(t)
	require.Equal(t, telemetrytest.Series{`tokenbucket_store_up{store="us"}`: 1}, got.Of("tokenbucket_store_up"))
	require.Contains(t, got, `tokenbucket_store_up{store="eu"}`)
	require.Equal(t, telemetrytest.Series{
		`tokenbucket_decisions_total{bucket="fares",by="store",outcome="failed",shadow="false",store="us"}`: 1,
	}, got.Of("tokenbucket_decisions"))
	spans := x.spans.GetSpans()
	require.Len(t, spans, 1)
	require.Contains(t, spans[0].Attributes, store.String("us"))
}

// Calls that waited or failed have a span in the caller's trace. It ends when the call does and has its duration.
func TestSpans(t *testing.T) {
	x := newSDK(t)
	observer := x.observe(t)
	ctx, parent := x.traces.Tracer("test").Start(t.Context(), "request")
	before := time.Now()
	for _, d := range telemetrytest.Decisions {
		observer.Decision(ctx, d)
	}
	after := time.Now()
	parent.End()
	spans := x.spans.GetSpans()
	require.Len(t, spans, 1+5+1, "one call waited, five failed, and the parent")
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

// WithSpans selects the calls that have a span, and the sampler decides whether it is recorded. Metrics do not depend on either.
func TestWithSpans(t *testing.T) {
	for spans, want := range map[tbotel.Spans]int{tbotel.SpansOfWaits: 6, tbotel.AllSpans: len(telemetrytest.Decisions), tbotel.NoSpans: 0} {
		x := newSDK(t)
		telemetrytest.Report(x.observe(t, tbotel.WithSpans(spans)))
		assert.Len(t, x.spans.GetSpans(), want, "%d", spans)
	}
	x := newSDK(t, sdktrace.WithSampler(sdktrace.NeverSample()))
	telemetrytest.Report(x.observe(t, tbotel.WithSpans(tbotel.AllSpans)))
	assert.Empty(t, x.spans.GetSpans())
	assert.Equal(t, float64(len(telemetrytest.Decisions)), x.collect(t).Of("tokenbucket_decisions").Sum())
}

// A limiter's call that waited has a span in the caller's trace, and so has a call whose wait was canceled. The sixth of five permits at 5 a
// second is due after 200 ms.
func TestSpansOfLimiter(t *testing.T) {
	x := newSDK(t)
	clock := clockwork.NewFakeClock()
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithInitialPermits(5),
		tokenbucket.WithClock(clock), tokenbucket.WithObserver(x.observe(t)))
	require.NoError(t, err)
	_, err = limiter.Acquire(t.Context(), 5)
	require.NoError(t, err)
	ctx, parent := x.traces.Tracer("test").Start(t.Context(), "request")
	done := make(chan error, 1)
	call := func(ctx context.Context) {
		ok, err := limiter.TryAcquire(ctx, 1, time.Second)
		if err == nil && !ok {
			err = errors.New("refused")
		}
		done <- err
	}
	go call(ctx)
	require.NoError(t, clock.BlockUntilContext(t.Context(), 1))
	clock.Advance(200 * time.Millisecond)
	require.NoError(t, <-done)
	canceled, cancel := context.WithCancel(ctx)
	go call(canceled)
	require.NoError(t, clock.BlockUntilContext(t.Context(), 1))
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	parent.End()

	spans := x.spans.GetSpans()
	require.Len(t, spans, 3)
	for _, s := range spans[:2] {
		assert.Equal(t, parent.SpanContext().SpanID(), s.Parent.SpanID())
		assert.GreaterOrEqual(t, s.EndTime.Sub(s.StartTime), time.Duration(0))
	}
	assert.Contains(t, spans[0].Attributes, attribute.Float64("tokenbucket.wait", 0.2))
	assert.Equal(t, codes.Error, spans[1].Status.Code)
	assert.Contains(t, spans[1].Attributes, attribute.String("error.type", "canceled"))
}

// Spans have the bucket's own name, whatever metrics have.
func TestSpansHaveNames(t *testing.T) {
	x := newSDK(t)
	observer := x.observe(t, tbotel.WithBuckets(func(string) string { return "all" }), tbotel.WithSpans(tbotel.AllSpans))
	observer.Decision(t.Context(), tokenbucket.Decision{Bucket: "a/1", Permits: 1})
	require.Equal(t, map[string]float64{`tokenbucket_decisions_total{bucket="all",by="store",outcome="refused",shadow="false"}`: 1},
		map[string]float64(x.collect(t).Of("tokenbucket_decisions")))
	require.Contains(t, x.spans.GetSpans()[0].Attributes, attribute.String("tokenbucket.bucket", "a/1"))
}

// Exporters write metrics and spans as in a process.
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
	telemetrytest.Report(observer)
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

// brokenProvider is a provider whose meter creates no counters.
type brokenProvider struct{ noop.MeterProvider }

func (brokenProvider) Meter(string, ...metric.MeterOption) metric.Meter { return brokenMeter{} }

type brokenMeter struct{ noop.Meter }

func (brokenMeter) Int64Counter(string, ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return nil, telemetrytest.ErrOther
}

func TestInvalid(t *testing.T) {
	for want, opt := range map[string]tbotel.Option{
		"meter provider nil":           tbotel.WithMeterProvider(nil),
		"tracer provider nil":          tbotel.WithTracerProvider((*sdktrace.TracerProvider)(nil)),
		"spans 3":                      tbotel.WithSpans(3),
		`attribute ""`:                 tbotel.WithAttributes(attribute.KeyValue{}),
		telemetrytest.ErrOther.Error(): tbotel.WithMeterProvider(brokenProvider{}),
	} {
		_, err := tbotel.New(opt)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, want)
		require.ErrorContains(t, err, want)
	}
	_, err := tbotel.New(tbotel.WithMeterProvider(brokenProvider{}))
	require.ErrorIs(t, err, telemetrytest.ErrOther)
}
