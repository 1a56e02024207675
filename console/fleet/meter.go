package fleet

import (
	"cmp"
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Meter counts decisions of limiters, and is the Source of a Publisher. Give its Observer to the limiters and Bypassed to the
// registry that makes them, and call Follow once the registry exists. All methods may be called concurrently.
type Meter struct {
	info     func(*Info)
	counters *names[counter]                // of rows
	keys     atomic.Pointer[names[counter]] // the same counters, by the names of keys and of calls that rows match
	others   counter                        // of names without a row
	refused  *most
	events   pending
	store    outages
	limits   atomic.Pointer[registry.Registry]
	news     chan struct{}
	failing  atomic.Bool // the last load failed

	reporting sync.Mutex
	watch     watch
}

// counter counts the calls of a limit.
type counter struct {
	name string

	normal    tally                                     // calls of Normal, and those that no rate has decided
	lower     [tokenbucket.Lowest]atomic.Pointer[tally] // of the lower priorities; nil before their first call
	refusedBy [len(deciders)]atomic.Int64               // refused calls, by gate.Decider
	gone      atomic.Bool                               // its row is gone
	held      atomic.Pointer[penalty]
	heldUntil atomic.Int64 // when the bucket's penalty ends, in microseconds since 1970; 0 without one
}

// penalty is a penalty until then, as noted then.
type penalty struct{ until, noted time.Time }

// of returns the tally of a priority.
func (c *counter) of(p tokenbucket.Priority) *tally {
	if p == tokenbucket.Normal {
		return &c.normal
	}
	lower := &c.lower[min(p, tokenbucket.Lowest)-1]
	if t := lower.Load(); t != nil {
		return t
	}
	lower.CompareAndSwap(nil, new(tally))
	return lower.Load()
}

// load returns the calls of all priorities.
func (c *counter) load() Counters {
	all := c.normal.load()
	for i := range c.lower {
		if t := c.lower[i].Load(); t != nil {
			all = all.Plus(ref(t.load()))
		}
	}
	return all
}

// calls returns the number of calls counted.
func (c *counter) calls() int64 {
	n := c.normal.calls()
	for i := range c.lower {
		if t := c.lower[i].Load(); t != nil {
			n += t.calls()
		}
	}
	return n
}

// tally counts the calls of one priority.
type tally struct {
	granted, waited, waitNanos, refused, failed, passed, wouldRefuse atomic.Int64

	waits [len(Histogram{})]atomic.Int64
}

func (t *tally) load() (all Counters) {
	all = Counters{
		Granted: t.granted.Load(), Waited: t.waited.Load(), WaitSum: time.Duration(t.waitNanos.Load()), Refused: t.refused.Load(),
		Failed: t.failed.Load(), Passed: t.passed.Load(), WouldRefuse: t.wouldRefuse.Load(),
	}
	for i := range all.Waits {
		all.Waits[i] = t.waits[i].Load()
	}
	return all
}

func (t *tally) calls() int64 {
	return t.granted.Load() + t.refused.Load() + t.failed.Load() + t.passed.Load() + t.wouldRefuse.Load()
}

// mostCounted bounds the limits with counters of their own, including those whose rows are gone, and the further names that
// are found without a lookup.
const mostCounted = 3 * MostLimits

// MeterOption configures a Meter.
type MeterOption func(*Meter)

// WithInfo sets a function that fills in what a Meter cannot know: the program's version, the kind of store and the policy,
// when the switch was read, semaphores and windows. It is called at every beat.
func WithInfo(f func(*Info)) MeterOption { return func(m *Meter) { m.info = f } }

// NewMeter returns a Meter that follows no registry. Until it does, each name counts as a limit.
func NewMeter(opts ...MeterOption) *Meter {
	m := &Meter{counters: newNames[counter](mostCounted), refused: newMost(4 * MostKeys), info: func(*Info) {}, news: make(chan struct{}, 1)}
	m.keys.Store(newNames[counter](mostCounted))
	m.watch.host, _ = os.Hostname()
	for _, o := range opts {
		o(m)
	}
	return m
}

// Follow makes the Meter report a registry's limits, rows and loads, and their changes from now on.
func (m *Meter) Follow(limits *registry.Registry) {
	m.reporting.Lock()
	defer m.reporting.Unlock()
	m.watch.follow(m, limits, &Report{})
	m.limits.Store(limits)
}

// Loaded is for registry.WithHook. It publishes changes by a load, and that loads fail or succeed again, without waiting for
// the next beat.
func (m *Meter) Loaded(l registry.Load) {
	failed := l.Err != nil
	if m.failing.Swap(failed) != failed || l.Added+l.Changed+l.Removed > 0 {
		select {
		case m.news <- struct{}{}:
		default: // it is about to be published
		}
	}
}

// News returns a channel that receives when a Publisher should not wait for its next beat.
func (m *Meter) News() <-chan struct{} { return m.news }

// Observer returns an Observer that counts decisions and notices outages. It calls the others for the same events.
func (m *Meter) Observer(others ...tokenbucket.Observer) tokenbucket.Observer {
	o := tokenbucket.Observer{Decision: m.decided, Health: m.noticed}
	for _, other := range others {
		o.Decision = both(o.Decision, other.Decision)
		o.Health = each1(o.Health, other.Health)
		o.Trip = each1(o.Trip, other.Trip)
		if lost, next := o.Lost, other.Lost; lost == nil {
			o.Lost = next
		} else if next != nil {
			o.Lost = func(bucket string, permits int) { lost(bucket, permits); next(bucket, permits) }
		}
		if lease, next := o.Prefetch, other.Prefetch; lease == nil {
			o.Prefetch = next
		} else if next != nil {
			o.Prefetch = func(bucket string, permits, used int) { lease(bucket, permits, used); next(bucket, permits, used) }
		}
	}
	return o
}

func both(a, b func(context.Context, tokenbucket.Decision)) func(context.Context, tokenbucket.Decision) {
	if b == nil {
		return a
	}
	return func(ctx context.Context, d tokenbucket.Decision) { a(ctx, d); b(ctx, d) }
}

func each1[T any](a, b func(T)) func(T) {
	if a == nil || b == nil {
		if a == nil {
			return b
		}
		return a
	}
	return func(v T) { a(v); b(v) }
}

// decided counts a call.
func (m *Meter) decided(ctx context.Context, d tokenbucket.Decision) {
	c := m.of(d.Bucket)
	t := c.of(d.Priority)
	switch {
	case d.Err != nil && !d.Shadow:
		t.failed.Add(1)
	case d.By == tokenbucket.BySwitch || d.Err != nil:
		t.passed.Add(1)
	case d.Granted && registry.Tentative(ctx, func() { t.grant(d.Wait) }):
	case d.Granted:
		t.grant(d.Wait)
	case d.Shadow:
		t.wouldRefuse.Add(1)
		m.note(c, d.Bucket)
	default:
		c.refuse(t, c.byRate(time.Now()))
		m.note(c, d.Bucket)
	}
}

// refuse counts a call of a tally that was refused.
func (c *counter) refuse(t *tally, by gate.Decider) {
	t.refused.Add(1)
	if int(by) < len(c.refusedBy) {
		c.refusedBy[by].Add(1)
	}
}

// byRate returns what refuses when a bucket does: a penalty, or else its rate.
func (c *counter) byRate(now time.Time) gate.Decider {
	if p := c.held.Load(); p != nil && now.Before(p.until) || now.UnixMicro() < c.heldUntil.Load() {
		return gate.ByPenalty
	}
	return gate.ByLimit
}

// refusals appends the refused calls, by decider.
func (c *counter) refusals(to []Refusal) []Refusal {
	for i := range c.refusedBy {
		if n := c.refusedBy[i].Load(); n > 0 {
			to = append(to, Refusal{Limit: c.name, By: deciders[i], Count: n})
		}
	}
	return to
}

// priorities appends the calls of the lower priorities that have any.
func (c *counter) priorities(to []Priority) []Priority {
	for i := range c.lower {
		if t := c.lower[i].Load(); t != nil {
			to = append(to, Priority{Limit: c.name, Name: tokenbucket.Priority(i + 1).String(), Counters: t.load()})
		}
	}
	return to
}

// grant counts a call that was granted after a wait.
func (t *tally) grant(wait time.Duration) {
	t.granted.Add(1)
	if wait > 0 {
		t.waited.Add(1)
		t.waitNanos.Add(int64(wait))
		t.waits[placeOf(wait)].Add(1)
	}
}

// placeOf returns the element of a Histogram that counts a wait.
func placeOf(d time.Duration) int {
	i := 0
	for i < len(waitBounds) && d > waitBounds[i] {
		i++
	}
	return i
}

// note counts a refused key, unless the key is the limit's name.
func (m *Meter) note(c *counter, name string) {
	if name == c.name {
		return
	}
	key := strings.TrimPrefix(strings.TrimPrefix(name, c.name), "|")
	m.refused.add(c.name, key)
}

// Bypassed counts a call that passed or was refused without a bucket, and so without a priority. It is for registry.WithBypassHook.
func (m *Meter) Bypassed(name string, by gate.Decider, pass bool) {
	c, word := m.of(name), by.String()
	switch {
	case word == "shadow":
		c.normal.wouldRefuse.Add(1)
		m.note(c, name)
	case pass && (word == "window" || word == "concurrency"): // of a row without a rate
		c.normal.granted.Add(1)
	case pass:
		c.normal.passed.Add(1)
	default:
		c.refuse(&c.normal, by)
		m.note(c, name)
	}
}

// Penalized records that an upstream holds a limit back.
func (m *Meter) Penalized(name string, until time.Time) {
	c := m.of(name)
	before := c.held.Load()
	if before != nil && !until.After(before.until) {
		return
	}
	now := time.Now()
	if c.held.Store(&penalty{until, now}); c != &m.others && (before == nil || before.until.Before(now)) {
		m.events.add(Event{At: now, Kind: Penalized, Limit: c.name, For: until.Sub(now)})
	}
}

// of returns the counter for a call by that name: its limit's, or the common one of all others.
func (m *Meter) of(name string) *counter {
	c := m.counters.find(name)
	if c == nil {
		if c = m.keys.Load().find(name); c == nil {
			c = m.lookUp(name)
		}
	}
	if c.gone.Load() {
		return &m.others
	}
	return c
}

// lookUp finds the row of a name that has no counter yet.
func (m *Meter) lookUp(name string) *counter {
	row, keys := name, m.keys.Load()
	if limits := m.limits.Load(); limits != nil {
		var ok bool
		if row, ok = rowOf(limits, name); !ok {
			return &m.others
		}
	}
	c := m.counters.add(row, func(name string) *counter { return &counter{name: name} })
	if c == nil {
		return &m.others
	}
	if row != name {
		keys.add(name, func(string) *counter { return c })
	}
	return c
}

// rowOf returns the row that decides about a name, or whose key the name is.
func rowOf(limits interface{ Has(name string) bool }, name string) (row string, ok bool) {
	if limits.Has(name) {
		return name, true
	}
	if m, matches := limits.(interface {
		Match(name string) (row string, exact, ok bool)
	}); matches {
		row, _, ok = m.Match(name)
		return row, ok
	}
	return "", false
}

// refusals returns the refusals of limits with rows, the most frequent first.
func (m *Meter) refusals() (all []Refusal) {
	for _, c := range m.counters.all() {
		if !c.gone.Load() {
			all = c.refusals(all)
		}
	}
	slices.SortFunc(all, func(a, b Refusal) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Limit, b.Limit), cmp.Compare(a.By, b.By))
	})
	return cut(all, MostRefusals)
}

// retire makes calls of names without a row count as others until they have one again, and drops the remembered matches.
func (m *Meter) retire(limits *registry.Registry) {
	for name, c := range m.counters.all() {
		c.gone.Store(!limits.Has(name))
	}
	m.keys.Store(newNames[counter](mostCounted))
}

// noticed records the beginning or end of an outage.
func (m *Meter) noticed(h tokenbucket.Health) {
	if e, ok := m.store.noticed(h); ok {
		m.events.add(e)
	}
}

// pending has the events that are not yet published.
type pending struct {
	mu   sync.Mutex
	list []Event
}

func (p *pending) add(e Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.list) < 2*mostPending { // the ledger counts those beyond its bound
		p.list = append(p.list, e)
	}
}

func (p *pending) take(to []Event) []Event {
	p.mu.Lock()
	defer p.mu.Unlock()
	to = append(to, p.list...)
	p.list = p.list[:0]
	return to
}
