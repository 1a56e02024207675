// Package otel exports what limiters do to OpenTelemetry: metrics, and a span for each call that waited or failed. Next to OpenTelemetry's
// own package of the same name, import it as tbotel:
//
//	observer, err := tbotel.New()
//	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store), tokenbucket.WithObserver(observer))
//
// Names and units follow the semantic conventions: seconds, attributes in the namespace tokenbucket., error.type for errors. The number of
// buckets that have metrics of their own is bounded ([WithMaxBuckets]); all other buckets share one attribute value.
package otel
