package registry

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// Reload asks the source now. Many callers share a load. On an error everything stays as it was.
func (r *Registry) Reload(ctx context.Context) error {
	asked := time.Now()
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	r.mu.Lock()
	if r.began.After(asked) {
		defer r.mu.Unlock()
		return r.stats.Err
	}
	r.began = time.Now()
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	began := time.Now()
	table, err := r.source.Load(ctx)
	load := Load{Took: time.Since(began), Err: err}
	if err == nil {
		r.apply(table, &load)
	} else if r.ctx.Err() != nil {
		return err // closed
	}
	r.note(&load)
	return err
}

// apply puts a table in force.
func (r *Registry) apply(table Table, load *Load) {
	old := r.limits.Load()
	first := old == nil
	if first {
		old = &map[string]*entry{}
	}
	next := make(map[string]*entry, len(table.Limits))
	load.Rejected = slices.Clone(table.Rejected)
	for i := range table.Limits {
		c := &table.Limits[i]
		if _, twice := next[c.Name]; twice {
			load.Rejected = append(load.Rejected, RowError{Row: c.Row, Name: c.Name, Field: "name", Value: fmt.Sprintf("%q", c.Name), Want: "a name of its own"})
			continue
		}
		was := (*old)[c.Name]
		e, err := r.follow(was, c)
		if err != nil {
			load.Rejected = append(load.Rejected, *err)
			continue
		}
		next[c.Name] = e
		switch {
		case e == was:
		case was != nil:
			load.Changed++
			r.log.Info("registry: a limit changed", "bucket", c.Name, "row", c.Row, "from", was.limit.describe(), "to", c.describe(), "version", e.version)
		default:
			if load.Added++; !first {
				r.log.Info("registry: a limit is new", "bucket", c.Name, "row", c.Row, "limit", c.describe(), "version", e.version)
			}
		}
	}
	load.Rows = len(table.Limits) + len(table.Rejected)
	r.keep(*old, next, load)
	r.limits.Store(&next)
	load.Limits = len(next)
}

// follow returns the entry for a row: what was, if nothing of it changed.
func (r *Registry) follow(was *entry, c *Limit) (*entry, *RowError) {
	e := &entry{limit: *c, version: c.Version, wait: c.wait()}
	if was != nil {
		if was.limit.sameLimiter(c) {
			e.version = r.dispute(was)
			if e.version == was.version {
				if c.Disabled == was.limit.Disabled && c.Cache == was.limit.Cache && c.Row == was.limit.Row {
					return was, nil
				}
				if e.wait == was.wait {
					e.limiter.Store(was.limiter.Load())
				}
			}
		} else { // whatever its time says: seconds are coarse, and clocks change
			e.version = max(c.Version, was.version+1)
		}
	} else if version, ok := r.past[c.Name]; ok {
		e.version = max(c.Version, version+1)
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	if !c.Disabled {
		if _, err := r.limiter(c, e.version); err != nil {
			return nil, &RowError{Row: c.Row, Name: c.Name, Err: err}
		}
	}
	return e, nil
}

// dispute returns the version that an unchanged row should have. Something else may be in force in the bucket for good: the
// row was changed within a second, or in the hour that a clock repeats, and nobody is left who saw it. What two loads in a
// row find so is settled by the table.
func (r *Registry) dispute(e *entry) int64 {
	l := e.limiter.Load()
	if l == nil {
		return e.version
	}
	own, there := l.Config(), l.InForce()
	if own.Version = there.Version; own == there {
		e.disputed = 0
		return e.version
	}
	if e.disputed++; e.disputed < 2 {
		return e.version
	}
	r.log.Warn("registry: the bucket follows something else than its row; the row wins", "bucket", e.limit.Name, "row", e.limit.Row,
		"bucket's rate", there.Rate, "row's", own.Rate, "version", there.Version+1)
	return there.Version + 1
}

// keep keeps the last good limit of rows that are bad now, and counts those that are gone.
func (r *Registry) keep(old, next map[string]*entry, load *Load) {
	names, rows := map[string]bool{}, map[string]bool{}
	for i := range load.Rejected {
		names[load.Rejected[i].Name] = true
		if row := load.Rejected[i].Row; row != "" {
			rows[row] = true
		}
	}
	for name, e := range old {
		if next[name] != nil {
			continue
		}
		if names[name] || rows[e.limit.Row] {
			next[name] = e
			load.Kept++
			continue
		}
		load.Removed++
		r.past[name] = e.version
		r.log.Info("registry: a limit is gone", "bucket", name, "row", e.limit.Row)
	}
}

// note keeps the figures of a load and tells of it, of each trouble once.
func (r *Registry) note(load *Load) {
	r.mu.Lock()
	now := time.Now()
	r.stats.Loads++
	r.stats.LastLoad, r.stats.Err = now, load.Err
	failed, recovered := load.Err != nil && !r.failing, load.Err == nil && r.failing
	r.failing = load.Err != nil
	if load.Err != nil {
		r.stats.Failures++
	} else {
		r.stats.LastGood = now
		r.stats.Limits, r.stats.Rejected = load.Limits, load.Rejected
	}
	var fresh []RowError
	if load.Err == nil {
		seen := map[string]bool{}
		for _, e := range load.Rejected {
			seen[e.Error()] = true
			if !r.reported[e.Error()] {
				fresh = append(fresh, e)
			}
		}
		r.reported = seen
	}
	r.mu.Unlock()
	if failed {
		r.log.Error("registry: limits could not be loaded; what was before stays in force", "error", load.Err)
	}
	if recovered {
		r.log.Info("registry: limits are loaded again", "limits", load.Limits)
	}
	for i := range fresh {
		r.log.Error("registry: a row was rejected; what was before stays in force", "error", &fresh[i])
	}
	if r.hook != nil {
		r.hook(*load)
	}
}
