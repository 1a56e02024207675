// Package prometheus makes Prometheus metrics of what limiters do: a tokenbucket.Observer whose collectors are registered
// once and shared by any number of limiters. Beside the client library of the same name, import it as tbprometheus:
//
//	observer, err := tbprometheus.New(prometheus.DefaultRegisterer)
//	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store), tokenbucket.WithObserver(observer))
//
// Times are in seconds. A series appears with the first thing that it counts. Those of the store begin at 0, so that an
// alert sees the first error. The number of buckets that have series of their own is bounded ([WithMaxBuckets]); the rest
// share one label value.
package prometheus
