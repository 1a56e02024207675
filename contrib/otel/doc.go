// Package otel tells OpenTelemetry what limiters do: metrics, and a span for each call that waited or failed. Beside
// OpenTelemetry's own package of the same name, import it as tbotel:
//
//	observer, err := tbotel.New()
//	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store), tokenbucket.WithObserver(observer))
//
// Names and units follow the semantic conventions: seconds, attributes under tokenbucket., error.type for what went wrong.
// The number of buckets that have metrics of their own is bounded ([WithMaxBuckets]); the rest share one attribute value.
package otel
