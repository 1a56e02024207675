package otel

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.39.0"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// NewSlidingWindow returns an observer of package slidingwindow that may serve any number of limiters. It takes the options of New: what they
// call a bucket is a limiter here, in the attribute slidingwindow.limiter. It makes metrics, and no spans.
func NewSlidingWindow(opts ...Option) (slidingwindow.Observer, error) {
	c, o, err := newCalls(telemetry.SlidingWindow, opts)
	if err != nil {
		return slidingwindow.Observer{}, err
	}
	return slidingwindow.Observer{
		Decision: func(ctx context.Context, d slidingwindow.Decision) {
			call := telemetry.WindowDecision(&d)
			c.decided(ctx, o.label(d.Limiter), &call)
		},
		Trip:   func(t slidingwindow.Trip) { c.tripped(t.Requests, t.Elapsed.Seconds(), t.Err) },
		Health: func(h slidingwindow.Health) { c.noticed(h.Down, h.After.Seconds()) },
	}, nil
}

// NewSemaphore returns an observer of package semaphore that may serve any number of semaphores. It takes the options of New: what they call a
// bucket is a semaphore here, in the attribute semaphore.name. It makes metrics, and no spans.
func NewSemaphore(opts ...Option) (semaphore.Observer, error) {
	c, o, err := newCalls(telemetry.Semaphore, opts)
	if err != nil {
		return semaphore.Observer{}, err
	}
	return semaphore.Observer{
		Decision: func(ctx context.Context, d semaphore.Decision) {
			call := telemetry.SemaphoreDecision(&d)
			c.decided(ctx, o.label(d.Semaphore), &call)
		},
		Lease: func(u semaphore.LeaseUse) {
			l := c.named(c.names.Of(o.label(u.Semaphore)).Name, c.key("end").String(telemetry.EndOf(u.Err).String()))
			c.held.Record(context.Background(), u.Held.Seconds(), l.record...)
		},
		Trip:   func(t semaphore.Trip) { c.tripped(t.Requests, t.Elapsed.Seconds(), t.Err) },
		Health: func(h semaphore.Health) { c.noticed(h.Down, h.After.Seconds()) },
	}, nil
}

// calls is all instruments of one of these packages.
type calls struct {
	of         telemetry.Package
	attributes []attribute.KeyValue // of everything

	decisions, permits metric.Int64Counter
	waits, held, trips metric.Float64Histogram
	requests           metric.Int64Histogram
	outages            metric.Int64Counter
	away               metric.Float64Counter
	plain              labels
	failed             [telemetry.StoreKinds]labels // error.type

	health sync.Mutex
	link   telemetry.Link

	names *telemetry.Series[bucket]
}

func newCalls(of telemetry.Package, opts []Option) (*calls, *options, error) {
	o, err := settle(opts)
	if err != nil {
		return nil, nil, err
	}
	c := &calls{of: of, attributes: o.attributes}
	c.plain = c.labels()
	for k := range telemetry.StoreKinds {
		c.failed[k] = c.labels(errorType(k))
	}
	c.names = telemetry.NewSeries(o.maxBuckets, Other, func(name string) *bucket { return &bucket{Name: name} })
	if err := c.make(o.meters.Meter(Scope, metric.WithSchemaURL(semconv.SchemaURL))); err != nil {
		return nil, nil, fmt.Errorf("otel: %w: %w", tokenbucket.ErrInvalidConfig, err)
	}
	return c, o, nil
}

func (c *calls) make(meter metric.Meter) error {
	var errs [10]error
	name := func(of string) string { return c.of.Name + "." + of }
	seconds := func(of, help string, bounds []float64) (metric.Float64Histogram, error) {
		return meter.Float64Histogram(name(of), metric.WithUnit("s"), metric.WithDescription(help), metric.WithExplicitBucketBoundaries(bounds...))
	}
	c.decisions, errs[0] = meter.Int64Counter(name("decisions"), metric.WithUnit("{decision}"), metric.WithDescription(telemetry.HelpDecisions))
	c.permits, errs[1] = meter.Int64Counter(name("permits"), metric.WithUnit("{permit}"), metric.WithDescription(telemetry.HelpPermits))
	c.waits, errs[2] = seconds("wait.duration", telemetry.HelpCallWaits, telemetry.Waits)
	c.trips, errs[3] = seconds("store.trip.duration", telemetry.HelpTrips, telemetry.Trips)
	c.requests, errs[4] = meter.Int64Histogram(name("batch.requests"), metric.WithUnit("{request}"),
		metric.WithDescription(telemetry.HelpRequests), metric.WithExplicitBucketBoundaries(telemetry.Requests...))
	c.outages, errs[5] = meter.Int64Counter(name("store.outages"), metric.WithUnit("{outage}"), metric.WithDescription(telemetry.HelpOutages))
	c.away, errs[6] = meter.Float64Counter(name("store.away"), metric.WithUnit("s"), metric.WithDescription(telemetry.HelpAway))
	if c.of.Ends {
		c.held, errs[7] = seconds("held.duration", telemetry.HelpHeld, telemetry.Held)
	}
	up, err := meter.Int64ObservableGauge(name("store.up"), metric.WithUnit("{store}"), metric.WithDescription(telemetry.HelpUp))
	errs[8] = err
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	_, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		c.health.Lock()
		defer c.health.Unlock()
		o.ObserveInt64(up, int64(telemetry.Index(!c.link.Down)), c.plain.observe...)
		return nil
	}, up)
	return err
}

// key is an attribute of the package.
func (c *calls) key(name string) attribute.Key { return attribute.Key(c.of.Name + "." + name) }

func (c *calls) labels(attributes ...attribute.KeyValue) labels {
	return newLabels(append(slices.Clip(c.attributes), attributes...))
}

// named is labels, with the limiter's name if it has one.
func (c *calls) named(name string, attributes ...attribute.KeyValue) labels {
	if name != "" {
		key := c.key(c.of.Label)
		if c.of.Label == c.of.Name {
			key = c.key("name")
		}
		attributes = append(attributes, key.String(name))
	}
	return c.labels(attributes...)
}

func (c *calls) decided(ctx context.Context, name string, d *tokenbucket.Decision) {
	b := c.names.Of(name)
	a := b.Decision(d, func(l telemetry.Labels) answers { return c.answers(b.Name, l) })
	if telemetry.OutcomeOf(d) == telemetry.Granted && d.Wait > 0 {
		c.waits.Record(ctx, d.Wait.Seconds(), a.wait.record...)
	}
	c.decisions.Add(ctx, 1, a.decision.add...)
	if telemetry.Counts(d) {
		c.permits.Add(ctx, int64(d.Permits), a.decision.add...)
	}
}

func (c *calls) answers(name string, l telemetry.Labels) (a answers) {
	attributes := []attribute.KeyValue{c.key("outcome").String(l.Outcome.String())}
	if c.of.By {
		attributes = append(attributes, c.key("decider").String(l.Decider))
	}
	switch l.Outcome {
	case telemetry.Failed:
		attributes = append(attributes, errorType(l.Kind))
	case telemetry.Granted:
		a.wait = c.named(name)
	}
	a.decision = c.named(name, attributes...)
	return a
}

func (c *calls) tripped(requests int, seconds float64, err error) {
	ctx := context.Background() // many calls share it
	c.requests.Record(ctx, int64(requests), c.plain.record...)
	l := c.plain
	if err != nil {
		l = c.failed[telemetry.StoreKindOf(err)]
	}
	c.trips.Record(ctx, seconds, l.record...)
	c.health.Lock()
	defer c.health.Unlock()
	begins, ends, away := c.link.Tripped(err)
	c.turned(begins, ends, away.Seconds())
}

// noticed goes by what was heard last, whichever limiter was told.
func (c *calls) noticed(down bool, away float64) {
	c.health.Lock()
	defer c.health.Unlock()
	begins, ends := c.link.Noticed(down)
	c.turned(begins, ends, away)
}

// turned counts an outage that begins or ends.
func (c *calls) turned(begins, ends bool, away float64) {
	ctx := context.Background()
	if begins {
		c.outages.Add(ctx, 1, c.plain.add...)
	}
	if ends {
		c.away.Add(ctx, max(0, away), c.plain.add...)
	}
}
