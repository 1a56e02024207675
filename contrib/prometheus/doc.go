// Package prometheus exports what limiters do as Prometheus metrics: it makes a tokenbucket.Observer whose collector is registered once and
// shared by any number of limiters. Next to the client library of the same name, import it as tbprometheus:
//
//	observer, err := tbprometheus.New(prometheus.DefaultRegisterer)
//	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store), tokenbucket.WithObserver(observer))
//
// Times are in seconds. A series appears with the first event that it counts. The store's series exist from the start, so that an alert
// notices the first error. The number of buckets that have series of their own is bounded ([WithMaxBuckets]); all other buckets share one
// label value.
package prometheus
