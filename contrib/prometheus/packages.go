package prometheus

import (
	"context"
	"slices"
	"sync"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// NewSlidingWindow registers the collectors of package slidingwindow, and returns an observer that feeds them; one observer may serve any
// number of limiters. It is like New, whose options it takes: what they call a bucket is a limiter here.
func NewSlidingWindow(registerer prom.Registerer, opts ...Option) (slidingwindow.Observer, error) {
	c, o, err := newCalls(registerer, telemetry.SlidingWindow, opts)
	if err != nil {
		return slidingwindow.Observer{}, err
	}
	return slidingwindow.Observer{
		Decision: func(_ context.Context, d slidingwindow.Decision) {
			call := telemetry.WindowDecision(&d)
			c.decided(o.label(d.Limiter), &call)
		},
		Trip:   func(t slidingwindow.Trip) { c.heard(t.Requests, t.Elapsed.Seconds(), t.Err) },
		Health: func(h slidingwindow.Health) { c.noticed(h.Down, h.After.Seconds()) },
	}, nil
}

// NewSemaphore registers the collectors of package semaphore, and returns an observer that feeds them; one observer may serve any number of
// semaphores. It is like New, whose options it takes: what they call a bucket is a semaphore here.
func NewSemaphore(registerer prom.Registerer, opts ...Option) (semaphore.Observer, error) {
	c, o, err := newCalls(registerer, telemetry.Semaphore, opts)
	if err != nil {
		return semaphore.Observer{}, err
	}
	return semaphore.Observer{
		Decision: func(_ context.Context, d semaphore.Decision) {
			call := telemetry.SemaphoreDecision(&d)
			c.decided(o.label(d.Semaphore), &call)
		},
		Lease: func(u semaphore.LeaseUse) {
			c.held.WithLabelValues(c.names.Of(o.label(u.Semaphore)).Name, telemetry.EndOf(u.Err).String()).Observe(u.Held.Seconds())
		},
		Trip:   func(t semaphore.Trip) { c.heard(t.Requests, t.Elapsed.Seconds(), t.Err) },
		Health: func(h semaphore.Health) { c.noticed(h.Down, h.After.Seconds()) },
	}, nil
}

// calls is all metrics of one of these packages in a registerer, and those of tokenbucket that it shares with them (collector).
type calls struct {
	of         telemetry.Package
	maxBuckets int
	bounds     []float64

	decisions, permits, failures *prom.CounterVec
	waits, held                  *prom.HistogramVec

	trips    [2]prom.Observer // answered, failed
	errors   [telemetry.StoreKinds]prom.Counter
	requests prom.Observer
	up       prom.Gauge
	outages  prom.Counter
	away     prom.Counter

	all []prom.Collector

	health sync.Mutex // an event of Health changes several metrics
	link   telemetry.Link

	names *telemetry.Series[bucket]
}

func newCalls(registerer prom.Registerer, of telemetry.Package, opts []Option) (*calls, *options, error) {
	o, err := settle(registerer, opts)
	if err != nil {
		return nil, nil, err
	}
	c := &calls{of: of, maxBuckets: o.maxBuckets, bounds: o.waits}
	c.make()
	c, err = register(registerer, c)
	return c, o, err
}

func (c *calls) make() {
	by, kinds, waits, help := []string{c.of.Label, "outcome"}, []string{c.of.Label, "kind"}, []string{c.of.Label}, telemetry.HelpCallWaits
	if c.of.By {
		by = append(by, "by")
	}
	if c.of.Shadow {
		by, kinds, waits, help = append(by, "shadow"), append(kinds, "shadow"), append(waits, "shadow"), telemetry.HelpWaits
	}
	c.decisions = c.counters("decisions_total", telemetry.HelpDecisions, by...)
	c.permits = c.counters("permits_total", telemetry.HelpPermits, by...)
	c.failures = c.counters("failures_total", telemetry.HelpFailures, kinds...)
	c.waits = c.histograms("wait_duration_seconds", help, c.bounds, waits...)
	if c.of.Ends {
		c.held = c.histograms("held_duration_seconds", telemetry.HelpHeld, telemetry.Held, c.of.Label, "end")
	}
	trips := c.histograms("store_trip_duration_seconds", telemetry.HelpTrips, telemetry.Trips, "result")
	c.trips = [...]prom.Observer{trips.WithLabelValues("answered"), trips.WithLabelValues("failed")}
	c.requests = c.histograms("batch_requests", telemetry.HelpRequests, telemetry.Requests).WithLabelValues()
	errors := c.counters("store_errors_total", telemetry.HelpErrors, "kind")
	for k := range telemetry.StoreKinds {
		c.errors[k] = errors.WithLabelValues(k.String())
	}
	c.up = c.gauges("store_up", telemetry.HelpUp).WithLabelValues()
	c.up.Set(1)
	c.outages = c.counters("store_outages_total", telemetry.HelpOutages).WithLabelValues()
	c.away = c.counters("store_away_seconds_total", telemetry.HelpAway).WithLabelValues()
	c.names = telemetry.NewSeries(c.maxBuckets, Other, func(name string) *bucket { return &bucket{Name: name} })
}

func (c *calls) counters(name, help string, labels ...string) *prom.CounterVec {
	v := prom.NewCounterVec(prom.CounterOpts{Namespace: c.of.Name, Name: name, Help: help}, labels)
	c.all = append(c.all, v)
	return v
}

func (c *calls) gauges(name, help string, labels ...string) *prom.GaugeVec {
	v := prom.NewGaugeVec(prom.GaugeOpts{Namespace: c.of.Name, Name: name, Help: help}, labels)
	c.all = append(c.all, v)
	return v
}

func (c *calls) histograms(name, help string, bounds []float64, labels ...string) *prom.HistogramVec {
	v := prom.NewHistogramVec(prom.HistogramOpts{Namespace: c.of.Name, Name: name, Help: help, Buckets: bounds}, labels)
	c.all = append(c.all, v)
	return v
}

// Describe sends all descriptions; it is for the registry.
func (c *calls) Describe(to chan<- *prom.Desc) {
	for _, m := range c.all {
		m.Describe(to)
	}
}

// Collect sends all series; it is for the registry.
func (c *calls) Collect(to chan<- prom.Metric) {
	for _, m := range c.all {
		m.Collect(to)
	}
}

func (c *calls) bound() (int, []float64) { return c.maxBuckets, c.bounds }

func (c *calls) tripped(requests int, seconds float64, err error) {
	c.requests.Observe(float64(requests))
	if err == nil {
		c.trips[0].Observe(seconds)
		return
	}
	c.trips[1].Observe(seconds)
	c.errors[telemetry.StoreKindOf(err)].Inc()
}

// heard is tripped, and says what the batch tells of the store.
func (c *calls) heard(requests int, seconds float64, err error) {
	c.tripped(requests, seconds, err)
	c.health.Lock()
	defer c.health.Unlock()
	if begins, ends, away := c.link.Tripped(err); begins || ends {
		c.turned(begins, ends, c.link.Down, away.Seconds())
	}
}

// noticed goes by what was heard last, whichever limiter was told.
func (c *calls) noticed(down bool, away float64) {
	c.health.Lock()
	defer c.health.Unlock()
	begins, ends := c.link.Noticed(down)
	c.turned(begins, ends, down, away)
}

// turned counts an outage that begins or ends.
func (c *calls) turned(begins, ends, down bool, away float64) {
	if begins {
		c.outages.Inc()
	}
	if ends {
		c.away.Add(max(0, away))
	}
	c.up.Set(float64(telemetry.Index(!down)))
}

// sameBounds tells that two collectors have the same bounds.
func sameBounds(a, b bounded) bool {
	n, x := a.bound()
	m, y := b.bound()
	return n == m && slices.Equal(x, y)
}
