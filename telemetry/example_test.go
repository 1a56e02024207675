package telemetry_test

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// An adapter to a metrics library that prints each measurement.
func ExampleNewRecorder() {
	create := func(m telemetry.Metric) (telemetry.Instrument, error) {
		return func(values []string) telemetry.Series {
			values = slices.DeleteFunc(values, func(value string) bool { return value == "" }) // the series lacks such a label
			series := m.Name + " " + strings.Join(values, ",")
			return func(_ context.Context, value float64) { fmt.Println(series, value) }
		}, nil
	}
	recorder, err := telemetry.NewRecorder(telemetry.Limiter, telemetry.Prometheus, telemetry.DefaultOptions(), create)
	if err != nil {
		panic(err) // an option is invalid, or create failed
	}
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithObserver(recorder.Limiter(nil)),
		tokenbucket.WithClock(clockwork.NewFakeClock()))
	if err != nil {
		panic(err)
	}
	for range 2 {
		if _, err := limiter.TryAcquire(context.Background(), 1, 0); err != nil {
			panic(err)
		}
	}
	recorder.Gauges(func(gauge *telemetry.Metric, labels []string, value int) {
		if gauge.Name == "tokenbucket_store_up" {
			fmt.Println(gauge.Name, value)
		}
	})
	// Output:
	// tokenbucket_decisions_total fares,granted,store,false 1
	// tokenbucket_permits_total fares,granted,store,false 1
	// tokenbucket_wait_duration_seconds fares,false 0
	// tokenbucket_decisions_total fares,refused,store,false 1
	// tokenbucket_permits_total fares,refused,store,false 1
	// tokenbucket_store_up 1
}

// The table of the metrics that semaphores have in Prometheus.
func ExamplePackage_Metrics() {
	for _, m := range telemetry.Semaphore.Metrics(telemetry.Prometheus) {
		fmt.Printf("%-9s %s {%s}\n", m.Type, m.Name, strings.Join(m.LabelNames, ","))
	}
	// Output:
	// counter   semaphore_decisions_total {semaphore,outcome}
	// counter   semaphore_permits_total {semaphore,outcome}
	// counter   semaphore_failures_total {semaphore,kind}
	// histogram semaphore_wait_duration_seconds {semaphore}
	// histogram semaphore_held_duration_seconds {semaphore,end}
	// histogram semaphore_store_trip_duration_seconds {result}
	// counter   semaphore_store_errors_total {kind}
	// histogram semaphore_batch_requests {}
	// gauge     semaphore_store_up {}
	// counter   semaphore_store_outages_total {}
	// counter   semaphore_store_away_seconds_total {}
}
