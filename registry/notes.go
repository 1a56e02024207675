package registry

import (
	"slices"
	"sync"
	"time"
)

// notes are what is remembered of loads, and of what was told.
type notes struct {
	mu       sync.Mutex
	stats    Stats
	began    time.Time // of the last load
	before   time.Time // of the one before that
	reported map[string]bool
	failing  bool
}

// begin begins a load, unless one has begun since it was asked for: then that one's error is the answer.
func (n *notes) begin(asked time.Time) (done bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.began.After(asked) {
		return true, n.stats.Err
	}
	n.before, n.began = n.began, time.Now()
	return false, nil
}

// givenUp notes that a load has not taken place: who waits for it loads by himself.
func (n *notes) givenUp() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.began = n.before
}

// age is the time since the last load began.
func (n *notes) age() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Since(n.began)
}

// again is how often a trouble is told that lasts.
const again = time.Minute

// loaded keeps the figures of a load. It returns the bad rows and the unmatched ones that were not told, and whether other rows are in shadow
// than before.
func (n *notes) loaded(load *Load) (failed, recovered, shadows bool, fresh, unmatched []RowError) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	n.stats.Loads++
	n.stats.LastLoad, n.stats.Err = now, load.Err
	failed, recovered = load.Err != nil && !n.failing, load.Err == nil && n.failing && !n.stats.LastGood.IsZero()
	n.failing = load.Err != nil
	if load.Err != nil {
		n.stats.Failures++
		return failed, recovered, false, nil, nil
	}
	n.stats.LastGood = now
	n.stats.Limits, n.stats.Bad, n.stats.Held, n.stats.Rejected = load.Limits, load.Bad, load.Held, load.Rejected
	n.stats.Unmatched = load.Unmatched
	seen := map[string]bool{}
	unreported := func(rows []RowError) (fresh []RowError) {
		for _, e := range rows {
			text := e.Error() + e.Consequence
			seen[text] = true
			if !n.reported[text] {
				fresh = append(fresh, e)
			}
		}
		return fresh
	}
	fresh, unmatched = unreported(load.Rejected), unreported(load.Unmatched)
	n.reported = seen
	shadows = !slices.Equal(n.stats.Shadow, load.Shadow)
	n.stats.Shadow = load.Shadow
	return failed, recovered, shadows, fresh, unmatched
}

// note keeps the figures of a load and tells of it, of each trouble once; remind tells of it again.
func (r *Registry) note(load *Load) {
	failed, recovered, shadows, fresh, unmatched := r.notes.loaded(load)
	if failed && r.limits.Load() == nil {
		r.log.Error("registry: limits cannot be loaded yet", "error", load.Err)
	} else if failed {
		r.log.Error("registry: limits could not be loaded; what was before stays in force", "error", load.Err)
	}
	if recovered {
		r.log.Info("registry: limits are loaded again", "limits", load.Limits)
	}
	r.tellBad(fresh)
	r.tellUnmatched(unmatched)
	r.tellShadows(load, shadows)
	if load.Err == nil {
		if s := r.Stats(); s.Loads-s.Failures == 1 {
			r.tellEmpty(&s)
			r.tellAllShadow(&s)
		}
	}
	if r.hook != nil {
		r.hook(*load)
	}
}

// mostTold is how many bad rows are told of at once.
const mostTold = 20

func (r *Registry) tellBad(rows []RowError) {
	for i := range rows {
		if i == mostTold {
			r.log.Warn("registry: further rows are bad, see Stats", "rows", len(rows)-i)
			return
		}
		r.log.Warn("registry: a row is bad", "error", &rows[i], "bucket", rows[i].Name, "row", rows[i].Row, "consequence", rows[i].Consequence)
	}
}

// remind tells again what troubles last.
func (r *Registry) remind() {
	s := r.Stats()
	if !s.Off.IsZero() {
		r.log.Warn("registry: the switch is still off: every call passes", "for", time.Since(s.Off).Round(time.Second), "origin", s.Origin)
	}
	if s.Err != nil {
		r.log.Error("registry: limits still cannot be loaded; what was before stays in force", "age", s.Age.Round(time.Second), "error", s.Err)
	}
	r.remindLoss(&s.Loss)
	r.tellEmpty(&s)
	r.remindShadows(&s)
	r.tellBad(s.Rejected)
	r.tellUnmatched(s.Unmatched)
	r.logFaults(s.Faults)
}

func (r *Registry) tellEmpty(s *Stats) {
	if s.Limits+s.Bad == 0 && !r.unknown.refuse && r.unknown.limit == nil {
		r.log.Warn("registry: there are no limits: every call passes")
	}
}

// watchSwitch tells when the switch is turned.
func (r *Registry) watchSwitch() {
	if r.sw == nil {
		return
	}
	off, origin := !r.sw.Enabled(), ""
	if o, ok := r.sw.(interface{ Origin() string }); ok {
		origin = o.Origin()
	}
	turned := r.notes.switched(off, origin)
	switch {
	case turned && off:
		r.log.Warn("registry: the switch is off: every call passes", "origin", origin)
	case turned:
		r.log.Warn("registry: the switch is on: calls are limited", "origin", origin)
	}
}

// switched tells whether the switch was turned.
func (n *notes) switched(off bool, origin string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if off {
		n.stats.Origin = origin
	}
	if off == !n.stats.Off.IsZero() {
		return false
	}
	if n.stats.Off = (time.Time{}); off {
		n.stats.Off = time.Now()
	}
	return true
}

// mind looks after what lasts.
func (r *Registry) mind() {
	const look = time.Second
	ticker := time.NewTicker(look)
	defer ticker.Stop()
	for told := time.Now(); ; {
		select {
		case now := <-ticker.C:
			r.watchSwitch()
			r.logFaults(r.faults.unlogged())
			r.watchLoss(r.ctx)
			if now.Sub(told) >= again {
				told = now
				r.remind()
			}
		case <-r.ctx.Done():
			return
		}
	}
}
