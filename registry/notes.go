package registry

import (
	"slices"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry/internal/rows"
)

// notes keeps the figures of loads, and which bad rows were logged.
type notes struct {
	mu       sync.Mutex
	stats    Stats
	began    time.Time // when the last load began
	before   time.Time // when the load before that began
	reported map[string]bool
}

// begin starts a load. If another load has begun since asked, the caller shares that one: done is true, and err is its error.
func (n *notes) begin(asked time.Time) (done bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.began.After(asked) {
		return true, n.stats.Err
	}
	n.before, n.began = n.began, time.Now()
	return false, nil
}

// undo reverses begin: the load was given up, so the callers that share it must load themselves.
func (n *notes) undo() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.began = n.before
}

// age returns the time since the last load began.
func (n *notes) age() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Since(n.began)
}

// again is the time between two log lines about a lasting problem.
const again = time.Minute

// loaded records the figures of a load. It returns those of before, and the bad rows and the unmatched rows that were not logged yet.
func (n *notes) loaded(load *Load) (before Stats, fresh, unmatched []RowError) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	before = n.stats
	n.stats.Loads++
	n.stats.LastLoad, n.stats.Err = now, load.Err
	if load.Err != nil {
		n.stats.Failures++
		return before, nil, nil
	}
	n.stats.LastGood = now
	n.stats.Limits, n.stats.Bad, n.stats.Held, n.stats.Rejected = load.Limits, load.Bad, load.Held, load.Rejected
	n.stats.Disabled, n.stats.Outdated, n.stats.Unmatched = load.Disabled, load.Outdated, load.Unmatched
	seen := map[string]bool{}
	unreported := func(bad []RowError) (fresh []RowError) {
		for _, e := range bad {
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
	n.stats.Shadow = load.Shadow
	return before, fresh, unmatched
}

// note records and logs a load, each problem once; remind logs it again.
func (r *Registry) note(load *Load) {
	before, fresh, unmatched := r.notes.loaded(load)
	if load.Err != nil {
		r.logFailed(load.Err)
	} else {
		r.logBad(fresh)
		r.logUnmatched(unmatched)
		if !r.shadow && !slices.Equal(before.Shadow, load.Shadow) {
			r.logShadows(load.Shadow)
		}
		if before.LastGood.IsZero() {
			s := r.Stats()
			r.logEmpty(&s)
			r.logAllShadow(&s)
		}
	}
	if r.hook != nil {
		r.hooked.add(load)
	}
}

// logFailed logs the first of several loads that fail.
func (r *Registry) logFailed(err error) {
	r.machine.mu.Lock()
	effect := r.machine.Fail(time.Now())
	r.machine.mu.Unlock()
	switch {
	case effect == rows.Nothing:
	case r.limits.Load() == nil:
		r.log.Error("registry: limits cannot be loaded yet", "error", err)
	default:
		r.log.Error("registry: limits could not be loaded, so the earlier limits stay in force", "error", err)
	}
}

// mostLogged bounds the rows that are logged at a time.
const mostLogged = 20

// logBad logs bad rows.
func (r *Registry) logBad(rows []RowError) {
	for i := range rows {
		if i == mostLogged {
			r.log.Warn("registry: further rows are bad, see Stats", "rows", len(rows)-i)
			return
		}
		r.log.Warn("registry: a row is bad", "error", &rows[i], "bucket", rows[i].Name, "row", rows[i].Row, "consequence", rows[i].Consequence)
	}
}

// remind logs all lasting problems again.
func (r *Registry) remind() {
	s := r.Stats()
	if !s.Off.IsZero() {
		r.log.Warn("registry: the switch is still off: every call passes", "for", time.Since(s.Off).Round(time.Second), "origin", s.Origin)
	}
	if s.Err != nil {
		r.log.Error("registry: limits still cannot be loaded, so the earlier limits stay in force", "age", s.Age.Round(time.Second), "error", s.Err)
	}
	r.remindLoss(&s.Loss)
	r.logEmpty(&s)
	r.remindShadows(&s)
	r.logBad(s.Rejected)
	r.logOutdated(s.Outdated)
	r.logUnmatched(s.Unmatched)
	r.logFaults(s.Faults)
}

// logEmpty logs that there are no limits, if calls pass then, or that all are off.
func (r *Registry) logEmpty(s *Stats) {
	switch unlimited := !r.unknown.refuse && r.unknown.limit == nil; {
	case s.Limits+s.Bad == 0 && unlimited:
		r.log.Warn("registry: there are no limits: every call passes")
	case s.Limits+s.Bad > 0 && s.Limits+s.Bad == s.Disabled:
		r.log.Warn("registry: every limit is off: its calls pass", "limits", s.Limits)
	}
}

// logOutdated logs rows that are not in force because a table has given later ones.
func (r *Registry) logOutdated(names []string) {
	if len(names) > 0 {
		r.log.Warn("registry: rows are earlier than others that a table has given, which stay in force; if the source lags behind, that ends by itself, else modify the rows, or reset their buckets",
			"rows", len(names), "buckets", first(names))
	}
}

// mind watches faults and losses every second, and logs lasting problems again, until Close.
func (r *Registry) mind() {
	const look = time.Second
	ticker := time.NewTicker(look)
	defer ticker.Stop()
	var looked time.Time
	for logged := time.Now(); ; {
		select {
		case now := <-ticker.C:
			r.logFaults(r.faults.listed(func(f *fault) bool { return !f.Since.Before(looked) && f.Since.Before(now) }))
			looked = now
			r.watchLoss(r.ctx)
			if now.Sub(logged) >= again {
				logged = now
				r.recheck(r.ctx)
				r.remind()
			}
		case <-r.ctx.Done():
			return
		}
	}
}
