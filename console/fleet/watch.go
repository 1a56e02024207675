package fleet

import (
	"cmp"
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// watch is a Meter's memory from one report to the next.
type watch struct {
	host     string
	loads    int                        // number of successful loads
	rows     map[string]*registry.Limit // in force
	order    []registry.Limit
	failed   bool
	off      bool
	begun    bool
	readings map[string]lastReading
	next     int // index in order of the bucket to read next
}

// lastReading is the last reading of a bucket, and the number of calls counted at that time.
type lastReading struct {
	Bucket
	calls int64
}

// Bounds of reading buckets.
const (
	mostLooks = 100 // per beat: they share a round trip
	lookFor   = 500 * time.Millisecond
	// leastWait separates waiters for a permit from calls in a round trip.
	leastWait = 10 * time.Millisecond
)

// Report implements Source.
func (m *Meter) Report(ctx context.Context, to *Report) {
	m.reporting.Lock()
	defer m.reporting.Unlock()
	to.Info.Host, to.Info.PID = m.watch.host, os.Getpid()
	to.Info.Store = m.store.now()
	to.Info.Refused = m.refused.first(MostKeys)
	to.Info.Refusals = m.refusals()
	to.Info.Others = m.others.load()
	limits := m.limits.Load()
	if limits == nil {
		m.unfollowed(to)
	} else {
		m.watch.follow(m, limits, to)
		m.watch.report(ctx, m, limits, to)
	}
	slices.SortFunc(to.Info.Priorities, func(a, b Priority) int {
		return cmp.Or(cmp.Compare(b.Counters.Calls(), a.Counters.Calls()), cmp.Compare(a.Limit, b.Limit), cmp.Compare(a.Name, b.Name))
	})
	to.Info.Priorities = cut(to.Info.Priorities, MostPriorities)
	m.info(&to.Info)
	to.Info.Crowded = m.counters.full.Load()
	to.Events = m.events.take(to.Events)
	for i := range to.Events {
		if to.Events[i].Kind.noticed() {
			to.Events[i].Host = to.Info.Host
		}
	}
}

// unfollowed reports the decisions of limiters without a registry.
func (m *Meter) unfollowed(to *Report) {
	for name, c := range m.counters.all() {
		to.Info.Priorities = c.priorities(to.Info.Priorities)
		to.Limits = append(to.Limits, Limit{Name: name, Decider: deciders[0], Counters: c.load()})
	}
}

// follow reports the state of the registry, and its changes since the last report.
func (w *watch) follow(m *Meter, limits *registry.Registry, to *Report) {
	s := limits.Stats()
	event := func(e Event) {
		if w.begun {
			to.Events = append(to.Events, e)
		}
	}
	if w.rows == nil || s.Loads-s.Failures != w.loads {
		w.loads = s.Loads - s.Failures
		w.load(limits, event)
		m.retire(limits)
	}
	to.Info.Loads = Loads{Tried: s.Loads, Failed: s.Failures, Last: s.LastGood, Limits: s.Limits, Bad: s.Bad, Held: s.Held,
		Gone: s.Loss.Gone, Before: s.Loss.Before, Lost: s.Loss.Since, Names: someOf(s.Loss.Names)}
	if s.Err != nil {
		to.Info.Loads.Err = s.Err.Error()
	}
	if failed := s.Err != nil; failed != w.failed {
		if w.failed = failed; failed {
			event(Event{Kind: LoadFailed, Err: s.Err.Error()})
		} else {
			event(Event{Kind: LoadedAgain})
		}
	}
	to.Info.Switch = Switch{Off: !s.Off.IsZero(), Since: s.Off, Origin: s.Origin}
	if off := !s.Off.IsZero(); off != w.off {
		if w.off = off; off {
			event(Event{Kind: SwitchOff, Err: s.Origin})
		} else {
			event(Event{Kind: SwitchOn})
		}
	}
	for i := range s.Rejected {
		e := &s.Rejected[i]
		r := Rejected{Row: e.Row, Name: e.Name, Field: e.Field, Value: e.Value, Want: e.Want, Consequence: e.Consequence}
		if e.Err != nil {
			r.Err = e.Err.Error()
		}
		to.Info.Rejected = append(to.Info.Rejected, r)
	}
	for i := range s.Faults {
		e := &s.Faults[i]
		to.Info.Faults = append(to.Info.Faults, Fault{Limit: e.Name, Bucket: e.Bucket, By: e.By.String(), Err: e.Err.Error(), Since: e.Since, Calls: int64(e.Calls)})
	}
	w.begun = true
}

// someOf joins a few names for a message.
func someOf(names []string) string {
	const most = 5
	if len(names) > most {
		return strings.Join(names[:most], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}

// load compares the table with the one before.
func (w *watch) load(limits *registry.Registry, event func(Event)) {
	order := limits.Limits()
	rows := make(map[string]*registry.Limit, len(order))
	for i := range order {
		now := &order[i]
		rows[now.Name] = now
		switch was := w.rows[now.Name]; {
		case was == nil:
			event(Event{Kind: LimitAdded, Limit: now.Name, Version: now.Version, To: now.String()})
		case was.Version != now.Version || was.String() != now.String():
			event(Event{Kind: LimitChanged, Limit: now.Name, Version: now.Version, From: was.String(), To: now.String()})
		}
	}
	for name, was := range w.rows {
		if rows[name] == nil {
			event(Event{Kind: LimitRemoved, Limit: name, From: was.String()})
		}
	}
	w.rows, w.order = rows, order
}

// report fills in the limits. Names whose rows are bad are among them.
func (w *watch) report(ctx context.Context, m *Meter, limits *registry.Registry, to *Report) {
	limiters := limits.Limiters()
	w.look(ctx, m, limiters)
	for i := range w.order {
		name := w.order[i].Name
		w.limit(m, &w.order[i], false, limiters[name], limits.Held(name), to)
	}
	bad := map[string]bool{}
	for _, r := range to.Info.Rejected {
		if r.Name != "" && w.rows[r.Name] == nil && !bad[r.Name] && limits.Has(r.Name) {
			bad[r.Name] = true
			w.limit(m, &registry.Limit{Name: r.Name, Row: r.Row}, true, nil, 0, to)
		}
	}
}

// limit fills in one limit. held is how long a row without a rate is still held back.
func (w *watch) limit(m *Meter, row *registry.Limit, bad bool, limiter *tokenbucket.RateLimiter, held time.Duration, to *Report) {
	l := Limit{Name: row.Name, Decider: DeciderOf(row).String(), Config: ConfigOf(row), Bucket: w.readings[row.Name].Bucket}
	switch {
	case w.off:
		l.Decider = gate.BySwitch.String()
	case bad:
		l.Decider = gate.ByBadRow.String()
	}
	var lower []Priority
	if c := m.counters.find(row.Name); c != nil {
		lower = c.priorities(nil) // before those of all calls, which include them
		l.Counters = c.load()
		// A bucket read after the penalty is the newer information: it may have been reset.
		switch p := c.held.Load(); {
		case p == nil:
		case row.NoRate && held == 0:
			c.held.CompareAndSwap(p, nil) // the limit was reset
		case !row.NoRate && !p.noted.Before(l.Bucket.At) && p.until.After(l.Bucket.HeldUntil):
			l.Bucket.HeldUntil = p.until
		}
	}
	if held > 0 {
		l.Bucket.HeldUntil = time.Now().Add(held)
	}
	if limiter != nil {
		l.Bucket.Rate = limiter.Rate()
		l.Waiting = waitingOf(limiter)
		for i := range lower {
			p, _ := tokenbucket.ParsePriority(lower[i].Name)
			if other := limiter.ForPriority(p); other != limiter {
				l.Waiting = l.Waiting.plus(waitingOf(other))
			}
			lower[i].Waiting = waitingOf(limiter.ForPriority(p)).Count
		}
	}
	to.Limits = append(to.Limits, l)
	to.Info.Priorities = append(to.Info.Priorities, lower...)
}

// waitingOf returns the waiters of a limiter's priority.
func waitingOf(limiter *tokenbucket.RateLimiter) Waiting {
	n, longest := limiter.Waiting()
	if longest < leastWait {
		return Waiting{}
	}
	return Waiting{Count: n, Since: time.Now().Add(-longest)}
}

// DeciderOf returns what decides about the calls of a row while the switch is on.
func DeciderOf(row *registry.Limit) gate.Decider {
	switch {
	case row.Disabled:
		return gate.ByDisabled
	case row.Rate == 0 && !row.NoRate:
		return gate.ByZero
	}
	return gate.ByLimit
}

// ConfigOf returns a row as instances publish it.
func ConfigOf(row *registry.Limit) Config {
	c := Config{
		Row: row.Row, Rate: row.Rate, Warmup: row.Warmup, ColdFactor: row.ColdFactor, Wait: row.MaxWait,
		Window: row.Window, WindowLimit: row.WindowLimit, Concurrent: row.Concurrent, ConcurrentWait: row.ConcurrentWait, NoRate: row.NoRate, PerKey: row.PerKey,
		Version: row.Version, Shadow: row.Shadow,
	}
	if row.Burst != nil {
		c.MaxPermits = *row.Burst
	}
	switch {
	case row.Rate == 0:
	case row.Quota:
		c.Kind = Quota
	case row.Warmup != 0:
		c.Kind, c.ColdFactor = WarmUp, cmp.Or(row.ColdFactor, 3)
	default:
		c.Kind = Bursty
	}
	return c
}

// look reads buckets that may have changed: those with new calls, and those that were not full or held back. A bucket that
// cannot be read keeps its state.
func (w *watch) look(ctx context.Context, m *Meter, limiters map[string]*tokenbucket.RateLimiter) {
	ctx, cancel := context.WithTimeout(ctx, lookFor)
	defer cancel()
	all := m.counters.all()
	var mu sync.Mutex
	var asking sync.WaitGroup
	found := map[string]lastReading{}
	for looks, i := 0, 0; i < len(w.order) && looks < mostLooks; i++ {
		w.next = (w.next + 1) % len(w.order)
		name := w.order[w.next].Name
		l, c, seen := limiters[name], all[name], w.readings[name]
		if l == nil || c == nil {
			continue
		}
		now, penalty := time.Now(), c.held.Load()
		held := seen.HeldUntil.After(now) || penalty != nil && penalty.until.After(now)
		if calls := c.calls(); calls != seen.calls || seen.Stored < seen.Max || seen.At.IsZero() || held {
			looks++
			asking.Go(func() {
				b, err := l.State(ctx)
				if err != nil {
					return
				}
				is := bucketOf(&b, now)
				c.heldUntil.Store(max(0, is.HeldUntil.UnixMicro()))
				if penalty != nil && penalty.noted.Before(now) && is.HeldUntil.IsZero() {
					c.held.CompareAndSwap(penalty, nil) // the bucket was reset: the next penalty is a new one
				}
				mu.Lock()
				defer mu.Unlock()
				found[name] = lastReading{is, calls}
			})
		}
	}
	asking.Wait()
	if w.readings == nil {
		w.readings = map[string]lastReading{}
	}
	for name := range w.readings {
		if limiters[name] == nil {
			delete(w.readings, name)
		}
	}
	for name, b := range found {
		w.readings[name] = b
	}
}

// bucketOf returns the state of a bucket, by this process' clock.
func bucketOf(b *tokenbucket.PermitBucket, now time.Time) Bucket {
	seen := Bucket{At: now, Rate: b.Rate, Stored: b.StoredPermits, Max: b.MaxPermits}
	if left := b.HeldUntilMicros - b.SeenMicros; left > 0 && b.HeldUntilMicros > 0 {
		seen.HeldUntil = now.Add(time.Duration(left) * time.Microsecond)
	}
	return seen
}

// outages records outages of the store.
type outages struct {
	mu    sync.Mutex
	store Store
}

// noticed returns the event for a change of health, and whether it is one.
func (o *outages) noticed(h tokenbucket.Health) (Event, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	why := ""
	if h.Err != nil {
		why = h.Err.Error()
	}
	switch now := time.Now(); {
	case h.Down && !o.store.Down:
		o.store.Down, o.store.Since, o.store.Err = true, now, why
		o.store.Outages++
		return Event{At: now, Kind: StoreDown, Err: why}, true
	case !h.Down && o.store.Down:
		o.store.Down, o.store.Since, o.store.Err = false, time.Time{}, ""
		o.store.Away += h.After
		return Event{At: now, Kind: StoreBack, For: h.After}, true
	}
	return Event{}, false
}

func (o *outages) now() Store {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.store
}
