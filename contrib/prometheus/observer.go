package prometheus

import (
	"fmt"
	"reflect"
	"slices"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// Other is the label value that buckets beyond the bound share.
const Other = telemetry.OtherBuckets

// Option configures an observer. An invalid value makes the constructor fail.
type Option func(*options)

type options struct {
	telemetry.Options
	label telemetry.LabelFunc
	err   error // the first invalid value
}

// fail records that a value is invalid. Only the first error is kept.
func (o *options) fail(format string, values ...any) {
	if o.err == nil {
		o.err = fmt.Errorf("prometheus: %w: %s", tokenbucket.ErrInvalidConfig, fmt.Sprintf(format, values...))
	}
}

// WithBuckets sets the function that returns the value of the label bucket for the name of a bucket. Several buckets may share a value; ""
// leaves the label out. The function is called for every decision, concurrently, so it must be fast.
//
// Default: the name itself, or for a registry's buckets of single keys (registry.Limit.PerKey) the name of their row, so that callers cannot
// create series. A function that returns the name gives each key series of its own. By default, a bucket whose name is Other is in quotes.
func WithBuckets(label func(name string) string) Option {
	return func(o *options) {
		if label == nil {
			o.fail("buckets nil: want a function")
		}
		o.label = label
	}
}

// WithMaxBuckets bounds how many values the label bucket has, from 1 to 10,000: the first n get their own, all further ones become Other. A
// value costs about 36 series. Default 200.
func WithMaxBuckets(n int) Option {
	return func(o *options) { o.MaxBuckets = n }
}

// WithWaitBounds sets the upper bounds of the histogram of waits, in seconds and ascending. Default: 15 bounds from 1 ms to 60 s.
func WithWaitBounds(seconds ...float64) Option {
	return func(o *options) { o.WaitBounds = slices.Clone(seconds) }
}

// New registers the collector of package tokenbucket's metrics and returns an observer that feeds it. One observer may serve
// any number of limiters.
//
// A second New with the same registerer shares the collector of the first. It may have [WithBuckets] of its own, but must
// have the same bound and the same wait bounds. In a process with several stores, use a registerer for each of them:
// prometheus.WrapRegistererWith(prometheus.Labels{"store": "eu"}, registerer).
//
// Errors match tokenbucket.ErrInvalidConfig. They wrap the registerer's error, for instance about a metric of the same name.
func New(registerer prom.Registerer, opts ...Option) (tokenbucket.Observer, error) {
	c, o, err := observe(registerer, telemetry.Limiter, opts)
	if err != nil {
		return tokenbucket.Observer{}, err
	}
	return c.Limiter(o.label), nil
}

// NewSlidingWindow is New for package slidingwindow. What the options call a bucket is a limiter here.
func NewSlidingWindow(registerer prom.Registerer, opts ...Option) (slidingwindow.Observer, error) {
	c, o, err := observe(registerer, telemetry.SlidingWindow, opts)
	if err != nil {
		return slidingwindow.Observer{}, err
	}
	return c.SlidingWindow(o.label), nil
}

// NewSemaphore is New for package semaphore. What the options call a bucket is a semaphore here.
func NewSemaphore(registerer prom.Registerer, opts ...Option) (semaphore.Observer, error) {
	c, o, err := observe(registerer, telemetry.Semaphore, opts)
	if err != nil {
		return semaphore.Observer{}, err
	}
	return c.Semaphore(o.label), nil
}

// observe returns the registered collector of a package's events, and the options of the new observer.
func observe(registerer prom.Registerer, p telemetry.Package, opts []Option) (*collector, *options, error) {
	o := &options{Options: telemetry.DefaultOptions()}
	if v := reflect.ValueOf(registerer); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		o.fail("registerer nil: want a registerer")
	}
	for _, opt := range opts {
		if opt == nil {
			o.fail("option nil: want no nil options")
			break
		}
		opt(o)
	}
	if o.err != nil {
		return nil, nil, o.err
	}
	c, err := register(registerer, p, o.Options)
	return c, o, err
}
