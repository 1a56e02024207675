package otel

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.39.0"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// bucket is one value of the attribute tokenbucket.bucket.
type bucket = telemetry.Bucket[answers, leases]

// answers are the attributes of decisions.
type answers struct {
	decision labels
	wait     labels // empty unless they were granted
}

type leases struct{ used, unused labels }

// errorType is the attribute error.type. By the semantic conventions, what has no name of its own is _OTHER.
func errorType(k telemetry.Kind) attribute.KeyValue {
	if k == telemetry.Other {
		return semconv.ErrorTypeOther
	}
	return semconv.ErrorTypeKey.String(k.String())
}

func (m *measures) decided(ctx context.Context, name string, d *tokenbucket.Decision) {
	b := m.buckets.Of(name)
	a := b.Decision(d, func(l telemetry.Labels) answers { return m.answers(b.Name, l) })
	if telemetry.OutcomeOf(d) == telemetry.Granted {
		m.waits.Record(ctx, d.Wait.Seconds(), a.wait.record...)
	}
	m.decisions.Add(ctx, 1, a.decision.add...)
	if telemetry.Counts(d) {
		m.permits.Add(ctx, int64(d.Permits), a.decision.add...)
	}
}

func (m *measures) answers(name string, l telemetry.Labels) (a answers) {
	shadow := shadowKey.Bool(l.Shadow)
	attributes := []attribute.KeyValue{outcomeKey.String(l.Outcome.String()), deciderKey.String(l.Decider), shadow}
	switch l.Outcome {
	case telemetry.Failed:
		attributes = append(attributes, errorType(l.Kind))
	case telemetry.Granted:
		a.wait = m.of(name, shadow)
	}
	a.decision = m.of(name, attributes...)
	return a
}

func (m *measures) leased(name string, permits, spent int) {
	b := m.buckets.Of(name)
	l := b.Lease(func() leases {
		return leases{m.of(b.Name, useKey.String("used")), m.of(b.Name, useKey.String("unused"))}
	})
	used, unused := telemetry.Lease(permits, spent)
	ctx := context.Background()
	m.leases.Add(ctx, int64(used), l.used.add...)
	m.leases.Add(ctx, int64(unused), l.unused.add...)
}

// of is labels, with the bucket's name if it has one.
func (m *measures) of(name string, attributes ...attribute.KeyValue) labels {
	if name != "" {
		attributes = append(attributes, bucketKey.String(name))
	}
	return m.labels(attributes...)
}
