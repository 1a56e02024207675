package otel

import (
	"context"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.39.0"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// series are the attributes of one value of tokenbucket.bucket, each set made when it is first needed.
type series struct {
	m    *measures
	name string

	decisions [telemetry.Failed][telemetry.Deciders][2]atomic.Pointer[labels]
	failures  [telemetry.Kinds][telemetry.Deciders][2]atomic.Pointer[labels]
	waits     [2]atomic.Pointer[labels]
	leases    [2]atomic.Pointer[labels]
}

// errorType is the attribute error.type. By the semantic conventions, what has no name of its own is _OTHER.
func errorType(k telemetry.Kind) attribute.KeyValue {
	if k == telemetry.Other {
		return semconv.ErrorTypeOther
	}
	return semconv.ErrorTypeKey.String(k.String())
}

func (s *series) decided(ctx context.Context, d *tokenbucket.Decision) {
	outcome := telemetry.OutcomeOf(d)
	if outcome == telemetry.Granted {
		s.m.waits.Record(ctx, d.Wait.Seconds(), s.wait(d.Shadow).record...)
	}
	l := s.decision(outcome, d)
	s.m.decisions.Add(ctx, 1, l.add...)
	if telemetry.Counts(d) {
		s.m.permits.Add(ctx, int64(d.Permits), l.add...)
	}
}

func (s *series) leased(u tokenbucket.LeaseUse) {
	used, unused := telemetry.Lease(u)
	ctx := context.Background()
	s.m.leases.Add(ctx, int64(used), s.lease(0, "used").add...)
	s.m.leases.Add(ctx, int64(unused), s.lease(1, "unused").add...)
}

func (s *series) labels(attributes ...attribute.KeyValue) labels {
	if s.name != "" {
		attributes = append(attributes, bucketKey.String(s.name))
	}
	return s.m.labels(attributes...)
}

func (s *series) decision(outcome telemetry.Outcome, d *tokenbucket.Decision) *labels {
	by, shadow := telemetry.Decider(d), telemetry.Index(d.Shadow)
	attributes := func() []attribute.KeyValue {
		return []attribute.KeyValue{outcomeKey.String(outcome.String()), deciderKey.String(d.By.String()), shadowKey.Bool(d.Shadow)}
	}
	if outcome == telemetry.Failed {
		k := telemetry.KindOf(d.Err)
		return telemetry.Once(&s.failures[k][by][shadow], func() labels { return s.labels(append(attributes(), errorType(k))...) })
	}
	return telemetry.Once(&s.decisions[outcome][by][shadow], func() labels { return s.labels(attributes()...) })
}

func (s *series) wait(shadow bool) *labels {
	return telemetry.Once(&s.waits[telemetry.Index(shadow)], func() labels { return s.labels(shadowKey.Bool(shadow)) })
}

func (s *series) lease(i int, use string) *labels {
	return telemetry.Once(&s.leases[i], func() labels { return s.labels(useKey.String(use)) })
}
