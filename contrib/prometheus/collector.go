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

	series *telemetry.Series[series]
}

func newCollector(maxBuckets int, bounds []float64) *collector {
	c := &collector{maxBuckets: maxBuckets, bounds: bounds}
	c.decisions = c.counters("decisions_total", "Calls that were answered.", "bucket", "outcome", "by", "shadow")
	c.permits = c.counters("permits_total", "Permits that answered calls asked for; those of invalid calls are left out.",
		"bucket", "outcome", "by", "shadow")
	c.failures = c.counters("failures_total", "Calls that ended with an error.", "bucket", "kind", "shadow")
	c.waits = c.histograms("wait_duration_seconds", "What granted calls waited for their permits; with shadow, would have waited.",
		bounds, "bucket", "shadow")
	c.leases = c.counters("lease_permits_total", "Permits of blocks that have ended.", "bucket", "use")

	trips := c.histograms("store_trip_duration_seconds", "From sending a batch to the store until its answer, or until it was given up.",
		[]float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}, "result")
	c.trips = [...]prom.Observer{trips.WithLabelValues("answered"), trips.WithLabelValues("failed")}
	c.requests = c.histograms("batch_requests", "Requests that shared a batch.",
		[]float64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}).WithLabelValues().(prom.Histogram)
	c.lockWaits = c.histograms("lock_wait_duration_seconds", "Waits for a bucket's lock, of batches that found it held.",
		[]float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1}).WithLabelValues().(prom.Histogram)
	errors := c.counters("store_errors_total", "Batches that ended with an error of the store.", "kind")
	for k := range telemetry.StoreKinds {
		c.errors[k] = errors.WithLabelValues(k.String())
	}
	c.up = c.gauges("store_up", "1 while the store answers, as far as this process has noticed, 0 while it is away.").WithLabelValues()
	c.up.Set(1)
	c.outages = c.counters("store_outages_total", "Times that the store was noticed to be away.").WithLabelValues()
	c.away = c.counters("store_away_seconds_total", "How long the store was away, counted when it is back.").WithLabelValues()
	c.inForce = c.gauges("policy_in_force", "1 for each failure policy that answers calls while the store is away.", "policy")
	for _, p := range telemetry.Policies {
		c.inForce.WithLabelValues(p)
	}

	c.series = telemetry.NewSeries(maxBuckets, Other, func(label string) *series { return &series{c: c, label: label} })
	return c
}

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
