package prometheus

import (
	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// collector is all metrics of package tokenbucket in a registerer: those of calls, and what only buckets have.
type collector struct {
	calls
	leases    *prom.CounterVec // bucket, use
	lockWaits prom.Observer
	inForce   *prom.GaugeVec // policy
	store     telemetry.Store
}

func newCollector(maxBuckets int, bounds []float64) *collector {
	c := &collector{calls: calls{of: telemetry.Limiter, maxBuckets: maxBuckets, bounds: bounds}}
	c.make()
	c.leases = c.counters("lease_permits_total", telemetry.HelpLeases, "bucket", "use")
	c.lockWaits = c.histograms("lock_wait_duration_seconds", telemetry.HelpLockWaits, telemetry.LockWaits).WithLabelValues()
	c.inForce = c.gauges("policy_in_force", telemetry.HelpInForce, "policy")
	for _, p := range telemetry.Policies {
		c.inForce.WithLabelValues(p)
	}
	return c
}

func (c *collector) leased(name string, permits, spent int) {
	b := c.names.Of(name)
	l := b.Lease(func() leases {
		return leases{c.leases.WithLabelValues(b.Name, "used"), c.leases.WithLabelValues(b.Name, "unused")}
	})
	used, unused := telemetry.Lease(permits, spent)
	l.used.Add(float64(used))
	l.unused.Add(float64(unused))
}

func (c *collector) tripped(t tokenbucket.Trip) {
	if t.LockWait > 0 { // the zeros would be all that the script store has to tell
		c.lockWaits.Observe(t.LockWait.Seconds())
	}
	c.calls.tripped(t.Requests, t.Elapsed.Seconds(), t.Err)
}

func (c *collector) noticed(h tokenbucket.Health) {
	c.health.Lock()
	defer c.health.Unlock()
	begins, ends := c.store.Noticed(h)
	c.turned(begins, ends, c.store.Away, h.After.Seconds())
	for i, p := range telemetry.Policies {
		c.inForce.WithLabelValues(p).Set(float64(telemetry.Index(c.store.InForce[i])))
	}
}
