package otel

import (
	"cmp"
	"context"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// Attributes. Those of spans alone are the last two.
const (
	bucketKey  = attribute.Key("tokenbucket.bucket")
	outcomeKey = attribute.Key("tokenbucket.outcome")
	deciderKey = attribute.Key("tokenbucket.decider")
	shadowKey  = attribute.Key("tokenbucket.shadow")
	useKey     = attribute.Key("tokenbucket.lease.use")
	policyKey  = attribute.Key("tokenbucket.policy")
	permitsKey = attribute.Key("tokenbucket.permits")
	waitKey    = attribute.Key("tokenbucket.wait")
)

// spanName is the same for all buckets, as names of spans are grouped by.
const spanName = "tokenbucket.acquire"

type spans struct {
	tracer     trace.Tracer
	which      Spans
	attributes []attribute.KeyValue
}

// decided makes the span when the call is over. One begun before would be made for every call, of which most need none; and
// whoever looks at the trace sees no difference.
func (s *spans) decided(ctx context.Context, d *tokenbucket.Decision) {
	waited := d.Granted && d.Wait > 0 && !d.Shadow
	if s.which == NoSpans || s.which == SpansOfWaits && !waited && d.Err == nil {
		return
	}
	end := time.Now()
	attributes := append(slices.Clip(s.attributes),
		bucketKey.String(d.Bucket), permitsKey.Int(d.Permits), outcomeKey.String(telemetry.OutcomeOf(d).String()),
		deciderKey.String(cmp.Or(d.By, telemetry.Deciders[0])), shadowKey.Bool(d.Shadow), waitKey.Float64(d.Wait.Seconds()))
	if d.Err != nil {
		attributes = append(attributes, errorType(telemetry.KindOf(d.Err)))
	}
	_, span := s.tracer.Start(ctx, spanName, trace.WithTimestamp(end.Add(-d.Elapsed)), trace.WithAttributes(attributes...))
	if d.Err != nil {
		span.SetStatus(codes.Error, d.Err.Error())
	}
	span.End(trace.WithTimestamp(end))
}
