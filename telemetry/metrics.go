package telemetry

import "strings"

// Naming is the convention by which the metrics and labels of the table are named, and whether errors are counted by metrics of their own.
type Naming uint8

// The conventions.
const (
	// Prometheus: tokenbucket_wait_duration_seconds, with the label bucket. Errors have counters of their own, by the label kind.
	Prometheus Naming = iota
	// OpenTelemetry: tokenbucket.wait.duration in the unit s, with the attribute tokenbucket.bucket. Errors are counted by the attribute
	// error.type of the other metrics.
	OpenTelemetry
)

// String returns the name of the convention.
func (n Naming) String() string { return nameOf(n, "Prometheus", "OpenTelemetry") }

// Package is a package whose events are counted: Limiter, SlidingWindow or Semaphore. Its name is the namespace of its metrics.
type Package struct {
	name string
	set  packages

	// The names of LabelBucket.
	prometheus, openTelemetry string

	// zeroWaits reports whether the histogram of waits includes granted calls that did not wait.
	zeroWaits bool
}

// The packages that have observers. Limiter is package tokenbucket.
var (
	Limiter       = Package{name: "tokenbucket", set: ofLimiter, prometheus: "bucket", openTelemetry: "bucket", zeroWaits: true}
	SlidingWindow = Package{name: "slidingwindow", set: ofWindow, prometheus: "limiter", openTelemetry: "limiter"}
	Semaphore     = Package{name: "semaphore", set: ofSemaphore, prometheus: "semaphore", openTelemetry: "name"}
)

// String returns the name of the package.
func (p Package) String() string { return p.name }

// Metrics returns the metrics of the package, in the order of the table. Histograms of waits have their default bounds.
func (p Package) Metrics(n Naming) []Metric {
	var all []Metric
	for id := range table {
		if m, ok := p.metric(n, metric(id), waitBounds); ok {
			all = append(all, m)
		}
	}
	return all
}

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

// String returns the type as Prometheus writes it.
func (t MetricType) String() string { return nameOf(t, "counter", "gauge", "histogram") }

// Metric is a metric of one package, named by one convention.
type Metric struct {
	Name   string
	Type   MetricType
	Unit   string // as OpenTelemetry writes it: "s", or a noun in braces
	Help   string
	Bounds []float64 // upper bounds of a histogram's buckets; in seconds if the unit is

	Labels     []Label
	LabelNames []string // names of Labels, in the same order
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
	lostPermits
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
		labels: []Label{LabelBucket, LabelOutcome, LabelDecider, LabelShadow, LabelPriority, LabelErrorType},
		help:   "Calls that were decided.",
	},
	permits: {
		name: "permits", kind: Counter, unit: "{permit}", of: ofAll,
		labels: []Label{LabelBucket, LabelOutcome, LabelDecider, LabelShadow, LabelPriority, LabelErrorType},
		help:   "Permits that decided calls requested. Invalid calls are left out.",
	},
	failures: {
		name: "failures", kind: Counter, unit: "{decision}", of: ofAll, prometheusOnly: true,
		labels: []Label{LabelBucket, LabelErrorKind, LabelShadow, LabelPriority},
		help:   "Calls that failed, by kind of error.",
	},
	waits: {
		name: "wait.duration", kind: Histogram, unit: "s", of: ofAll,
		labels: []Label{LabelBucket, LabelShadow, LabelPriority},
		bounds: waitBounds,
		help:   "How long granted calls waited for their permits; in shadow, how long they would have waited.",
	},
	leasePermits: {
		name: "lease.permits", kind: Counter, unit: "{permit}", of: ofLimiter,
		labels: []Label{LabelBucket, LabelUse},
		help:   "Permits of prefetched blocks that have ended.",
	},
	lostPermits: {
		name: "lost.permits", kind: Counter, unit: "{permit}", of: ofLimiter,
		labels: []Label{LabelBucket},
		help:   "Permits that groups have taken and could not give back.",
	},
	held: {
		name: "held.duration", kind: Histogram, unit: "s", of: ofSemaphore,
		labels: []Label{LabelBucket, LabelEnd},
		bounds: []float64{.001, .01, .1, .5, 1, 5, 10, 30, 60, 300, 1800},
		help:   "How long permits were held, by how the holding ended.",
	},
	trips: {
		name: "store.trip.duration", kind: Histogram, unit: "s", of: ofAll,
		labels: []Label{LabelResult, LabelErrorType},
		bounds: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5},
		help:   "Round trips of batches to the store, until the reply or until the batch was given up.",
	},
	storeErrors: {
		name: "store.errors", kind: Counter, unit: "{batch}", of: ofAll, prometheusOnly: true,
		labels: []Label{LabelErrorKind},
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
		labels: []Label{LabelPolicy},
		help:   "1 for each failure policy that decides calls during an outage of the store.",
	},
}

// waitBounds are from one millisecond, about the duration of a decision in Redis, to a minute, which few callers are willing to wait.
var waitBounds = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}

// metric returns a row of the table by its names in a convention, and reports whether the package and the convention have it.
//
// Prometheus' names follow from OpenTelemetry's by the rules of the OpenTelemetry specification for exporters to Prometheus: underscores
// for dots, then the unit of times, then _total for counters.
func (p Package) metric(n Naming, id metric, bounds []float64) (Metric, bool) {
	row := &table[id]
	if row.of&p.set == 0 || row.prometheusOnly && n != Prometheus {
		return Metric{}, false
	}
	m := Metric{Name: p.name + "." + row.name, Type: row.kind, Unit: row.unit, Help: row.help, Bounds: row.bounds}
	if n == Prometheus {
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
		if name := p.LabelName(n, label); name != "" {
			m.Labels, m.LabelNames = append(m.Labels, label), append(m.LabelNames, name)
		}
	}
	return m, true
}

// Label is a label of metrics, or an attribute in the words of OpenTelemetry.
type Label uint8

// The labels.
const (
	LabelBucket    Label = iota // the bucket, the limiter of package slidingwindow, or the semaphore
	LabelOutcome                // an Outcome
	LabelDecider                // of tokenbucket.Decider
	LabelShadow                 // true or false
	LabelErrorKind              // a Kind, in Prometheus
	LabelErrorType              // a Kind, in OpenTelemetry; empty without an error
	LabelResult                 // of a batch: answered or failed
	LabelUse                    // of permits in a block: used or unused
	LabelEnd                    // an End
	LabelPolicy                 // one of policies
	LabelPriority               // of tokenbucket.Priority; empty for Normal

	labelCount
)

// labelNames are the names of labels by convention; "" if the convention lacks the label. LabelBucket has a name of its own in each package.
var labelNames = [labelCount]struct {
	prometheus, openTelemetry string
	of                        packages
}{
	LabelOutcome:   {"outcome", "outcome", ofAll},
	LabelDecider:   {"by", "decider", ofLimiter | ofWindow},
	LabelShadow:    {"shadow", "shadow", ofLimiter},
	LabelErrorKind: {"kind", "", ofAll},
	LabelErrorType: {"", errorType, ofAll},
	LabelResult:    {"result", "", ofAll},
	LabelUse:       {"use", "lease.use", ofLimiter},
	LabelEnd:       {"end", "end", ofSemaphore},
	LabelPolicy:    {"policy", "policy", ofLimiter},
	LabelPriority:  {"priority", "priority", ofLimiter},
}

// errorType is an attribute of OpenTelemetry's semantic conventions, so it is in no package's namespace.
const errorType = "error.type"

// LabelName returns the name of a label in metrics of the package, or "" if the package or the convention lacks it.
func (p Package) LabelName(n Naming, label Label) string {
	names := labelNames[label]
	if label == LabelBucket {
		names.prometheus, names.openTelemetry, names.of = p.prometheus, p.openTelemetry, ofAll
	}
	switch {
	case names.of&p.set == 0:
		return ""
	case n == Prometheus:
		return names.prometheus
	case names.openTelemetry == "", names.openTelemetry == errorType:
		return names.openTelemetry
	}
	return p.name + "." + names.openTelemetry
}

// labelValues are the values of labels. A metric uses those of its own labels.
type labelValues [labelCount]string
