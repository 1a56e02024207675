// Package telemetry counts the events that the observers of packages tokenbucket, slidingwindow and semaphore report.
//
// All metrics stand in one table (metrics.go): name, type, unit, help, labels. A Recorder turns events into measurements of these metrics. It
// owns everything that does not depend on a metrics library: how errors are classified, how many buckets have series of their own, and
// whether the store is up. The modules contrib/prometheus and contrib/otel adapt it: they create the instruments that the table describes.
package telemetry

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/go-tokenbucket/tokenbucket"
)

// Bounds of the number of buckets that have series of their own.
const (
	defaultMaxBuckets = 200
	mostBuckets       = 10_000
)

// Options are the options that both adapters have, with their defaults. What they call a bucket is a limiter of package slidingwindow, or a
// semaphore, in the observers of these packages.
type Options struct {
	adapter    string
	label      func(name string) string // nil selects the default, see labelOf
	maxBuckets int
	waits      []float64
	err        error
}

// NewOptions returns the defaults. The adapter's name begins its errors.
func NewOptions(adapter string) Options {
	return Options{adapter: adapter, maxBuckets: defaultMaxBuckets, waits: waitBounds}
}

// Err returns the first error that Fail recorded.
func (o *Options) Err() error { return o.err }

// Fail records that the value of a field is invalid. Only the first error is kept.
func (o *Options) Fail(field string, value any, want string) {
	if o.err == nil {
		o.err = fmt.Errorf("%s: %w: %s %v: want %s", o.adapter, tokenbucket.ErrInvalidConfig, field, value, want)
	}
}

// SetBuckets sets the function that returns the label value for a bucket's name.
func (o *Options) SetBuckets(label func(name string) string) {
	if label == nil {
		o.Fail("buckets", "nil", "a function")
	}
	o.label = label
}

// SetMaxBuckets sets how many buckets have series of their own.
func (o *Options) SetMaxBuckets(n int) {
	if n < 1 || n > mostBuckets {
		o.Fail("max buckets", n, "1 to 10000")
	}
	o.maxBuckets = n
}

// SetWaits sets the upper bounds, in seconds, of the histogram of waits.
func (o *Options) SetWaits(seconds []float64) {
	ascending := len(seconds) > 0
	for i, s := range seconds {
		ascending = ascending && s > 0 && (i == 0 || s > seconds[i-1])
	}
	if !ascending {
		o.Fail("wait bounds", seconds, "at least one, above 0 and ascending")
	}
	o.waits = seconds
}

// SameBounds reports whether two observers may share metrics.
func (o *Options) SameBounds(other *Options) bool {
	return o.maxBuckets == other.maxBuckets && slices.Equal(o.waits, other.waits)
}

// String returns the bounds that SameBounds compares.
func (o *Options) String() string {
	return fmt.Sprintf("max buckets %d and wait bounds %v", o.maxBuckets, o.waits)
}

// labelOf returns the label value of a bucket. row is the name of the registry row that the bucket belongs to, or "".
func (o *Options) labelOf(name, row string) string {
	switch {
	case o.label != nil:
		return o.label(name)
	case row != "":
		return Named(row)
	}
	return Named(name)
}

// IsNil reports whether v is nil or holds a nil pointer.
func IsNil(v any) bool {
	rv := reflect.ValueOf(v)
	return v == nil || rv.Kind() == reflect.Pointer && rv.IsNil()
}
