package prometheus

import (
	"context"
	"errors"
	"fmt"
	"slices"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// Other is the label value that buckets beyond the bound share.
const Other = telemetry.OtherBuckets

// Option configures an observer. An option with a bad value makes New fail.
type Option func(*options)

type options struct {
	label      func(string) string
	maxBuckets int
	waits      []float64
	err        error
}

func (o *options) fail(field string, value any, want string) {
	if o.err == nil {
		o.err = fmt.Errorf("prometheus: %w: %s %v: want %s", tokenbucket.ErrInvalidConfig, field, value, want)
	}
}

// WithBuckets sets how the name of a bucket becomes the value of the label bucket: many buckets may share one, and ""
// leaves the label out. It is called for every decision, by many goroutines at once, so it must be fast. Default: the name
// itself.
func WithBuckets(label func(name string) string) Option {
	return func(o *options) {
		if label == nil {
			o.fail("buckets", "nil", "a function")
		}
		o.label = label
	}
}

// WithMaxBuckets bounds how many values the label bucket has, from 1 to 10,000: the first n that come have their own, all
// further ones are Other. A value costs about 30 series. Default 200.
func WithMaxBuckets(n int) Option {
	return func(o *options) {
		if n < 1 || n > telemetry.MostBuckets {
			o.fail("max buckets", n, "1 to 10000")
		}
		o.maxBuckets = n
	}
}

// WithWaitBounds sets the upper bounds, in seconds and ascending, of the histogram of waits. Default: 15 bounds from 1 ms
// to 60 s.
func WithWaitBounds(seconds ...float64) Option {
	return func(o *options) {
		ascending := len(seconds) > 0
		for i, s := range seconds {
			ascending = ascending && s > 0 && (i == 0 || s > seconds[i-1])
		}
		if !ascending {
			o.fail("wait bounds", seconds, "at least one, above 0 and ascending")
		}
		o.waits = slices.Clone(seconds)
	}
}

// New registers the collectors and returns an observer that feeds them; one observer may serve any number of limiters.
//
// A second New with the same registerer shares the collectors of the first, [WithBuckets] being its own; it must have the
// same bound and the same wait bounds. Processes with several stores tell them apart by a registerer each:
// prometheus.WrapRegistererWith(prometheus.Labels{"store": "eu"}, registerer).
//
// Errors match tokenbucket.ErrInvalidConfig; what the registerer objected to, a metric of the same name say, is wrapped.
func New(registerer prom.Registerer, opts ...Option) (tokenbucket.Observer, error) {
	o, err := settle(registerer, opts)
	if err != nil {
		return tokenbucket.Observer{}, err
	}
	c, err := register(registerer, newCollector(o.maxBuckets, o.waits))
	if err != nil {
		return tokenbucket.Observer{}, err
	}
	return tokenbucket.Observer{
		Decision: func(_ context.Context, d tokenbucket.Decision) { c.decided(o.label(d.Bucket), &d) },
		Lease:    func(bucket string, permits, used int) { c.leased(o.label(bucket), permits, used) },
		Trip:     c.tripped,
		Health:   c.noticed,
	}, nil
}

// settle is the options of a constructor.
func settle(registerer prom.Registerer, opts []Option) (*options, error) {
	o := &options{label: func(name string) string { return name }, maxBuckets: telemetry.DefaultMaxBuckets, waits: telemetry.Waits}
	if telemetry.IsNil(registerer) {
		o.fail("registerer", "nil", "a registerer")
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

// bounded is a collector, with how many names it tells apart and the bounds of its waits.
type bounded interface {
	prom.Collector
	bound() (maxBuckets int, waits []float64)
}

// register returns the collector, or the one that is registered in its place already.
func register[C bounded](registerer prom.Registerer, c C) (none C, err error) {
	if err = registerer.Register(c); err == nil {
		return c, nil
	}
	var already prom.AlreadyRegisteredError
	if !errors.As(err, &already) {
		return none, fmt.Errorf("prometheus: %w: %w", tokenbucket.ErrInvalidConfig, err)
	}
	before, ok := already.ExistingCollector.(C)
	if !ok {
		return none, fmt.Errorf("prometheus: %w: %T has metrics of these names: %w", tokenbucket.ErrInvalidConfig, already.ExistingCollector, err)
	}
	if !sameBounds(before, c) {
		n, waits := c.bound()
		m, registered := before.bound()
		return none, fmt.Errorf("prometheus: %w: max buckets %d and wait bounds %v: want %d and %v, as registered before",
			tokenbucket.ErrInvalidConfig, n, waits, m, registered)
	}
	return before, nil
}
