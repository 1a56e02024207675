package otel

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.39.0"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// instruments creates the instruments of one package's metrics.
type instruments struct {
	meter      metric.Meter
	attributes []attribute.KeyValue // of all measurements
	gauges     map[string]metric.Int64ObservableGauge
}

// newRecorder returns a recorder of a package's events.
func newRecorder(p telemetry.Package, o *options) (*telemetry.Recorder, error) {
	in := &instruments{
		meter:      o.meters.Meter(Scope, metric.WithSchemaURL(semconv.SchemaURL)),
		attributes: o.attributes,
		gauges:     map[string]metric.Int64ObservableGauge{},
	}
	r, err := telemetry.NewRecorder(p, telemetry.OpenTelemetry, o.Options, in.create)
	if err == nil {
		err = in.observeGauges(r)
	}
	switch {
	case errors.Is(err, tokenbucket.ErrInvalidConfig):
		return nil, fmt.Errorf("otel: %w", err)
	case err != nil:
		return nil, fmt.Errorf("otel: %w: %w", tokenbucket.ErrInvalidConfig, err)
	}
	return r, nil
}

// create creates the instrument of a metric. Its series make their options once: making options costs more than counting.
func (in *instruments) create(m telemetry.Metric) (telemetry.Instrument, error) {
	unit, help, bounds := metric.WithUnit(m.Unit), metric.WithDescription(m.Help), metric.WithExplicitBucketBoundaries(m.Bounds...)
	switch {
	case m.Type == telemetry.Gauge:
		g, err := in.meter.Int64ObservableGauge(m.Name, unit, help)
		in.gauges[m.Name] = g
		return nil, err
	case m.Type == telemetry.Counter && m.Whole():
		c, err := in.meter.Int64Counter(m.Name, unit, help)
		return func(values []string) telemetry.Series {
			options := []metric.AddOption{in.set(&m, values)}
			return func(ctx context.Context, value float64) { c.Add(ctx, int64(value), options...) }
		}, err
	case m.Type == telemetry.Counter:
		c, err := in.meter.Float64Counter(m.Name, unit, help)
		return func(values []string) telemetry.Series {
			options := []metric.AddOption{in.set(&m, values)}
			return func(ctx context.Context, value float64) { c.Add(ctx, value, options...) }
		}, err
	case m.Whole():
		h, err := in.meter.Int64Histogram(m.Name, unit, help, bounds)
		return func(values []string) telemetry.Series {
			options := []metric.RecordOption{in.set(&m, values)}
			return func(ctx context.Context, value float64) { h.Record(ctx, int64(value), options...) }
		}, err
	default:
		h, err := in.meter.Float64Histogram(m.Name, unit, help, bounds)
		return func(values []string) telemetry.Series {
			options := []metric.RecordOption{in.set(&m, values)}
			return func(ctx context.Context, value float64) { h.Record(ctx, value, options...) }
		}, err
	}
}

// observeGauges reports the recorder's gauges at every collection.
func (in *instruments) observeGauges(r *telemetry.Recorder) error {
	var gauges []metric.Observable
	for _, g := range in.gauges {
		gauges = append(gauges, g)
	}
	_, err := in.meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		r.Gauges(func(m *telemetry.Metric, labels []string, value int) {
			o.ObserveInt64(in.gauges[m.Name], int64(value), in.set(m, labels))
		})
		return nil
	}, gauges...)
	return err
}

// set returns the attributes of a measurement. Those with an empty value are left out.
func (in *instruments) set(m *telemetry.Metric, values []string) metric.MeasurementOption {
	attributes := slices.Clip(in.attributes)
	for i, value := range values {
		key := attribute.Key(m.LabelNames[i])
		switch {
		case value == "":
		case m.Labels[i] == telemetry.LabelShadow:
			attributes = append(attributes, key.Bool(value == "true"))
		default:
			attributes = append(attributes, key.String(value))
		}
	}
	return metric.WithAttributeSet(attribute.NewSet(attributes...))
}
