package prometheus

import (
	"context"
	"errors"
	"fmt"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// collector holds all metrics of one package in a registerer.
type collector struct {
	*telemetry.Recorder
	options telemetry.Options // of the observer that registered it
	vectors []prom.Collector
	gauges  map[string]*prom.Desc // by name; their values are collected from the recorder
}

func newCollector(p telemetry.Package, o telemetry.Options) (*collector, error) {
	c := &collector{options: o, gauges: map[string]*prom.Desc{}}
	r, err := telemetry.NewRecorder(p, telemetry.Prometheus, o, c.create)
	if err != nil {
		return nil, fmt.Errorf("prometheus: %w", err)
	}
	c.Recorder = r
	return c, nil
}

// create makes the vector of a metric, or the description of a gauge.
func (c *collector) create(m telemetry.Metric) (telemetry.Instrument, error) {
	switch m.Type {
	case telemetry.Counter:
		v := prom.NewCounterVec(prom.CounterOpts{Name: m.Name, Help: m.Help}, m.LabelNames)
		c.vectors = append(c.vectors, v)
		return func(values []string) telemetry.Series {
			counter := v.WithLabelValues(values...)
			return func(_ context.Context, value float64) { counter.Add(value) }
		}, nil
	case telemetry.Histogram:
		v := prom.NewHistogramVec(prom.HistogramOpts{Name: m.Name, Help: m.Help, Buckets: m.Bounds}, m.LabelNames)
		c.vectors = append(c.vectors, v)
		return func(values []string) telemetry.Series {
			histogram := v.WithLabelValues(values...)
			return func(_ context.Context, value float64) { histogram.Observe(value) }
		}, nil
	}
	c.gauges[m.Name] = prom.NewDesc(m.Name, m.Help, m.LabelNames, nil)
	return nil, nil
}

// Describe sends the descriptions of all metrics to the registry.
func (c *collector) Describe(to chan<- *prom.Desc) {
	for _, v := range c.vectors {
		v.Describe(to)
	}
	for _, d := range c.gauges {
		to <- d
	}
}

// Collect sends all series to the registry.
func (c *collector) Collect(to chan<- prom.Metric) {
	for _, v := range c.vectors {
		v.Collect(to)
	}
	c.Gauges(func(m *telemetry.Metric, labels []string, value int) {
		to <- prom.MustNewConstMetric(c.gauges[m.Name], prom.GaugeValue, float64(value), labels...)
	})
}

// register returns a collector of a package's events that is registered: the one that an earlier call registered, if its bounds are the same.
func register(registerer prom.Registerer, p telemetry.Package, o telemetry.Options) (*collector, error) {
	c, err := newCollector(p, o)
	if err != nil {
		return nil, err
	}
	err = registerer.Register(c)
	if err == nil {
		return c, nil
	}
	var already prom.AlreadyRegisteredError
	if !errors.As(err, &already) {
		return nil, fmt.Errorf("prometheus: %w: %w", tokenbucket.ErrInvalidConfig, err)
	}
	before, ok := already.ExistingCollector.(*collector)
	if !ok {
		return nil, fmt.Errorf("prometheus: %w: %T has metrics of these names: %w", tokenbucket.ErrInvalidConfig, already.ExistingCollector, err)
	}
	if !before.options.Equal(o) {
		return nil, fmt.Errorf("prometheus: %w: %v: want %v, as registered before", tokenbucket.ErrInvalidConfig, o, before.options)
	}
	return before, nil
}
