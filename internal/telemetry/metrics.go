package telemetry

import "strings"

// Library is a metrics library. Its conventions decide how the metrics and labels of the table are named.
type Library uint8

// The libraries that have an adapter.
const (
	Prometheus Library = iota
	OpenTelemetry
)

// Package is a package whose events are counted. Its name is the namespace of its metrics.
type Package struct {
	name string
	set  packages

	// The names of BucketLabel.
	prometheus, openTelemetry string

	// zeroWaits reports whether the histogram of waits includes granted calls that did not wait.
	zeroWaits bool
}

// The packages that have observers.
var (
	Limiter       = Package{name: "tokenbucket", set: ofLimiter, prometheus: "bucket", openTelemetry: "bucket", zeroWaits: true}
	SlidingWindow = Package{name: "slidingwindow", set: ofWindow, prometheus: "limiter", openTelemetry: "limiter"}
	Semaphore     = Package{name: "semaphore", set: ofSemaphore, prometheus: "semaphore", openTelemetry: "name"}
)

// packages is a set of packages.
type packages uint8

const (
	ofLimiter packages = 1 << iota
	ofWindow
	ofSemaphore

	ofAll = ofLimiter | ofWindow | ofSemaphore
)

// MetricType is the type of a metric.
type MetricType uint8

// Types of metrics.
const (
	Counter MetricType = iota
	Gauge
	Histogram
)

// Metric is a metric of one package, named as one library names it.
type Metric struct {
	Name   string
	Type   MetricType
	Unit   string // as OpenTelemetry writes it: "s", or a noun in braces
	Help   string
	Bounds []float64 // upper bounds of a histogram's buckets; in seconds if the unit is

	Labels     []Label
	LabelNames []string // of Labels, in the same order
}

// Whole reports whether all measurements are whole numbers.
func (m *Metric) Whole() bool { return m.Unit != "s" }

// metric is a row of the table.
type metric uint8

const (
	decisions metric = iota
	permits
	failures
	waits
	leasePermits
	held
	trips
	storeErrors
	requests
	lockWaits
	storeUp
	outages
	away
	policyInForce
)

// table describes every metric of every package. The name is OpenTelemetry's; Prometheus' follows from it, see Package.metric.
//
// OpenTelemetry counts errors by the attribute error.type, so it lacks the two counters of errors.
var table = [...]struct {
	name           string
	kind           MetricType
	unit           string
	of             packages
	prometheusOnly bool
	labels         []Label
	bounds         []float64
	help           string
}{
	decisions: {
		name: "decisions", kind: Counter, unit: "{decision}", of: ofAll,
		labels: []Label{BucketLabel, OutcomeLabel, DeciderLabel, ShadowLabel, ErrorTypeLabel},
		help:   "Calls that were decided.",
	},
	permits: {
		name: "permits", kind: Counter, unit: "{permit}", of: ofAll,
		labels: []Label{BucketLabel, OutcomeLabel, DeciderLabel, ShadowLabel, ErrorTypeLabel},
		help:   "Permits that decided calls requested. Invalid calls are left out.",
	},
	failures: {
		name: "failures", kind: Counter, unit: "{decision}", of: ofAll, prometheusOnly: true,
		labels: []Label{BucketLabel, ErrorKindLabel, ShadowLabel},
		help:   "Calls that failed, by kind of error.",
	},
	waits: {
		name: "wait.duration", kind: Histogram, unit: "s", of: ofAll,
		labels: []Label{BucketLabel, ShadowLabel},
		bounds: waitBounds,
		help:   "How long granted calls waited for their permits; in shadow, how long they would have waited.",
	},
	leasePermits: {
		name: "lease.permits", kind: Counter, unit: "{permit}", of: ofLimiter,
		labels: []Label{BucketLabel, UseLabel},
		help:   "Permits of prefetched blocks that have ended.",
	},
	held: {
		name: "held.duration", kind: Histogram, unit: "s", of: ofSemaphore,
		labels: []Label{BucketLabel, EndLabel},
		bounds: []float64{.001, .01, .1, .5, 1, 5, 10, 30, 60, 300, 1800},
		help:   "How long permits were held, by how the holding ended.",
	},
	trips: {
		name: "store.trip.duration", kind: Histogram, unit: "s", of: ofAll,
		labels: []Label{ResultLabel, ErrorTypeLabel},
		bounds: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5},
		help:   "Round trips of batches to the store, until the reply or until the batch was given up.",
	},
	storeErrors: {
		name: "store.errors", kind: Counter, unit: "{batch}", of: ofAll, prometheusOnly: true,
		labels: []Label{ErrorKindLabel},
		help:   "Batches that failed, by kind of error.",
	},
	requests: {
		name: "batch.requests", kind: Histogram, unit: "{request}", of: ofAll,
		bounds: []float64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024},
		help:   "Requests per batch.",
	},
	lockWaits: {
		name: "lock.wait.duration", kind: Histogram, unit: "s", of: ofLimiter,
		bounds: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1},
		help:   "Waits of batches for a bucket's lock. Batches that found it free are left out.",
	},
	storeUp: {
		name: "store.up", kind: Gauge, unit: "{store}", of: ofAll,
		help: "1 while the store replies, 0 during an outage that this process has noticed.",
	},
	outages: {
		name: "store.outages", kind: Counter, unit: "{outage}", of: ofAll,
		help: "Outages of the store that this process has noticed.",
	},
	away: {
		name: "store.away", kind: Counter, unit: "s", of: ofAll,
		help: "Duration of outages of the store, added when an outage ends.",
	},
	policyInForce: {
		name: "policy.in_force", kind: Gauge, unit: "{policy}", of: ofLimiter,
		labels: []Label{PolicyLabel},
		help:   "1 for each failure policy that decides calls during an outage of the store.",
	},
}

// waitBounds are from one millisecond, about the duration of a decision in Redis, to a minute, which few callers are willing to wait.
var waitBounds = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}

// metric returns a row as a library names it, and reports whether the package and the library have it.
//
// Prometheus' names follow from OpenTelemetry's by the rules of the OpenTelemetry specification for exporters to Prometheus: underscores
// for dots, then the unit of times, then _total for counters.
func (p Package) metric(l Library, id metric, bounds []float64) (Metric, bool) {
	row := &table[id]
	if row.of&p.set == 0 || row.prometheusOnly && l != Prometheus {
		return Metric{}, false
	}
	m := Metric{Name: p.name + "." + row.name, Type: row.kind, Unit: row.unit, Help: row.help, Bounds: row.bounds}
	if l == Prometheus {
		m.Name = strings.ReplaceAll(m.Name, ".", "_")
		if m.Unit == "s" {
			m.Name += "_seconds"
		}
		if m.Type == Counter {
			m.Name += "_total"
		}
	}
	if id == waits {
		m.Bounds = bounds
	}
	for _, label := range row.labels {
		if name := p.LabelName(l, label); name != "" {
			m.Labels, m.LabelNames = append(m.Labels, label), append(m.LabelNames, name)
		}
	}
	return m, true
}

// Label is a label of metrics, or an attribute in the words of OpenTelemetry.
type Label uint8

// The labels.
const (
	BucketLabel    Label = iota // the bucket, the limiter of package slidingwindow, or the semaphore
	OutcomeLabel                // an Outcome
	DeciderLabel                // of tokenbucket.Decider
	ShadowLabel                 // true or false
	ErrorKindLabel              // a Kind, in Prometheus
	ErrorTypeLabel              // a Kind, in OpenTelemetry; empty without an error
	ResultLabel                 // of a batch: answered or failed
	UseLabel                    // of permits in a block: used or unused
	EndLabel                    // an End
	PolicyLabel                 // one of policies

	labelCount
)

// labelNames are the names of labels by library; "" if the library lacks the label. BucketLabel has a name of its own in each package.
var labelNames = [labelCount]struct {
	prometheus, openTelemetry string
	of                        packages
}{
	OutcomeLabel:   {"outcome", "outcome", ofAll},
	DeciderLabel:   {"by", "decider", ofLimiter | ofWindow},
	ShadowLabel:    {"shadow", "shadow", ofLimiter},
	ErrorKindLabel: {"kind", "", ofAll},
	ErrorTypeLabel: {"", errorType, ofAll},
	ResultLabel:    {"result", "", ofAll},
	UseLabel:       {"use", "lease.use", ofLimiter},
	EndLabel:       {"end", "end", ofSemaphore},
	PolicyLabel:    {"policy", "policy", ofLimiter},
}

// errorType is an attribute of OpenTelemetry's semantic conventions, so it is in no package's namespace.
const errorType = "error.type"

// LabelName returns the name of a label in metrics of the package, or "" if they lack it.
func (p Package) LabelName(l Library, label Label) string {
	names := labelNames[label]
	if label == BucketLabel {
		names.prometheus, names.openTelemetry, names.of = p.prometheus, p.openTelemetry, ofAll
	}
	switch {
	case names.of&p.set == 0:
		return ""
	case l == Prometheus:
		return names.prometheus
	case names.openTelemetry == "", names.openTelemetry == errorType:
		return names.openTelemetry
	}
	return p.name + "." + names.openTelemetry
}

// labelValues are the values of labels. A metric uses those of its own labels.
type labelValues [labelCount]string
