package otel

import (
	"context"
	"fmt"
	"reflect"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// Scope is the name of the meter and the tracer.
const Scope = "github.com/go-tokenbucket/tokenbucket/contrib/otel"

// Other is the attribute value that buckets beyond the bound share.
const Other = telemetry.OtherBuckets

// Spans selects the calls that have a span.
type Spans uint8

const (
	// SpansOfWaits selects calls that waited for their permits and calls that failed. In shadow, no call waits.
	SpansOfWaits Spans = iota
	// AllSpans selects every call.
	AllSpans
	// NoSpans selects no call.
	NoSpans
)

// Option configures an observer. An invalid value makes the constructor fail.
type Option func(*options)

type options struct {
	telemetry.Options
	label      telemetry.LabelFunc
	meters     metric.MeterProvider
	tracers    trace.TracerProvider
	spans      Spans
	attributes []attribute.KeyValue
	err        error // the first invalid value
}

// fail records that a value is invalid. Only the first error is kept.
func (o *options) fail(format string, values ...any) {
	if o.err == nil {
		o.err = fmt.Errorf("otel: %w: %s", tokenbucket.ErrInvalidConfig, fmt.Sprintf(format, values...))
	}
}

// isNil reports whether v is nil or holds a nil pointer.
func isNil(v any) bool {
	rv := reflect.ValueOf(v)
	return v == nil || rv.Kind() == reflect.Pointer && rv.IsNil()
}

// WithMeterProvider sets the provider of the metrics. Default: the global provider, which may be set later.
func WithMeterProvider(p metric.MeterProvider) Option {
	return func(o *options) {
		if isNil(p) {
			o.fail("meter provider nil: want a provider")
		}
		o.meters = p
	}
}

// WithTracerProvider sets the provider of the spans. Default: the global provider, which may be set later.
func WithTracerProvider(p trace.TracerProvider) Option {
	return func(o *options) {
		if isNil(p) {
			o.fail("tracer provider nil: want a provider")
		}
		o.tracers = p
	}
}

// WithSpans sets which calls have a span. The provider's sampler decides whether it is recorded. Default: SpansOfWaits.
func WithSpans(s Spans) Option {
	return func(o *options) {
		if s > NoSpans {
			o.fail("spans %d: want SpansOfWaits, AllSpans or NoSpans", uint8(s))
		}
		o.spans = s
	}
}

// WithBuckets sets the function that returns the attribute tokenbucket.bucket of metrics for the name of a bucket. Several buckets may share
// a value; "" leaves the attribute out. Spans have the name itself, which needs no bound there. The function is called for every decision,
// concurrently, so it must be fast.
//
// Default: the name itself, or for a registry's buckets of single keys (registry.Limit.PerKey) the name of their row, so that callers cannot
// create series. A function that returns the name gives each key metrics of its own. By default, a bucket whose name is Other is in quotes.
func WithBuckets(label func(name string) string) Option {
	return func(o *options) {
		if label == nil {
			o.fail("buckets nil: want a function")
		}
		o.label = label
	}
}

// WithMaxBuckets bounds how many values the attribute tokenbucket.bucket has in metrics, from 1 to 10,000: the first n get their own, all
// further ones become Other. Default 200.
func WithMaxBuckets(n int) Option {
	return func(o *options) { o.MaxBuckets = n }
}

// WithAttributes adds attributes to all metrics and spans, such as the name of the store in a process that has several. Default: none.
func WithAttributes(attributes ...attribute.KeyValue) Option {
	return func(o *options) {
		for _, a := range attributes {
			if !a.Valid() {
				o.fail("attribute %q: want a key and a value", a.Key)
			}
		}
		o.attributes = append(o.attributes, attributes...)
	}
}

// New returns an observer that may serve any number of limiters. Create one for each provider and store: if two have the same attributes,
// their counts add up, but only one of them reports whether the store is up.
//
// Errors match tokenbucket.ErrInvalidConfig. They wrap the provider's error.
func New(opts ...Option) (tokenbucket.Observer, error) {
	o, r, err := record(telemetry.Limiter, opts)
	if err != nil {
		return tokenbucket.Observer{}, err
	}
	observer, s := r.Limiter(o.label), newSpans(o)
	count := observer.Decision
	observer.Decision = func(ctx context.Context, d tokenbucket.Decision) {
		count(ctx, d)
		s.record(ctx, &d)
	}
	return observer, nil
}

// NewSlidingWindow is New for package slidingwindow. What the options call a bucket is a limiter here, in the attribute
// slidingwindow.limiter. There are no spans.
func NewSlidingWindow(opts ...Option) (slidingwindow.Observer, error) {
	o, r, err := record(telemetry.SlidingWindow, opts)
	if err != nil {
		return slidingwindow.Observer{}, err
	}
	return r.SlidingWindow(o.label), nil
}

// NewSemaphore is New for package semaphore. What the options call a bucket is a semaphore here, in the attribute semaphore.name. There are
// no spans.
func NewSemaphore(opts ...Option) (semaphore.Observer, error) {
	o, r, err := record(telemetry.Semaphore, opts)
	if err != nil {
		return semaphore.Observer{}, err
	}
	return r.Semaphore(o.label), nil
}

// record applies the options and returns a recorder of a package's events.
func record(p telemetry.Package, opts []Option) (*options, *telemetry.Recorder, error) {
	o := &options{Options: telemetry.DefaultOptions(), meters: otel.GetMeterProvider(), tracers: otel.GetTracerProvider()}
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
	r, err := newRecorder(p, o)
	return o, r, err
}
