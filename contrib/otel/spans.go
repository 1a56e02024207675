package otel

import (
	"context"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.39.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// spanName is the same for all buckets, because backends group spans by name.
const spanName = "tokenbucket.acquire"

// Attributes that only spans have.
const (
	permitsKey = attribute.Key("tokenbucket.permits")
	waitKey    = attribute.Key("tokenbucket.wait")
)

// Attributes that metrics have too.
var (
	bucketKey  = metricKey(telemetry.LabelBucket)
	outcomeKey = metricKey(telemetry.LabelOutcome)
	deciderKey = metricKey(telemetry.LabelDecider)
	shadowKey  = metricKey(telemetry.LabelShadow)

	priorityKey = metricKey(telemetry.LabelPriority)
)

func metricKey(l telemetry.Label) attribute.Key {
	return attribute.Key(telemetry.Limiter.LabelName(telemetry.OpenTelemetry, l))
}

// spans creates the spans of decisions.
type spans struct {
	tracer     trace.Tracer
	which      Spans
	attributes []attribute.KeyValue // of all spans
}

func newSpans(o *options) *spans {
	return &spans{o.tracers.Tracer(Scope, trace.WithSchemaURL(semconv.SchemaURL)), o.spans, o.attributes}
}

// record creates the span of a decision. It runs when the call is over, because most calls need no span, and a span that starts in the past
// looks the same in a trace.
func (s *spans) record(ctx context.Context, d *tokenbucket.Decision) {
	waited := d.Granted && d.Wait > 0 && !d.Shadow
	if s.which == NoSpans || s.which == SpansOfWaits && !waited && d.Err == nil {
		return
	}
	end, labels := time.Now(), telemetry.LabelsOf(d)
	attributes := append(slices.Clip(s.attributes),
		bucketKey.String(d.Bucket), permitsKey.Int(d.Permits), outcomeKey.String(labels.Outcome.String()),
		deciderKey.String(labels.Decider.String()), shadowKey.Bool(d.Shadow), waitKey.Float64(d.Wait.Seconds()))
	if d.Priority != tokenbucket.Normal {
		attributes = append(attributes, priorityKey.String(labels.Priority.String()))
	}
	if d.Err != nil {
		attributes = append(attributes, semconv.ErrorTypeKey.String(labels.Kind.ErrorType()))
	}
	_, span := s.tracer.Start(ctx, spanName, trace.WithTimestamp(end.Add(-d.Elapsed)), trace.WithAttributes(attributes...))
	if d.Err != nil {
		span.SetStatus(codes.Error, d.Err.Error())
	}
	span.End(trace.WithTimestamp(end))
}
