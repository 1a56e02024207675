package prometheus

import (
	"sync"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// collector is all metrics of a registerer. What belongs to one bucket is in series.go.
type collector struct {
	maxBuckets int
	bounds     []float64

	decisions, permits *prom.CounterVec   // bucket, outcome, by, shadow
	failures           *prom.CounterVec   // bucket, kind, shadow
	waits              *prom.HistogramVec // bucket, shadow
	leases             *prom.CounterVec   // bucket, use

	// Of the store, not of the bucket: batches of many buckets travel together, and a store is slow or away for all.
	trips     [2]prom.Observer // answered, failed
	errors    [telemetry.StoreKinds]prom.Counter
	requests  prom.Histogram
	lockWaits prom.Histogram
	up        prom.Gauge
	outages   prom.Counter
	away      prom.Counter
	inForce   *prom.GaugeVec // policy

	all []prom.Collector

	health sync.Mutex // an event of Health changes several metrics
	store  telemetry.Store

	buckets *telemetry.Series[bucket]
}

func newCollector(maxBuckets int, bounds []float64) *collector {
	c := &collector{maxBuckets: maxBuckets, bounds: bounds}
	c.decisions = c.counters("decisions_total", telemetry.HelpDecisions, "bucket", "outcome", "by", "shadow")
	c.permits = c.counters("permits_total", telemetry.HelpPermits,
		"bucket", "outcome", "by", "shadow")
	c.failures = c.counters("failures_total", "Calls that ended with an error.", "bucket", "kind", "shadow")
	c.waits = c.histograms("wait_duration_seconds", telemetry.HelpWaits,
		bounds, "bucket", "shadow")
	c.leases = c.counters("lease_permits_total", telemetry.HelpLeases, "bucket", "use")

	trips := c.histograms("store_trip_duration_seconds", telemetry.HelpTrips,
		telemetry.Trips, "result")
	c.trips = [...]prom.Observer{trips.WithLabelValues("answered"), trips.WithLabelValues("failed")}
	c.requests = c.histograms("batch_requests", telemetry.HelpRequests,
		telemetry.Requests).WithLabelValues().(prom.Histogram)
	c.lockWaits = c.histograms("lock_wait_duration_seconds", telemetry.HelpLockWaits,
		telemetry.LockWaits).WithLabelValues().(prom.Histogram)
	errors := c.counters("store_errors_total", "Batches that ended with an error of the store.", "kind")
	for k := range telemetry.StoreKinds {
		c.errors[k] = errors.WithLabelValues(k.String())
	}
	c.up = c.gauges("store_up", telemetry.HelpUp).WithLabelValues()
	c.up.Set(1)
	c.outages = c.counters("store_outages_total", telemetry.HelpOutages).WithLabelValues()
	c.away = c.counters("store_away_seconds_total", telemetry.HelpAway).WithLabelValues()
	c.inForce = c.gauges("policy_in_force", telemetry.HelpInForce, "policy")
	for _, p := range telemetry.Policies {
		c.inForce.WithLabelValues(p)
	}

	c.buckets = telemetry.NewSeries(maxBuckets, Other, func(name string) *bucket { return &bucket{Name: name} })
	return c
}

func (c *collector) bound() (int, []float64) { return c.maxBuckets, c.bounds }

func (c *collector) counters(name, help string, labels ...string) *prom.CounterVec {
	v := prom.NewCounterVec(prom.CounterOpts{Namespace: "tokenbucket", Name: name, Help: help}, labels)
	c.all = append(c.all, v)
	return v
}

func (c *collector) gauges(name, help string, labels ...string) *prom.GaugeVec {
	v := prom.NewGaugeVec(prom.GaugeOpts{Namespace: "tokenbucket", Name: name, Help: help}, labels)
	c.all = append(c.all, v)
	return v
}

func (c *collector) histograms(name, help string, bounds []float64, labels ...string) *prom.HistogramVec {
	v := prom.NewHistogramVec(prom.HistogramOpts{Namespace: "tokenbucket", Name: name, Help: help, Buckets: bounds}, labels)
	c.all = append(c.all, v)
	return v
}

// Describe sends all descriptions; it is for the registry.
func (c *collector) Describe(to chan<- *prom.Desc) {
	for _, m := range c.all {
		m.Describe(to)
	}
}

// Collect sends all series; it is for the registry.
func (c *collector) Collect(to chan<- prom.Metric) {
	for _, m := range c.all {
		m.Collect(to)
	}
}

func (c *collector) tripped(t tokenbucket.Trip) {
	c.requests.Observe(float64(t.Requests))
	if t.LockWait > 0 { // the zeros would be all that the script store has to tell
		c.lockWaits.Observe(t.LockWait.Seconds())
	}
	if t.Err == nil {
		c.trips[0].Observe(t.Elapsed.Seconds())
		return
	}
	c.trips[1].Observe(t.Elapsed.Seconds())
	c.errors[telemetry.StoreKindOf(t.Err)].Inc()
}

func (c *collector) noticed(h tokenbucket.Health) {
	c.health.Lock()
	defer c.health.Unlock()
	begins, ends := c.store.Noticed(h)
	if begins {
		c.outages.Inc()
	}
	if ends {
		c.away.Add(max(0, h.After.Seconds()))
	}
	c.up.Set(float64(telemetry.Index(!c.store.Away)))
	for i, p := range telemetry.Policies {
		c.inForce.WithLabelValues(p).Set(float64(telemetry.Index(c.store.InForce[i])))
	}
}
