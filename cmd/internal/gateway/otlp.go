package gateway

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"time"

	"go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	semconv "go.opentelemetry.io/otel/semconv/v1.39.0"
)

const wantOTLP = "http://host:4318 or https://host, without user, query or fragment: headers are in OTEL_EXPORTER_OTLP_HEADERS"

func (c *config) checkOTLP() error {
	if c.otlp == "" {
		return nil
	}
	u, err := url.Parse(c.otlp)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return c.bad("otlp", fmt.Sprintf("%q", hideURL(c.otlp)), wantOTLP)
	}
	return nil
}

// export starts to send the metrics of /metrics to a collector, at every --otlp-interval. stop sends them a last time.
func (m *metrics) export(c *config, log *slog.Logger) (stop func(), err error) {
	exporter, err := otlpmetrichttp.New(context.Background(), otlpmetrichttp.WithEndpointURL(c.otlp))
	if err != nil {
		return nil, fmt.Errorf("--otlp %s: %w", c.otlp, err)
	}
	var failures logLimiter
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		if n, ok := failures.note(""); ok {
			log.Warn("metrics could not be exported", "to", c.otlp, "times", n, "error", err)
		}
	}))
	host, _ := os.Hostname() // on an error the instance is identified by its port alone
	instance := resource.NewWithAttributes(semconv.SchemaURL, semconv.ServiceName("tokenbucket-gateway"), semconv.ServiceInstanceID(host+c.listen))
	provider := metric.NewMeterProvider(metric.WithResource(instance), metric.WithReader(metric.NewPeriodicReader(exporter,
		metric.WithInterval(c.otlpInterval), metric.WithProducer(prometheus.NewMetricProducer(prometheus.WithGatherer(m.all))))))
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_ = provider.Shutdown(ctx) // its errors go to the handler
	}, nil
}
