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

	buckets *telemetry.Series[bucket]
}

// labels are attributes as the instruments want them, made once: making them is most of what counting would cost.
type labels struct {
	add     []metric.AddOption
	record  []metric.RecordOption
	observe []metric.ObserveOption
}

func (m *measures) labels(attributes ...attribute.KeyValue) labels {
	return newLabels(append(slices.Clip(m.attributes), attributes...))
}

func newLabels(attributes []attribute.KeyValue) labels {
	set := metric.WithAttributeSet(attribute.NewSet(attributes...))
	return labels{[]metric.AddOption{set}, []metric.RecordOption{set}, []metric.ObserveOption{set}}
}

func newMeasures(meter metric.Meter, maxBuckets int, attributes []attribute.KeyValue) (*measures, error) {
	m := &measures{attributes: attributes}
	m.plain = m.labels()
	for k := range telemetry.StoreKinds {
		m.failed[k] = m.labels(errorType(k))
	}
	m.buckets = telemetry.NewSeries(maxBuckets, Other, func(name string) *bucket { return &bucket{Name: name} })

	var errs [11]error
	m.decisions, errs[0] = meter.Int64Counter("tokenbucket.decisions", metric.WithUnit("{decision}"),
		metric.WithDescription(telemetry.HelpDecisions))
	m.permits, errs[1] = meter.Int64Counter("tokenbucket.permits", metric.WithUnit("{permit}"),
		metric.WithDescription(telemetry.HelpPermits))
	m.leases, errs[2] = meter.Int64Counter("tokenbucket.lease.permits", metric.WithUnit("{permit}"),
		metric.WithDescription(telemetry.HelpLeases))
	m.waits, errs[3] = meter.Float64Histogram("tokenbucket.wait.duration", metric.WithUnit("s"),
		metric.WithDescription(telemetry.HelpWaits),
		metric.WithExplicitBucketBoundaries(telemetry.Waits...))
	m.trips, errs[4] = meter.Float64Histogram("tokenbucket.store.trip.duration", metric.WithUnit("s"),
		metric.WithDescription(telemetry.HelpTrips),
		metric.WithExplicitBucketBoundaries(telemetry.Trips...))
	m.lockWaits, errs[5] = meter.Float64Histogram("tokenbucket.lock.wait.duration", metric.WithUnit("s"),
		metric.WithDescription(telemetry.HelpLockWaits),
		metric.WithExplicitBucketBoundaries(telemetry.LockWaits...))
	m.requests, errs[6] = meter.Int64Histogram("tokenbucket.batch.requests", metric.WithUnit("{request}"),
		metric.WithDescription(telemetry.HelpRequests),
		metric.WithExplicitBucketBoundaries(telemetry.Requests...))
	m.outages, errs[7] = meter.Int64Counter("tokenbucket.store.outages", metric.WithUnit("{outage}"),
		metric.WithDescription(telemetry.HelpOutages))
	m.away, errs[8] = meter.Float64Counter("tokenbucket.store.away", metric.WithUnit("s"),
		metric.WithDescription(telemetry.HelpAway))
	// What holds until it changes is asked for at every collection: a gauge that is set would fall silent between changes
	// with delta temporality, and be lost before the global provider is set.
	m.up, errs[9] = meter.Int64ObservableGauge("tokenbucket.store.up", metric.WithUnit("{store}"),
		metric.WithDescription(telemetry.HelpUp))
	m.inForce, errs[10] = meter.Int64ObservableGauge("tokenbucket.policy.in_force", metric.WithUnit("{policy}"),
		metric.WithDescription(telemetry.HelpInForce))
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
