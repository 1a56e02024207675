package otel

import (
	"context"
	"errors"
	"slices"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// measures is all instruments. What belongs to one bucket is in series.go.
type measures struct {
	attributes []attribute.KeyValue // of everything

	decisions, permits, leases metric.Int64Counter
	waits                      metric.Float64Histogram

	// Of the store, not of the bucket: batches of many buckets travel together, and a store is slow or away for all.
	trips, lockWaits metric.Float64Histogram
	requests         metric.Int64Histogram
	outages          metric.Int64Counter
	away             metric.Float64Counter
	up, inForce      metric.Int64ObservableGauge
	plain            labels                       // no further attributes
	failed           [telemetry.StoreKinds]labels // error.type

	health sync.Mutex
	store  telemetry.Store

	series *telemetry.Series[series]
}

// labels are attributes as the instruments want them, made once: making them is most of what counting would cost.
type labels struct {
	add     []metric.AddOption
	record  []metric.RecordOption
	observe []metric.ObserveOption
}

func (m *measures) labels(attributes ...attribute.KeyValue) labels {
	set := metric.WithAttributeSet(attribute.NewSet(append(slices.Clip(m.attributes), attributes...)...))
	return labels{[]metric.AddOption{set}, []metric.RecordOption{set}, []metric.ObserveOption{set}}
}

func newMeasures(meter metric.Meter, maxBuckets int, attributes []attribute.KeyValue) (*measures, error) {
	m := &measures{attributes: attributes}
	m.plain = m.labels()
	for k := range telemetry.StoreKinds {
		m.failed[k] = m.labels(errorType(k))
	}
	m.series = telemetry.NewSeries(maxBuckets, Other, func(name string) *series { return &series{m: m, name: name} })

	var errs [11]error
	m.decisions, errs[0] = meter.Int64Counter("tokenbucket.decisions", metric.WithUnit("{decision}"),
		metric.WithDescription("Calls that were answered."))
	m.permits, errs[1] = meter.Int64Counter("tokenbucket.permits", metric.WithUnit("{permit}"),
		metric.WithDescription("Permits that answered calls asked for; those of invalid calls are left out."))
	m.leases, errs[2] = meter.Int64Counter("tokenbucket.lease.permits", metric.WithUnit("{permit}"),
		metric.WithDescription("Permits of blocks that have ended."))
	m.waits, errs[3] = meter.Float64Histogram("tokenbucket.wait.duration", metric.WithUnit("s"),
		metric.WithDescription("What granted calls waited for their permits; with shadow, would have waited."),
		metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60))
	m.trips, errs[4] = meter.Float64Histogram("tokenbucket.store.trip.duration", metric.WithUnit("s"),
		metric.WithDescription("From sending a batch to the store until its answer, or until it was given up."),
		metric.WithExplicitBucketBoundaries(.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5))
	m.lockWaits, errs[5] = meter.Float64Histogram("tokenbucket.lock.wait.duration", metric.WithUnit("s"),
		metric.WithDescription("Waits for a bucket's lock, of batches that found it held."),
		metric.WithExplicitBucketBoundaries(.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1))
	m.requests, errs[6] = meter.Int64Histogram("tokenbucket.batch.requests", metric.WithUnit("{request}"),
		metric.WithDescription("Requests that shared a batch."),
		metric.WithExplicitBucketBoundaries(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024))
	m.outages, errs[7] = meter.Int64Counter("tokenbucket.store.outages", metric.WithUnit("{outage}"),
		metric.WithDescription("Times that the store was noticed to be away."))
	m.away, errs[8] = meter.Float64Counter("tokenbucket.store.away", metric.WithUnit("s"),
		metric.WithDescription("How long the store was away, counted when it is back."))
	// What holds until it changes is asked for at every collection: a gauge that is set would fall silent between changes
	// with delta temporality, and be lost before the global provider is set.
	m.up, errs[9] = meter.Int64ObservableGauge("tokenbucket.store.up", metric.WithUnit("{store}"),
		metric.WithDescription("1 while the store answers, as far as this process has noticed, 0 while it is away."))
	m.inForce, errs[10] = meter.Int64ObservableGauge("tokenbucket.policy.in_force", metric.WithUnit("{policy}"),
		metric.WithDescription("1 for each failure policy that answers calls while the store is away."))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	var perPolicy [len(telemetry.Policies)]labels
	for i, p := range telemetry.Policies {
		perPolicy[i] = m.labels(policyKey.String(p))
	}
	_, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		m.health.Lock()
		defer m.health.Unlock()
		o.ObserveInt64(m.up, int64(telemetry.Index(!m.store.Away)), m.plain.observe...)
		for i := range telemetry.Policies {
			o.ObserveInt64(m.inForce, int64(telemetry.Index(m.store.InForce[i])), perPolicy[i].observe...)
		}
		return nil
	}, m.up, m.inForce)
	return m, err
}

func (m *measures) tripped(t tokenbucket.Trip) {
	ctx := context.Background() // many calls share it
	m.requests.Record(ctx, int64(t.Requests), m.plain.record...)
	if t.LockWait > 0 { // the zeros would be all that the script store has to tell
		m.lockWaits.Record(ctx, t.LockWait.Seconds(), m.plain.record...)
	}
	l := m.plain
	if t.Err != nil {
		l = m.failed[telemetry.StoreKindOf(t.Err)]
	}
	m.trips.Record(ctx, t.Elapsed.Seconds(), l.record...)
}

func (m *measures) noticed(h tokenbucket.Health) {
	m.health.Lock()
	defer m.health.Unlock()
	ctx := context.Background()
	begins, ends := m.store.Noticed(h)
	if begins {
		m.outages.Add(ctx, 1, m.plain.add...)
	}
	if ends {
		m.away.Add(ctx, max(0, h.After.Seconds()), m.plain.add...)
	}
}
