package otel_test

import (
	"context"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/go-tokenbucket/tokenbucket"
	tbotel "github.com/go-tokenbucket/tokenbucket/contrib/otel"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetrytest"
)

// BenchmarkObserver measures the events with the SDK. Spans of calls that waited or failed are recorded and discarded.
func BenchmarkObserver(b *testing.B) {
	ctx := context.Background()
	granted := tokenbucket.Decision{Bucket: "/ibe/AvailFare", Permits: 1, Granted: true}
	refused := tokenbucket.Decision{Bucket: "/ibe/AvailFare", Permits: 1, By: tokenbucket.BySnapshot}
	waited := tokenbucket.Decision{Bucket: "/ibe/AvailFare", Permits: 1, Granted: true, Wait: 20 * time.Millisecond}
	failed := tokenbucket.Decision{Bucket: "/ibe/AvailFare", Permits: 1, Err: telemetrytest.Wrap(tokenbucket.ErrStoreTimeout)}
	trip := tokenbucket.Trip{Bucket: "/ibe/AvailFare", Requests: 8, Elapsed: 100 * time.Microsecond}

	x := newSDK(b)
	recorded := sdktrace.NewTracerProvider()
	b.Cleanup(func() { _ = recorded.Shutdown(ctx) })
	observer := x.observe(b, tbotel.WithTracerProvider(recorded))
	for _, c := range []struct {
		name  string
		event func()
	}{
		{"granted", func() { observer.Decision(ctx, granted) }},
		{"refused", func() { observer.Decision(ctx, refused) }},
		{"waited", func() { observer.Decision(ctx, waited) }},
		{"failed", func() { observer.Decision(ctx, failed) }},
		{"trip", func() { observer.Trip(trip) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c.event()
			}
		})
		b.Run(c.name+"/parallel", func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					c.event()
				}
			})
		})
	}
}
