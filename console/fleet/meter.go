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

// Meter counts what limiters decide, and is the Source of a Publisher. Its Observer belongs to the limiters, Bypassed to the
// registry that makes them, which it follows from Follow on. All methods may be called by many goroutines at once.
type Meter struct {
	info     func(*Info)
	counters *names[counter]                // of rows
	keys     atomic.Pointer[names[counter]] // the same, by the names of keys and of calls that rows hold for
	others   counter                        // of names that have no row
	refused  *most
	events   pending
	store    outages
	limits   atomic.Pointer[registry.Registry]
	news     chan struct{}
	failing  atomic.Bool // the last load has failed

	reporting sync.Mutex
	watch     watch
}

// counter is what calls of a limit came to.
type counter struct {
	name string

	granted, waited, waitNanos, refused, failed, passed, wouldRefuse atomic.Int64

	waits     [len(Histogram{})]atomic.Int64
	refusedBy [len(deciders)]atomic.Int64 // calls of refused, by gate.Decider
	gone      atomic.Bool                 // it has no row any more
	held      atomic.Pointer[penalty]
	heldUntil atomic.Int64 // when the bucket's penalty ends, in microseconds since 1970; 0 if there is none
}

// penalty holds until then, as was told then.
type penalty struct{ until, told time.Time }

func (c *counter) load() (all Counters) {
	all = Counters{
		Granted: c.granted.Load(), Waited: c.waited.Load(), WaitSum: time.Duration(c.waitNanos.Load()), Refused: c.refused.Load(),
		Failed: c.failed.Load(), Passed: c.passed.Load(), WouldRefuse: c.wouldRefuse.Load(),
	}
	for i := range all.Waits {
		all.Waits[i] = c.waits[i].Load()
	}
	return all
}

// calls is how many have been counted.
func (c *counter) calls() int64 {
	return c.granted.Load() + c.refused.Load() + c.failed.Load() + c.passed.Load() + c.wouldRefuse.Load()
}

// mostCounted limits have counters of their own, also those whose rows are gone; and so many further names are found at once.
const mostCounted = 3 * MostLimits

// MeterOption configures a Meter.
type MeterOption func(*Meter)

// WithInfo has a function fill in what a Meter does not know of its instance: its version, the kind of its store and the policy, when
// the switch was read, semaphores, windows. It is called at every beat.
func WithInfo(f func(*Info)) MeterOption { return func(m *Meter) { m.info = f } }

// NewMeter returns a Meter that follows no registry yet: until then all names are limits.
func NewMeter(opts ...MeterOption) *Meter {
	m := &Meter{counters: newNames[counter](mostCounted), refused: newMost(4 * MostKeys), info: func(*Info) {}, news: make(chan struct{}, 1)}
	m.keys.Store(newNames[counter](mostCounted))
	m.watch.host, _ = os.Hostname()
	for _, o := range opts {
		o(m)
	}
	return m
}

// Follow has the Meter tell of a registry's limits, rows and loads, and of what changes from now on.
func (m *Meter) Follow(limits *registry.Registry) {
	m.reporting.Lock()
	defer m.reporting.Unlock()
	m.watch.follow(m, limits, &Report{})
	m.limits.Store(limits)
}

// Loaded is for registry.WithHook: what a load has changed, and that loads fail or succeed again, is told at once.
func (m *Meter) Loaded(l registry.Load) {
	failed := l.Err != nil
	if m.failing.Swap(failed) != failed || l.Added+l.Changed+l.Removed > 0 {
		select {
		case m.news <- struct{}{}:
		default: // it is about to be told
		}
	}
}

// News has something when a Publisher should not wait for its next beat.
func (m *Meter) News() <-chan struct{} { return m.news }

// Observer counts decisions, and notices outages. Others that limiters are to have beside it are told of the same.
func (m *Meter) Observer(others ...tokenbucket.Observer) tokenbucket.Observer {
	o := tokenbucket.Observer{Decision: m.decided, Health: m.noticed}
	for _, other := range others {
		o.Decision = both(o.Decision, other.Decision)
		o.Health = each1(o.Health, other.Health)
		o.Trip = each1(o.Trip, other.Trip)
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
	switch {
	case d.Err != nil && !d.Shadow:
		c.failed.Add(1)
	case d.By == tokenbucket.BySwitch || d.Err != nil:
		c.passed.Add(1)
	case d.Granted && registry.Tentative(ctx, func() { c.grant(d.Wait) }):
	case d.Granted:
		c.grant(d.Wait)
	case d.Shadow:
		c.wouldRefuse.Add(1)
		m.note(c, d.Bucket)
	default:
		c.refuse(c.byRate(time.Now()))
		m.note(c, d.Bucket)
	}
}

// refuse counts a call that was refused.
func (c *counter) refuse(by gate.Decider) {
	c.refused.Add(1)
	if int(by) < len(c.refusedBy) {
		c.refusedBy[by].Add(1)
	}
}

// byRate returns what refuses when the bucket does: its rate, or the penalty that it has.
func (c *counter) byRate(now time.Time) gate.Decider {
	if p := c.held.Load(); p != nil && now.Before(p.until) || now.UnixMicro() < c.heldUntil.Load() {
		return gate.ByPenalty
	}
	return gate.ByLimit
}

// refusals appends the calls that were refused, by decider.
func (c *counter) refusals(to []Refusal) []Refusal {
	if c.refused.Load() == 0 {
		return to
	}
	for i := range c.refusedBy {
		if n := c.refusedBy[i].Load(); n > 0 {
			to = append(to, Refusal{Limit: c.name, By: deciders[i], Count: n})
		}
	}
	return to
}

// grant counts a call that was granted after a wait.
func (c *counter) grant(wait time.Duration) {
	c.granted.Add(1)
	if wait > 0 {
		c.waited.Add(1)
		c.waitNanos.Add(int64(wait))
		c.waits[placeOf(wait)].Add(1)
	}
}

// placeOf is where in a Histogram a wait belongs.
func placeOf(d time.Duration) int {
	i := 0
	for i < len(waitBounds) && d > waitBounds[i] {
		i++
	}
	return i
}

// note counts who was refused, unless that is the limit itself.
func (m *Meter) note(c *counter, name string) {
	if name == c.name {
		return
	}
	key := strings.TrimPrefix(strings.TrimPrefix(name, c.name), "|")
	m.refused.add(c.name, key)
}

// Bypassed counts a call that passed or was refused without a bucket: it is for registry.WithBypassHook.
func (m *Meter) Bypassed(name string, by gate.Decider, pass bool) {
	c, word := m.of(name), by.String()
	switch {
	case word == "shadow":
		c.wouldRefuse.Add(1)
		m.note(c, name)
	case pass && (word == "window" || word == "concurrency"): // of a row without a rate
		c.granted.Add(1)
	case pass:
		c.passed.Add(1)
	default:
		c.refuse(by)
		m.note(c, name)
	}
}

// Penalized notes that an upstream holds a limit back.
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

// of is what a call by that name is counted with: its limit, or all others.
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

// lookUp finds the row of a name that is new, or that is none of a row.
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

// rowOf is the row that decides about a name, or of whose keys that is the bucket.
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

// refusals returns those of limits that have rows, the most frequent first.
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

// retire has calls of names that have no row any more counted with all others, until they have one again, and has rows found anew.
func (m *Meter) retire(limits *registry.Registry) {
	for name, c := range m.counters.all() {
		c.gone.Store(!limits.Has(name))
	}
	m.keys.Store(newNames[counter](mostCounted))
}

// noticed notes an outage.
func (m *Meter) noticed(h tokenbucket.Health) {
	if e, ok := m.store.noticed(h); ok {
		m.events.add(e)
	}
}

// pending are events that were not told yet.
type pending struct {
	mu   sync.Mutex
	list []Event
}

func (p *pending) add(e Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.list) < 2*mostPending { // the ledger counts those that are too many
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
