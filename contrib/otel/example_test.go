package otel_test

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/stdout/stdoutmetric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/go-tokenbucket/tokenbucket"
	tbotel "github.com/go-tokenbucket/tokenbucket/contrib/otel"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetrytest"
)

// A gateway whose metrics are exported every minute, here to its standard output, and whose spans join the caller's traces.
func Example() {
	exporter, err := stdoutmetric.New() // or another of OpenTelemetry's
	if err != nil {
		panic(err)
	}
	meters := sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewPeriodicReader(exporter)))
	defer meters.Shutdown(context.Background())
	otel.SetMeterProvider(meters)

	observer, err := tbotel.New() // of the global providers
	if err != nil {
		panic(err) // the configuration is wrong; the message names the field
	}
	store := tokenbucket.NewRedisScriptStore(redis.NewClient(&redis.Options{Addr: "localhost:6379"}))
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store), tokenbucket.WithObserver(observer))
	if err != nil {
		panic(err)
	}
	ok, err := limiter.Try(context.Background())
	fmt.Println(ok, err)
}

// Three calls to a bucket of one permit, and what a reader collects.
func ExampleNew() {
	reader := sdkmetric.NewManualReader()
	observer, err := tbotel.New(tbotel.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
	if err != nil {
		panic(err)
	}
	limiter, err := tokenbucket.NewSmoothBursty("fares", 0.001, tokenbucket.WithObserver(observer))
	if err != nil {
		panic(err)
	}
	for range 3 {
		_, _ = limiter.Try(context.Background())
	}

	var collected metricdata.ResourceMetrics
	if err := reader.Collect(context.Background(), &collected); err != nil {
		panic(err)
	}
	calls := map[string]int64{}
	for _, scope := range collected.ScopeMetrics {
		for _, m := range scope.Metrics {
			if sum, ok := m.Data.(metricdata.Sum[int64]); ok && m.Name == "tokenbucket.decisions" {
				for _, p := range sum.DataPoints {
					outcome, _ := p.Attributes.Value("tokenbucket.outcome")
					calls[outcome.AsString()] += p.Value
				}
			}
		}
	}
	fmt.Println(calls)
	// Output: map[granted:1 refused:2]
}

// A call that failed has a span that says why.
func ExampleWithTracerProvider() {
	exporter := tracetest.NewInMemoryExporter()
	traces := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter))
	defer traces.Shutdown(context.Background())
	observer, err := tbotel.New(tbotel.WithTracerProvider(traces))
	if err != nil {
		panic(err)
	}
	observer.Decision(context.Background(), tokenbucket.Decision{
		Bucket: "fares", Permits: 1, Err: tokenbucket.ErrStoreTimeout, Elapsed: time.Second,
	})
	for _, s := range exporter.GetSpans() {
		fmt.Println(s.Name, s.EndTime.Sub(s.StartTime), s.Status.Code, s.Status.Description)
		for _, a := range s.Attributes {
			fmt.Println(a.Key, "=", a.Value.Emit())
		}
	}
	// Output:
	// tokenbucket.acquire 1s Error tokenbucket: store timeout
	// tokenbucket.bucket = fares
	// tokenbucket.permits = 1
	// tokenbucket.outcome = failed
	// tokenbucket.decider = store
	// tokenbucket.shadow = false
	// tokenbucket.wait = 0
	// error.type = timeout
}

// The Go block of the README is the example, so it compiles.
func TestReadme(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	source, err := os.ReadFile("example_test.go")
	require.NoError(t, err)
	squeeze := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	blocks := strings.Split(string(readme), "```go\n")[1:]
	require.Len(t, blocks, 1)
	code, _, _ := strings.Cut(blocks[0], "```")
	require.Contains(t, squeeze(string(source)), squeeze(code))
}

// The table of the README has every metric of package tokenbucket and no other.
func TestReadmeNamesEveryMetric(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	x := newSDK(t)
	telemetrytest.Report(x.observe(t))
	metrics := x.metrics(t)
	for _, m := range metrics {
		row := regexp.MustCompile("(?m)^\\| `" + regexp.QuoteMeta(m.Name) + "` \\| [a-z]+ \\| `" + regexp.QuoteMeta(m.Unit) + "` \\|")
		require.Regexp(t, row, string(readme))
	}
	require.Equal(t, len(metrics), strings.Count(string(readme), "\n| `tokenbucket."))
}
