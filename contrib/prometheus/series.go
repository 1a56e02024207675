package prometheus

import (
	"strconv"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// bucket is one value of the label bucket.
type bucket = telemetry.Bucket[answers, leases]

// answers count decisions with the same labels.
type answers struct {
	calls, permits prom.Counter
	failures       prom.Counter  // nil unless they failed
	waits          prom.Observer // nil unless they were granted
}

type leases struct{ used, unused prom.Counter }

func (c *collector) decided(name string, d *tokenbucket.Decision) {
	b := c.buckets.Of(name)
	a := b.Decision(d, func(l telemetry.Labels) answers { return c.answers(b.Name, l) })
	a.calls.Inc()
	if telemetry.Counts(d) {
		a.permits.Add(float64(d.Permits))
	}
	if a.failures != nil {
		a.failures.Inc()
	}
	if a.waits != nil {
		a.waits.Observe(d.Wait.Seconds())
	}
}

// answers looks the counters up. The vectors return the same one to whoever looks it up.
func (c *collector) answers(name string, l telemetry.Labels) answers {
	shadow := strconv.FormatBool(l.Shadow)
	labels := []string{name, l.Outcome.String(), l.Decider, shadow}
	a := answers{calls: c.decisions.WithLabelValues(labels...), permits: c.permits.WithLabelValues(labels...)}
	switch l.Outcome {
	case telemetry.Failed:
		a.failures = c.failures.WithLabelValues(name, l.Kind.String(), shadow)
	case telemetry.Granted:
		a.waits = c.waits.WithLabelValues(name, shadow)
	}
	return a
}

func (c *collector) leased(name string, permits, spent int) {
	b := c.buckets.Of(name)
	l := b.Lease(func() leases {
		return leases{c.leases.WithLabelValues(b.Name, "used"), c.leases.WithLabelValues(b.Name, "unused")}
	})
	used, unused := telemetry.Lease(permits, spent)
	l.used.Add(float64(used))
	l.unused.Add(float64(unused))
}
