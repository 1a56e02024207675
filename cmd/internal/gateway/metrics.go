package gateway

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	tbprometheus "github.com/go-tokenbucket/tokenbucket/contrib/prometheus"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// mostSeries is how many limits have series of their own.
const mostSeries = 1000

// metrics counts calls, for /metrics and /stats.
type metrics struct {
	calls    *prom.Registry // metrics of calls
	all      prom.Gatherers // calls and the state of the gateway
	observer tokenbucket.Observer
	limits   atomic.Pointer[registry.Registry]
	meter    *fleet.Meter // nil unless the gateway publishes

	admissions *prom.CounterVec // bucket, by, result
	bypassed   *prom.CounterVec // bucket, by, result
	refusals   *prom.CounterVec // bucket, by
	penalties  *prom.CounterVec // bucket
	upstreams  *prom.CounterVec // upstream, kind
	repeats    *prom.CounterVec // bucket, by, result

	labels     sync.Map // set of the values of the label bucket
	labelCount atomic.Int64

	mu        sync.Mutex
	heldUntil map[string]time.Time // by label: when the last penalty that this gateway received ends; guarded by mu
}

func newMetrics() (*metrics, error) {
	m := &metrics{calls: prom.NewRegistry(), heldUntil: map[string]time.Time{}}
	var err error
	if m.observer, err = tbprometheus.New(m.calls, tbprometheus.WithBuckets(m.label), tbprometheus.WithMaxBuckets(mostSeries)); err != nil {
		return nil, err
	}
	counter := func(name, help string, labels ...string) *prom.CounterVec {
		v := prom.NewCounterVec(prom.CounterOpts{Namespace: "tokenbucket", Subsystem: "gateway", Name: name, Help: help}, labels)
		m.calls.MustRegister(v)
		return v
	}
	m.admissions = counter("admissions_total", "Calls, each counted once, by what decided about them.", "bucket", "by", "result")
	m.admissions.WithLabelValues(tbprometheus.Other, gate.ByUnknown.String(), passed) // so that charts have a series before the first call
	m.bypassed = counter("bypassed_total", "Calls that passed or were refused without a bucket.", "bucket", "by", "result")
	m.refusals = counter("refusals_total", "Calls that were refused, by what refused them.", "bucket", "by")
	m.penalties = counter("penalties_total", "Responses of upstreams whose Retry-After penalized a bucket.", "bucket")
	m.upstreams = counter("upstream_errors_total", "Calls that got no response from their upstream.", "upstream", "kind")
	m.repeats = counter("repeats_total", "Further tries of calls whose connection to the upstream ended without a response, by what decided about them.", "bucket", "by", "result")
	m.repeats.WithLabelValues(tbprometheus.Other, gate.ByUnknown.String(), passed)
	return m, nil
}

// add adds the metrics of the gateway's state.
func (m *metrics) add(a *admin) {
	others := prom.NewRegistry()
	others.MustRegister(newCollector(a), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.all = prom.Gatherers{prom.GathererFunc(m.gatherCalls), others}
}

// gatherCalls returns the metrics of calls. The penalties of rows begin with 0: of the first half of the label's values, so that tables of many
// rows without calls leave values for those with calls.
func (m *metrics) gatherCalls() ([]*dto.MetricFamily, error) {
	if limits := m.limits.Load(); limits != nil {
		for _, l := range limits.Limits() {
			if !l.Disabled && m.labelCount.Load() < mostSeries/2 {
				m.penalties.WithLabelValues(m.label(l.Name))
			}
		}
	}
	return m.calls.Gather()
}

// begin makes the series of the errors of upstreams, with 0.
func (m *metrics) begin(upstreams routes) {
	for i := range upstreams {
		for _, kind := range upstreamKinds {
			m.upstreams.WithLabelValues(upstreams[i].target.String(), kind)
		}
	}
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.all, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
}

// match returns the row that decides about a name.
func (m *metrics) match(name string) (row string, exact, ok bool) {
	limits := m.limits.Load()
	if limits == nil {
		return "", false, false
	}
	return limits.Match(name)
}

// limited reports whether a penalty applies to calls of a key: to their bucket, or to their row if it has no rate.
func (m *metrics) limited(key string) bool {
	limits := m.limits.Load()
	if limits == nil {
		return false
	}
	by, _ := limits.Decider(key)
	return by == gate.ByLimit
}

// label returns the name of the row that decides about a name or a bucket, or tbprometheus.Other if there is none. So clients cannot create
// series.
func (m *metrics) label(name string) string {
	name, _, ok := m.match(name)
	if !ok {
		return tbprometheus.Other
	}
	name = telemetry.Named(name)
	if _, ok := m.labels.Load(name); ok {
		return name
	}
	if m.labelCount.Load() >= mostSeries {
		return tbprometheus.Other
	}
	if _, ok := m.labels.LoadOrStore(strings.Clone(name), true); !ok {
		m.labelCount.Add(1)
	}
	return name
}

// hasSeries reports whether a row has series of its own.
func (m *metrics) hasSeries(row string) bool { return m.label(row) == telemetry.Named(row) }

func (m *metrics) bypass(name string, by gate.Decider, pass bool) {
	m.bypassed.WithLabelValues(m.label(name), by.String(), resultOf(pass)).Inc()
}

// Values of the label result.
const passed, refusedCall, failedCall, cancelledCall = "passed", "refused", "failed", "cancelled"

func resultOf(pass bool) string {
	if pass {
		return passed
	}
	return refusedCall
}

// admitted counts a call by its result. by is what decided about it, or "none" for a call that failed.
func (m *metrics) admitted(name, by, result string) {
	label := m.label(name)
	m.admissions.WithLabelValues(label, by, result).Inc()
	if result == refusedCall {
		m.refusals.WithLabelValues(label, by).Inc()
	}
}

// repeated counts a further try of a call, with the arguments of admitted.
func (m *metrics) repeated(name, by, result string) {
	m.repeats.WithLabelValues(m.label(name), by, result).Inc()
}

func (m *metrics) penalized(key string, until time.Time) {
	label := m.label(key)
	m.penalties.WithLabelValues(label).Inc()
	if m.meter != nil {
		m.meter.Penalized(key, until)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if until.After(m.heldUntil[label]) {
		m.heldUntil[label] = until
	}
}

// view is the state of a bucket. For a row without a rate only held is set.
type view struct {
	rate, maxPermits float64
	stored           float64       // permits
	wait             time.Duration // how long a call may wait, by the row
	held             time.Time     // when the penalty ends
}

// views reads the buckets in use, by row name. Of buckets that cannot be read it returns only penalties that this gateway has received.
func (m *metrics) views(ctx context.Context) map[string]view {
	limits := m.limits.Load()
	if limits == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var mu sync.Mutex
	all := map[string]view{}
	var asking sync.WaitGroup
	for name, l := range limits.Limiters() {
		if !m.hasSeries(name) {
			continue
		}
		asking.Go(func() { // concurrent reads share round trips
			b, err := l.State(ctx)
			if err != nil {
				return
			}
			v := view{rate: b.Rate, maxPermits: b.MaxPermits, stored: b.StoredPermits}
			if left := b.HeldUntilMicros - b.SeenMicros; b.HeldUntilMicros > 0 && left > 0 { // by the store's clock
				v.held = time.Now().Add(time.Duration(left) * time.Microsecond)
			}
			mu.Lock()
			defer mu.Unlock()
			all[name] = v
		})
	}
	asking.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range limits.Limits() {
		v, read := all[l.Name] // takes precedence over heldUntil: the bucket may have been reset
		if read {
			v.wait = l.MaxWait
			all[l.Name] = v
		}
		until, penalized := m.heldUntil[telemetry.Named(l.Name)]
		switch held := limits.Held(l.Name); {
		case l.Disabled || l.PerKey: // no penalty applies, or to one key only
		case l.NoRate && held > 0 && m.hasSeries(l.Name):
			all[l.Name] = view{held: time.Now().Add(held)}
		case !l.NoRate && penalized && !read:
			all[l.Name] = view{held: until}
		}
	}
	return all
}
