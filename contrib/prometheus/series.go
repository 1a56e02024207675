package prometheus

import (
	"strconv"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// bucket is one value of the label bucket, limiter or semaphore.
type bucket = telemetry.Bucket[answers, leases]

// answers count decisions with the same labels.
type answers struct {
	calls, permits prom.Counter
	failures       prom.Counter  // nil unless they failed
	waits          prom.Observer // nil unless they were granted
}

type leases struct{ used, unused prom.Counter }

func (c *calls) decided(name string, d *tokenbucket.Decision) {
	b := c.names.Of(name)
	a := b.Decision(d, func(l telemetry.Labels) answers { return c.answers(b.Name, l) })
	a.calls.Inc()
	if telemetry.Counts(d) {
		a.permits.Add(float64(d.Permits))
	}
	if a.failures != nil {
		a.failures.Inc()
	}
	if a.waits != nil && (c.of.Shadow || d.Wait > 0) {
		a.waits.Observe(d.Wait.Seconds())
	}
}

// answers looks the counters up. The vectors return the same one to whoever looks it up.
func (c *calls) answers(name string, l telemetry.Labels) answers {
	labels := []string{name, l.Outcome.String()}
	if c.of.By {
		labels = append(labels, l.Decider)
	}
	var shadow []string
	if c.of.Shadow {
		shadow = []string{strconv.FormatBool(l.Shadow)}
	}
	labels = append(labels, shadow...)
	a := answers{calls: c.decisions.WithLabelValues(labels...), permits: c.permits.WithLabelValues(labels...)}
	switch l.Outcome {
	case telemetry.Failed:
		a.failures = c.failures.WithLabelValues(append([]string{name, l.Kind.String()}, shadow...)...)
	case telemetry.Granted:
		a.waits = c.waits.WithLabelValues(append([]string{name}, shadow...)...)
	}
	return a
}
