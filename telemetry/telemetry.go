// Package telemetry turns the events that the observers of packages tokenbucket, slidingwindow and semaphore report into metrics. It is for
// authors of adapters to a metrics library; contrib/prometheus and contrib/otel are two.
//
// All metrics stand in one table: name, type, unit, help, labels ([Package.Metrics] returns it). A [Recorder] turns events into measurements
// of these metrics, and owns everything that does not depend on a metrics library: how errors are classified, how many buckets have series
// of their own, and whether the store is up. An adapter creates the [Instrument] that the recorder asks for, and reads the gauges when the
// library collects:
//
//	recorder, err := telemetry.NewRecorder(telemetry.Limiter, telemetry.Prometheus, telemetry.DefaultOptions(), create)
//	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithObserver(recorder.Limiter(nil)))
//
// Whoever needs only the kind of an error, for a log or for other metrics, calls [KindOf].
package telemetry

import (
	"fmt"
	"math"
	"slices"

	"github.com/go-tokenbucket/tokenbucket"
)

// mostBuckets is the largest Options.MaxBuckets.
const mostBuckets = 10_000

// Options bound the series of a recorder. [DefaultOptions] returns the defaults; a zero value is invalid, not a default.
type Options struct {
	// MaxBuckets is how many values LabelBucket has, from 1 to 10,000: the first names get their own, and all further ones share OtherBuckets.
	MaxBuckets int
	// WaitBounds are the upper bounds of the histogram of waits, in seconds: at least one, above 0, finite and ascending.
	WaitBounds []float64
}

// DefaultOptions returns 200 buckets, and 15 bounds of waits from 1 ms to 60 s.
func DefaultOptions() Options {
	return Options{MaxBuckets: 200, WaitBounds: slices.Clone(waitBounds)}
}

// Equal reports whether two observers may share a recorder.
func (o Options) Equal(other Options) bool {
	return o.MaxBuckets == other.MaxBuckets && slices.Equal(o.WaitBounds, other.WaitBounds)
}

// String returns the fields, for messages.
func (o Options) String() string {
	return fmt.Sprintf("max buckets %d and wait bounds %v", o.MaxBuckets, o.WaitBounds)
}

func (o Options) validate() error {
	if o.MaxBuckets < 1 || o.MaxBuckets > mostBuckets {
		return fmt.Errorf("telemetry: %w: max buckets %d: want 1 to %d", tokenbucket.ErrInvalidConfig, o.MaxBuckets, mostBuckets)
	}
	ascending := len(o.WaitBounds) > 0
	for i, s := range o.WaitBounds {
		ascending = ascending && s > 0 && !math.IsInf(s, 1) && (i == 0 || s > o.WaitBounds[i-1])
	}
	if !ascending {
		return fmt.Errorf("telemetry: %w: wait bounds %v: want at least one, above 0, finite and ascending", tokenbucket.ErrInvalidConfig, o.WaitBounds)
	}
	return nil
}
