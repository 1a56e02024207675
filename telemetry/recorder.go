package telemetry

import (
	"context"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// Series records a value in one time series: it adds to a counter, or to the observations of a histogram. It must be safe for concurrent use.
// The context is that of the call, for libraries that link measurements to traces.
type Series func(ctx context.Context, value float64)

// Instrument returns the series of a metric that has the given values of Metric.Labels, in their order. An empty value means that the series
// lacks the label. Two series with the same values count together.
type Instrument func(values []string) Series

// Recorder counts the events of one package in the metrics of the table. One recorder serves any number of limiters. It is safe for
// concurrent use.
type Recorder struct {
	pkg         Package
	instruments [len(table)]definition
	buckets     *buckets

	// Batches and outages are counted for the store, not by bucket: a batch may serve many buckets, and an outage affects all.
	trips               [storeKinds]Series
	storeErrors         [storeKinds]Series // KindNone is unused
	requests, lockWaits Series
	outages, away       Series

	mu      sync.Mutex // guards what follows
	link    link
	inForce [len(policies)]bool
}

// definition is a metric with its instrument. create is nil if the package or the convention lacks the metric, and for gauges.
type definition struct {
	Metric
	create Instrument
}

// NewRecorder returns a recorder of a package's events. It calls create once for every metric of the package, to register it with the metrics
// library. For gauges, create may return nil: their values are read by [Recorder.Gauges].
//
// Errors of invalid options match tokenbucket.ErrInvalidConfig. An error of create is returned as it is.
func NewRecorder(p Package, n Naming, o Options, create func(Metric) (Instrument, error)) (*Recorder, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	r := &Recorder{pkg: p, buckets: newBuckets(o.MaxBuckets)}
	for id := range r.instruments {
		m, ok := p.metric(n, metric(id), o.WaitBounds)
		if !ok {
			continue
		}
		instrument, err := create(m)
		if err != nil {
			return nil, err
		}
		r.instruments[id] = definition{m, instrument}
	}
	for kind := range storeKinds {
		result := "failed"
		if kind == KindNone {
			result = "answered"
		}
		r.trips[kind] = r.series(trips, labelValues{LabelResult: result, LabelErrorType: kind.ErrorType()})
		if kind != KindNone {
			r.storeErrors[kind] = r.series(storeErrors, labelValues{LabelErrorKind: kind.String()})
		}
	}
	r.requests = r.series(requests, labelValues{})
	r.lockWaits = r.series(lockWaits, labelValues{})
	r.outages = r.series(outages, labelValues{})
	r.away = r.series(away, labelValues{})
	return r, nil
}

// series returns the series of a metric with the given values of its labels.
func (r *Recorder) series(id metric, of labelValues) Series {
	d := &r.instruments[id]
	if d.create == nil {
		return discard
	}
	values := make([]string, len(d.Labels))
	for i, label := range d.Labels {
		values[i] = of[label]
	}
	return d.create(values)
}

// discard is the series of a metric that the package or the convention lacks.
func discard(context.Context, float64) {}

// bucket holds the series of one bucket. Each is created by its first event, since creating a series costs more than counting, but those of
// failures by the first decision, with 0 ([alertKinds]). Concurrent first events may both create one; these count together.
type bucket struct {
	name string // the value of LabelBucket

	normal decisionTable
	lower  [tokenbucket.Lowest]atomic.Pointer[decisionTable] // of the lower priorities; nil before their first decision
	blocks atomic.Pointer[blockSeries]
	lost   atomic.Pointer[Series]
	held   [ends]atomic.Pointer[Series]
}

// decisionTable has the series of decisions of one priority: by outcome and kind of error, decider, and shadow.
type decisionTable [int(outcomes) + int(kinds)][deciders][2]atomic.Pointer[decisionSeries]

// of returns the series of decisions of a priority.
func (b *bucket) of(p tokenbucket.Priority) *decisionTable {
	if p == tokenbucket.Normal {
		return &b.normal
	}
	lower := &b.lower[p-1]
	if lower.Load() == nil {
		lower.CompareAndSwap(nil, new(decisionTable))
	}
	return lower.Load()
}

// decisionSeries are the series of decisions that have the same labels.
type decisionSeries struct {
	decisions, permits Series
	failures           Series // discard unless the calls failed
	waits              Series // discard unless the calls were granted
}

// blockSeries are the series of prefetched blocks.
type blockSeries struct{ used, unused Series }

// loadOrCreate returns the value of p, which create sets if it is nil.
func loadOrCreate[T any](p *atomic.Pointer[T], create func() T) *T {
	v := p.Load()
	if v == nil {
		created := create()
		v = &created
		p.Store(v)
	}
	return v
}

// decision counts a call to the bucket with the given label value.
func (r *Recorder) decision(ctx context.Context, name string, d *tokenbucket.Decision) {
	b, labels := r.buckets.get(name), LabelsOf(d)
	cell := &b.of(labels.Priority)[int(labels.Outcome)+int(labels.Kind)][deciderIndex(labels.Decider)][index(labels.Shadow)]
	s := loadOrCreate(cell, func() decisionSeries { return r.decisionSeries(b.name, labels) })
	s.decisions(ctx, 1)
	if isCounted(d) {
		s.permits(ctx, float64(d.Permits))
	}
	s.failures(ctx, 1)
	if r.pkg.zeroWaits || d.Wait > 0 {
		s.waits(ctx, d.Wait.Seconds())
	}
}

func (r *Recorder) decisionSeries(bucket string, l DecisionLabels) decisionSeries {
	of := labelValues{
		LabelBucket: bucket, LabelOutcome: l.Outcome.String(), LabelDecider: l.Decider.String(), LabelShadow: strconv.FormatBool(l.Shadow),
		LabelErrorKind: l.Kind.String(), LabelErrorType: l.Kind.ErrorType(),
		LabelPriority: priorityName(l.Priority),
	}
	s := decisionSeries{decisions: r.series(decisions, of), permits: r.series(permits, of), failures: discard, waits: discard}
	switch l.Outcome {
	case Failed:
		s.failures = r.series(failures, of)
		return s
	case Granted:
		s.waits = r.series(waits, of)
	}
	for _, kind := range alertKinds { // they begin with 0, since a rate or an increase does not see the first value of a series
		of[LabelErrorKind] = kind.String()
		r.series(failures, of)
	}
	return s
}

// isCounted reports whether the permits of a decision are counted. A call that failed its checks may have requested any number.
func isCounted(d *tokenbucket.Decision) bool {
	return d.Permits > 0 && (d.Err == nil || d.By != tokenbucket.ByCheck)
}

func index(b bool) int {
	if b {
		return 1
	}
	return 0
}

// block counts a prefetched block that has ended.
func (r *Recorder) block(name string, permits, used int) {
	b := r.buckets.get(name)
	s := loadOrCreate(&b.blocks, func() blockSeries {
		return blockSeries{
			r.series(leasePermits, labelValues{LabelBucket: b.name, LabelUse: "used"}),
			r.series(leasePermits, labelValues{LabelBucket: b.name, LabelUse: "unused"}),
		}
	})
	permits = max(0, permits)
	used = min(max(0, used), permits)
	ctx := context.Background()
	s.used(ctx, float64(used))
	s.unused(ctx, float64(permits-used))
}

// lost counts permits that a group could not give back.
func (r *Recorder) lost(name string, permits int) {
	b := r.buckets.get(name)
	s := loadOrCreate(&b.lost, func() Series { return r.series(lostPermits, labelValues{LabelBucket: b.name}) })
	(*s)(context.Background(), float64(max(0, permits)))
}

// holding counts a semaphore's permit that is no longer held.
func (r *Recorder) holding(name string, end End, duration time.Duration) {
	b := r.buckets.get(name)
	s := loadOrCreate(&b.held[end], func() Series {
		return r.series(held, labelValues{LabelBucket: b.name, LabelEnd: end.String()})
	})
	(*s)(context.Background(), duration.Seconds())
}

// trip counts a batch. It belongs to many calls, so it has no caller's context.
func (r *Recorder) trip(requests int, elapsed time.Duration, err error) {
	ctx, kind := context.Background(), StoreKindOf(err)
	r.requests(ctx, float64(requests))
	r.trips[kind](ctx, elapsed.Seconds())
	if err != nil {
		r.storeErrors[kind](ctx, 1)
	}
}

// lockWait counts a wait for a bucket's lock. Zeros are left out: the script store has no lock.
func (r *Recorder) lockWait(d time.Duration) {
	if d > 0 {
		r.lockWaits(context.Background(), d.Seconds())
	}
}

// tripLink lets the result of a batch decide whether the store is up. It is not for package tokenbucket, whose limiters notice the end of an
// outage themselves.
func (r *Recorder) tripLink(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	begins, ends, lasted := r.link.tripped(StoreKindOf(err))
	r.outage(begins, ends, lasted)
}

// health records that a limiter reports the beginning or the end of an outage, and which failure policy decides its calls meanwhile. Several
// policies may be in force at once, since every limiter has its own.
func (r *Recorder) health(h tokenbucket.Health) {
	r.mu.Lock()
	defer r.mu.Unlock()
	begins, ends := r.link.reported(h.Down)
	r.outage(begins, ends, h.After)
	switch {
	case !h.Down:
		r.inForce = [len(policies)]bool{}
	case h.Policy == tokenbucket.FailClosed:
		r.inForce[0] = true
	case h.Policy == tokenbucket.FailOpen:
		r.inForce[1] = true
	default:
		r.inForce[2] = true
	}
}

// outage counts an outage that begins or ends. r.mu must be held.
func (r *Recorder) outage(begins, ends bool, lasted time.Duration) {
	ctx := context.Background()
	if begins {
		r.outages(ctx, 1)
	}
	if ends {
		r.away(ctx, max(0, lasted).Seconds())
	}
}

// policies are the values of LabelPolicy. LocalShare stands for any number of instances, to bound the number of series.
var policies = [...]string{"FailClosed", "FailOpen", "LocalShare"}

// Gauges reports the current value of every gauge, with the values of its labels. Adapters call it at every collection: a gauge that is set
// when it changes would be missing from collections between changes with delta temporality, and lost if it were set before the global
// provider is.
func (r *Recorder) Gauges(report func(gauge *Metric, labels []string, value int)) {
	r.mu.Lock()
	up, inForce := !r.link.down, r.inForce
	r.mu.Unlock()
	report(&r.instruments[storeUp].Metric, nil, index(up))
	if r.instruments[policyInForce].Name == "" {
		return
	}
	for i, p := range policies {
		report(&r.instruments[policyInForce].Metric, []string{p}, index(inForce[i]))
	}
}
