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

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	tbprometheus "github.com/go-tokenbucket/tokenbucket/contrib/prometheus"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// mostSeries is how many limits have series of their own.
const mostSeries = 1000

// metrics are what /metrics and /stats tell of calls.
type metrics struct {
	calls    *prom.Registry // what calls came to
	all      prom.Gatherers // with how the gateway is
	observer tokenbucket.Observer
	limits   atomic.Pointer[registry.Registry]
	meter    *fleet.Meter // nil: consoles are told nothing

	bypassed  *prom.CounterVec // bucket, by, result
	refusals  *prom.CounterVec // bucket, by
	penalties *prom.CounterVec // bucket
	upstreams *prom.CounterVec // upstream, kind

	labels sync.Map // values of the label bucket
	known  atomic.Int64

	mu    sync.Mutex
	helds map[string]time.Time // until when buckets are held back, as this gateway was told
}

func newMetrics() (*metrics, error) {
	m := &metrics{calls: prom.NewRegistry(), helds: map[string]time.Time{}}
	var err error
	if m.observer, err = tbprometheus.New(m.calls, tbprometheus.WithBuckets(m.label), tbprometheus.WithMaxBuckets(mostSeries)); err != nil {
		return nil, err
	}
	counter := func(name, help string, labels ...string) *prom.CounterVec {
		v := prom.NewCounterVec(prom.CounterOpts{Namespace: "tokenbucket", Subsystem: "gateway", Name: name, Help: help}, labels)
		m.calls.MustRegister(v)
		return v
	}
	m.bypassed = counter("bypassed_total", "Calls that passed or were refused without a bucket.", "bucket", "by", "result")
	m.refusals = counter("refusals_total", "Calls that were refused, by what refused them.", "bucket", "by")
	m.penalties = counter("penalties_total", "Answers of upstreams with a Retry-After that held a bucket back.", "bucket")
	m.upstreams = counter("upstream_errors_total", "Calls that got no answer from their upstream.", "upstream", "kind")
	return m, nil
}

// add adds how the gateway is.
func (m *metrics) add(a *admin) {
	others := prom.NewRegistry()
	others.MustRegister(newCollector(a), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.all = prom.Gatherers{m.calls, others}
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.all, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
}

// match finds the row that decides about a name.
func (m *metrics) match(name string) (row string, exact, ok bool) {
	limits := m.limits.Load()
	if limits == nil {
		return "", false, false
	}
	return limits.Match(name)
}

// limited tells whether calls of a key can be held back: by a bucket, or by the penalty of a row without a rate.
func (m *metrics) limited(key string) bool {
	limits := m.limits.Load()
	if limits == nil {
		return false
	}
	by, _ := limits.Decider(key)
	return by == registry.ByLimit
}

// label is the name of the row that decides about a name or a bucket, and one for all others: nobody makes series by calling.
func (m *metrics) label(name string) string {
	name, _, ok := m.match(name)
	if !ok {
		return tbprometheus.Other
	}
	if _, ok := m.labels.Load(name); ok {
		return name
	}
	if m.known.Load() >= mostSeries {
		return tbprometheus.Other
	}
	if _, ok := m.labels.LoadOrStore(strings.Clone(name), true); !ok {
		m.known.Add(1)
	}
	return name
}

func (m *metrics) bypass(name string, by registry.Decider, pass bool) {
	result := "refused"
	if pass {
		result = "passed"
	}
	m.bypassed.WithLabelValues(m.label(name), by.String(), result).Inc()
}

func (m *metrics) penalized(key string, until time.Time) {
	label := m.label(key)
	m.penalties.WithLabelValues(label).Inc()
	if m.meter != nil {
		m.meter.Penalized(key, until)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if until.After(m.helds[label]) {
		m.helds[label] = until
	}
}

// view is what a bucket looks like. Without a rate it is only known until when calls are held back.
type view struct {
	rate, maxPermits float64
	stored           float64 // permits
	held             time.Time
}

// views asks for the buckets that are in use. Those that cannot be asked are left out, but for what is known here.
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
		if m.label(name) != name {
			continue
		}
		asking.Go(func() { // those that are under way together share trips
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
		_, known := all[l.Name] // better than what was told here: a bucket may have been reset
		told, isTold := m.helds[l.Name]
		switch held := limits.Held(l.Name); {
		case l.Disabled || l.PerKey: // it holds nobody back, or one key
		case l.NoRate && held > 0 && m.label(l.Name) == l.Name:
			all[l.Name] = view{held: time.Now().Add(held)}
		case !l.NoRate && isTold && !known:
			all[l.Name] = view{held: told}
		}
	}
	return all
}
