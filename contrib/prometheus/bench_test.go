package prometheus_test

import (
	"context"
	"testing"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetrytest"
)

// events returns the frequent events.
func events(observer tokenbucket.Observer) map[string]func() {
	ctx := context.Background()
	granted := tokenbucket.Decision{Bucket: "/ibe/AvailFare", Permits: 1, Granted: true, Wait: 20 * time.Millisecond}
	refused := tokenbucket.Decision{Bucket: "/ibe/AvailFare", Permits: 1, By: tokenbucket.BySnapshot}
	failed := tokenbucket.Decision{Bucket: "/ibe/AvailFare", Permits: 1, Err: telemetrytest.Wrap(tokenbucket.ErrStoreTimeout)}
	trip := tokenbucket.Trip{Bucket: "/ibe/AvailFare", Requests: 8, Elapsed: 100 * time.Microsecond}
	return map[string]func(){
		"granted": func() { observer.Decision(ctx, granted) },
		"refused": func() { observer.Decision(ctx, refused) },
		"failed":  func() { observer.Decision(ctx, failed) },
		"trip":    func() { observer.Trip(trip) },
	}
}

func BenchmarkObserver(b *testing.B) {
	_, observer := observe(b)
	for _, name := range []string{"granted", "refused", "failed", "trip"} {
		event := events(observer)[name]
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				event()
			}
		})
		b.Run(name+"/parallel", func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					event()
				}
			})
		})
	}
}
