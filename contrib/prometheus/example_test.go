package prometheus_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	tbprometheus "github.com/go-tokenbucket/tokenbucket/contrib/prometheus"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetrytest"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// A gateway whose limiters are scraped at /metrics.
func Example() {
	observer, err := tbprometheus.New(prometheus.DefaultRegisterer)
	if err != nil {
		panic(err) // the configuration is wrong, or the names are taken
	}
	store := tokenbucket.NewRedisScriptStore(redis.NewClient(&redis.Options{Addr: "localhost:6379"}))
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store), tokenbucket.WithObserver(observer))
	if err != nil {
		panic(err)
	}
	http.Handle("/metrics", promhttp.Handler())
	http.HandleFunc("/fares", func(w http.ResponseWriter, r *http.Request) {
		if ok, err := limiter.Try(r.Context()); !ok || err != nil {
			http.Error(w, "try again later", http.StatusTooManyRequests)
		}
	})
}

// Three calls to a bucket of one permit, and what a scrape says of those that passed.
func ExampleNew() {
	registry := prometheus.NewRegistry()
	observer, err := tbprometheus.New(registry)
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
	show(registry, `tokenbucket_permits_total{bucket="fares",by="store",outcome="granted"`)
	// Output:
	// tokenbucket_permits_total{bucket="fares",by="store",outcome="granted",shadow="false"} 1
}

// Buckets of many clients, counted by tenant.
func ExampleWithBuckets() {
	registry := prometheus.NewRegistry()
	observer, err := tbprometheus.New(registry, tbprometheus.WithBuckets(func(name string) string {
		tenant, _, _ := strings.Cut(name, "/")
		return tenant
	}))
	if err != nil {
		panic(err)
	}
	for _, name := range []string{"acme/1", "acme/2", "zenith/1"} {
		observer.Decision(context.Background(), tokenbucket.Decision{Bucket: name, Permits: 1, Granted: true})
	}
	show(registry, "tokenbucket_decisions_total{")
	// Output:
	// tokenbucket_decisions_total{bucket="acme",by="store",outcome="granted",shadow="false"} 2
	// tokenbucket_decisions_total{bucket="zenith",by="store",outcome="granted",shadow="false"} 1
}

// Not more than two buckets are told apart: the first two that are used.
func ExampleWithMaxBuckets() {
	registry := prometheus.NewRegistry()
	observer, err := tbprometheus.New(registry, tbprometheus.WithMaxBuckets(2))
	if err != nil {
		panic(err)
	}
	for _, name := range []string{"fares", "hotels", "rooms", "cars", "fares"} {
		observer.Decision(context.Background(), tokenbucket.Decision{Bucket: name, Permits: 1})
	}
	show(registry, "tokenbucket_decisions_total{")
	// Output:
	// tokenbucket_decisions_total{bucket="fares",by="store",outcome="refused",shadow="false"} 2
	// tokenbucket_decisions_total{bucket="hotels",by="store",outcome="refused",shadow="false"} 1
	// tokenbucket_decisions_total{bucket="other",by="store",outcome="refused",shadow="false"} 2
}

// show prints the series that begin with a prefix.
func show(registry *prometheus.Registry, prefix string) {
	families, err := registry.Gather()
	if err != nil {
		panic(err)
	}
	for _, family := range families {
		var text bytes.Buffer
		if _, err := expfmt.MetricFamilyToText(&text, family); err != nil {
			panic(err)
		}
		for line := range strings.Lines(text.String()) {
			if strings.HasPrefix(line, prefix) {
				fmt.Print(strings.ReplaceAll(line, `priority="",`, "")) // Prometheus drops labels without a value
			}
		}
	}
}

// A sliding window whose decisions are scraped.
func ExampleNewSlidingWindow() {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	observer, err := tbprometheus.NewSlidingWindow(prometheus.DefaultRegisterer)
	if err != nil {
		panic(err)
	}
	fares, err := slidingwindow.New("fares", 100, time.Minute, time.Second, slidingwindow.WithRedis(client), slidingwindow.WithObserver(observer))
	if err != nil {
		panic(err)
	}
	http.HandleFunc("/window", func(w http.ResponseWriter, r *http.Request) {
		if ok, err := fares.Allow(r.Context()); !ok || err != nil {
			http.Error(w, "try again later", http.StatusTooManyRequests)
		}
	})
}

// The Go blocks of the README are parts of the examples, so they compile.
func TestReadme(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	source, err := os.ReadFile("example_test.go")
	require.NoError(t, err)
	squeeze := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	blocks := strings.Split(string(readme), "```go\n")[1:]
	require.Len(t, blocks, 2)
	for _, block := range blocks {
		code, _, _ := strings.Cut(block, "```")
		require.Contains(t, squeeze(string(source)), squeeze(code))
	}
}

// The table of the README has every metric of package tokenbucket and no other, and its queries use no other. The second table has every
// metric of the other packages, with the package's name or … before it.
func TestReadmeNamesEveryMetric(t *testing.T) {
	bytes, err := os.ReadFile("README.md")
	require.NoError(t, err)
	readme := string(bytes)
	registry := prometheus.NewPedanticRegistry()
	a := adapterOf(registry)
	telemetrytest.ReportAll(t, a)
	families, err := registry.Gather()
	require.NoError(t, err)
	known := map[string]bool{}
	rows := 0
	for _, f := range families {
		name, kind := f.GetName(), strings.ToLower(f.GetType().String())
		known[name] = true
		if f.GetType() == dto.MetricType_HISTOGRAM {
			known[name+"_bucket"], known[name+"_sum"], known[name+"_count"] = true, true, true
		}
		namespace, rest, _ := strings.Cut(name, "_")
		if namespace == "tokenbucket" {
			rows++
			require.Contains(t, readme, fmt.Sprintf("\n| `%s` | %s |", name, kind))
			continue
		}
		require.True(t, strings.Contains(readme, "`"+name+"`") || strings.Contains(readme, "`…_"+rest+"`"), name)
	}
	require.Equal(t, rows, strings.Count(readme, "\n| `tokenbucket_"))
	for _, name := range regexp.MustCompile(`tokenbucket_\w+`).FindAllString(readme, -1) {
		require.True(t, known[name], name)
	}
}
