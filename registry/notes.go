package registry

import (
	"sync"
	"time"
)

// notes are what is remembered of loads, and of what was told.
type notes struct {
	mu       sync.Mutex
	stats    Stats
	began    time.Time // of the last load
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
	n.began = time.Now()
	return false, nil
}

// age is the time since the last load began.
func (n *notes) age() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Since(n.began)
}

// again is how often a trouble is told that lasts.
const again = time.Minute

// loaded keeps the figures of a load. Of the bad rows it returns those that were not told.
func (n *notes) loaded(load *Load) (failed, recovered bool, fresh []RowError) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	n.stats.Loads++
	n.stats.LastLoad, n.stats.Err = now, load.Err
	failed, recovered = load.Err != nil && !n.failing, load.Err == nil && n.failing
	n.failing = load.Err != nil
	if load.Err != nil {
		n.stats.Failures++
		return failed, recovered, nil
	}
	n.stats.LastGood = now
	n.stats.Limits, n.stats.Bad, n.stats.Rejected = load.Limits, load.Bad, load.Rejected
	seen := map[string]bool{}
	for _, e := range load.Rejected {
		text := e.Error() + e.Consequence
		seen[text] = true
		if !n.reported[text] {
			fresh = append(fresh, e)
		}
	}
	n.reported = seen
	return failed, recovered, fresh
}

// note keeps the figures of a load and tells of it, of each trouble once; remind tells of it again.
func (r *Registry) note(load *Load) {
	failed, recovered, fresh := r.notes.loaded(load)
	if failed {
		r.log.Error("registry: limits could not be loaded; what was before stays in force", "error", load.Err)
	}
	if recovered {
		r.log.Info("registry: limits are loaded again", "limits", load.Limits)
	}
	r.tellBad(fresh)
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
	if s.Err != nil {
		r.log.Error("registry: limits still cannot be loaded; what was before stays in force", "age", s.Age.Round(time.Second), "error", s.Err)
	}
	r.tellBad(s.Rejected)
}

// mind looks after what lasts.
func (r *Registry) mind() {
	ticker := time.NewTicker(again)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			r.remind()
		case <-r.ctx.Done():
			return
		}
	}
}
