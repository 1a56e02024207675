package otel

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.39.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// Scope is the name of the meter and the tracer.
const Scope = "github.com/go-tokenbucket/tokenbucket/contrib/otel"

// Other is the attribute value that buckets beyond the bound share.
const Other = telemetry.OtherBuckets

// Spans is which calls get a span.
type Spans uint8

const (
	// SpansOfWaits: calls that waited for their permits, and calls that failed. In shadow nobody waits.
	SpansOfWaits Spans = iota
	// AllSpans: every call.
	AllSpans
	// NoSpans: none.
	NoSpans
)

// Option configures an observer. An option with a bad value makes New fail.
type Option func(*options)

type options struct {
	meters     metric.MeterProvider
	tracers    trace.TracerProvider
	spans      Spans
	label      func(string) string
	maxBuckets int
	attributes []attribute.KeyValue
	err        error
}

func (o *options) fail(field string, value any, want string) {
	if o.err == nil {
		o.err = fmt.Errorf("otel: %w: %s %v: want %s", tokenbucket.ErrInvalidConfig, field, value, want)
	}
}

// WithMeterProvider sets where the metrics go. Default: the global provider, which may be set later.
func WithMeterProvider(p metric.MeterProvider) Option {
	return func(o *options) {
		if telemetry.IsNil(p) {
			o.fail("meter provider", "nil", "a provider")
		}
		o.meters = p
	}
}

// WithTracerProvider sets where the spans go. Default: the global provider, which may be set later.
func WithTracerProvider(p trace.TracerProvider) Option {
	return func(o *options) {
		if telemetry.IsNil(p) {
			o.fail("tracer provider", "nil", "a provider")
		}
		o.tracers = p
	}
}

// WithSpans sets which calls get a span. Whether it is recorded is for the provider's sampler. Default: SpansOfWaits.
func WithSpans(s Spans) Option {
	return func(o *options) {
		if s > NoSpans {
			o.fail("spans", uint8(s), "SpansOfWaits, AllSpans or NoSpans")
		}
		o.spans = s
	}
}

// WithBuckets sets how the name of a bucket becomes the attribute tokenbucket.bucket of metrics: many buckets may share one,
// and "" leaves the attribute out. Spans have the name itself, which needs no bound there. It is called for every decision,
// by many goroutines at once, so it must be fast. Default: the name.
func WithBuckets(label func(name string) string) Option {
	return func(o *options) {
		if label == nil {
			o.fail("buckets", "nil", "a function")
		}
		o.label = label
	}
}

// WithMaxBuckets bounds how many values the attribute tokenbucket.bucket has in metrics, from 1 to 10,000: the first n that
// come have their own, all further ones are Other. Default 200.
func WithMaxBuckets(n int) Option {
	return func(o *options) {
		if n < 1 || n > telemetry.MostBuckets {
			o.fail("max buckets", n, "1 to 10000")
		}
		o.maxBuckets = n
	}
}

// WithAttributes adds attributes to all metrics and spans: the name of the store, in a process that has several. Default:
// none.
func WithAttributes(attributes ...attribute.KeyValue) Option {
	return func(o *options) {
		for _, a := range attributes {
			if !a.Valid() {
				o.fail("attribute", fmt.Sprintf("%q", a.Key), "a key and a value")
			}
		}
		o.attributes = append(o.attributes, attributes...)
	}
}

// New returns an observer that may serve any number of limiters. Make one for each provider and store: of two with the same
// attributes, the counts add up, but only one is asked whether the store is up.
//
// Errors match tokenbucket.ErrInvalidConfig; what the provider objected to is wrapped.
func New(opts ...Option) (tokenbucket.Observer, error) {
	o, err := settle(opts)
	if err != nil {
		return tokenbucket.Observer{}, err
	}
	m, err := newMeasures(o.meters.Meter(Scope, metric.WithSchemaURL(semconv.SchemaURL)), o.maxBuckets, o.attributes)
	if err != nil {
		return tokenbucket.Observer{}, fmt.Errorf("otel: %w: %w", tokenbucket.ErrInvalidConfig, err)
	}
	s := &spans{
		tracer: o.tracers.Tracer(Scope, trace.WithSchemaURL(semconv.SchemaURL)), which: o.spans, attributes: o.attributes,
	}
	return tokenbucket.Observer{
		Decision: func(ctx context.Context, d tokenbucket.Decision) {
			m.decided(ctx, o.label(d.Bucket), &d)
			s.decided(ctx, &d)
		},
		Lease:  func(bucket string, permits, used int) { m.leased(o.label(bucket), permits, used) },
		Trip:   m.tripped,
		Health: m.noticed,
	}, nil
}

// settle is the options of a constructor.
func settle(opts []Option) (*options, error) {
	o := &options{
		meters: otel.GetMeterProvider(), tracers: otel.GetTracerProvider(),
		label: func(name string) string { return name }, maxBuckets: telemetry.DefaultMaxBuckets,
	}
	for _, opt := range opts {
		if opt == nil {
			o.fail("option", "nil", "no nil options")
			break
		}
		opt(o)
	}
	return o, o.err
}
