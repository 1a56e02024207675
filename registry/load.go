package registry

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"
)

// Reload loads the table now. Concurrent callers share a load, unless it is given up because the ctx of its caller ends. After an error the
// earlier limits stay in force. Reload returns after the hook has returned ([WithHook]), unless an earlier call of the hook is still running.
func (r *Registry) Reload(ctx context.Context) error {
	err := r.load(ctx)
	r.callHook()
	return err
}

// load loads the table, unless another load has begun since the call.
func (r *Registry) load(ctx context.Context) error {
	asked := time.Now()
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if done, err := r.notes.begin(asked); done {
		return err
	}
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	began := time.Now()
	slow := time.AfterFunc(slowLoad, r.logSlow)
	table, err := r.source.Load(ctx)
	if slow.Stop() {
		r.slow.Store(false)
	}
	load := Load{Took: time.Since(began), Err: err}
	switch {
	case err == nil:
		r.apply(ctx, table, &load)
	case r.ctx.Err() != nil: // closed
		return err
	case caller.Err() != nil: // the caller gave up, which is no failure of the source
		r.notes.undo()
		return err
	}
	r.note(&load)
	if err == nil {
		r.settle(ctx)
	}
	return err
}

// slowLoad is the time after which a load is logged as slow.
const slowLoad = 5 * time.Second

// logSlow logs that a load takes long, unless the load before did, too.
func (r *Registry) logSlow() {
	if !r.slow.Swap(true) {
		r.log.Warn("registry: a load takes long and goes on; the earlier limits stay in force meanwhile", "for", slowLoad, "timeout", r.timeout)
	}
}

// apply puts a table in force.
func (r *Registry) apply(ctx context.Context, table Table, load *Load) {
	var old map[string]*entry
	if before := r.limits.Load(); before != nil {
		old = before.rows
	}
	next := make(map[string]*entry, len(table.Limits))
	load.Rejected = slices.Clone(table.Rejected)
	for i := range table.Limits {
		c := &table.Limits[i]
		if _, twice := next[c.Name]; twice {
			load.Rejected = append(load.Rejected, RowError{Row: c.Row, Name: c.Name, Field: "name", Value: fmt.Sprintf("%q", c.Name), Want: "a name of its own"})
			continue
		}
		was := old[c.Name]
		if was != nil && was.bad {
			was = nil
		}
		e, err := r.follow(was, c)
		if err != nil {
			load.Rejected = append(load.Rejected, *err)
			continue
		}
		next[c.Name] = e
		r.logChange(was, e, load, old == nil)
	}
	load.Rows = len(table.Limits) + len(table.Rejected)
	r.keep(old, next, load)
	before := r.limits.Swap(&book{next, newWide(next, r.parts)})
	r.forgetSlots(next)
	r.faults.drop(func(f *Fault) bool { return f.Name != "" && next[f.Name] == nil })
	load.Limits = len(next) - load.Bad
	r.countShadows(next, load)
	r.countUnmatched(next, load)
	r.renewShadows(ctx, next)
	r.handOver(ctx, before, r.limits.Load())
}

// logChange counts and logs a row that is new or has changed.
func (r *Registry) logChange(was, e *entry, load *Load, first bool) {
	level := slog.LevelInfo
	if e.limit.Disabled || e.limit.Shadow {
		level = slog.LevelWarn // less is limited than before
	}
	switch {
	case e == was:
	case was != nil:
		load.Changed++
		r.log.Log(r.ctx, level, "registry: a limit changed", "bucket", e.limit.Name, "row", e.limit.Row, "from", was.limit.String(), "to", e.limit.String(), "version", e.version)
	default:
		if load.Added++; !first {
			r.log.Info("registry: a limit is new", "bucket", e.limit.Name, "row", e.limit.Row, "limit", e.limit.String(), "version", e.version)
		}
	}
}

// unversioned are the keys of fields that no store keeps, so that a change of them needs no new version.
var unversioned = []string{"disabled", "max_wait", "concurrent_wait", "penalty", "priority"}

// follow returns the entry of a row. If the row has not changed, it is the earlier entry, was.
func (r *Registry) follow(was *entry, c *Limit) (*entry, *RowError) {
	e := &entry{limit: c.clone(), version: c.Version, wait: c.MaxWait, slot: r.slot(c)}
	if was != nil {
		e.follower.Store(was.follower.Load())
		if was.limit.same(c, unversioned...) {
			e.version = r.dispute(was)
			if e.version == was.version {
				if c.Row == was.limit.Row && was.limit.same(c) {
					return was, nil
				}
				if e.wait == was.wait && c.Priority == was.limit.Priority && !c.Disabled {
					e.limiter.Store(was.limiter.Load())
					e.with = was.waiting()
				}
			}
		} else { // also if the time of modification has not risen: it may count whole seconds, and clocks are set
			e.version = max(c.Version, was.version+1)
		}
	} else if version, ok := r.past.get(c.Name); ok {
		e.version = max(c.Version, version+1)
	} else if e.slot != nil { // the version was dropped, but the slot was not
		if version, ok := e.slot.Version(); ok {
			e.version = max(c.Version, version+1)
		}
	}
	if err := r.try(c, e.version); err != nil {
		err.Shadow = c.Shadow
		return nil, err
	}
	e.unmatched = r.unmatchedBy(c)
	return e, nil
}

// dispute returns the version that an unchanged row needs. Another configuration may stay in force in the bucket: the row was changed twice
// within one second of a coarse clock, or in the hour that a clock repeats at the end of summer time, and no process that loaded the
// change is left. After two consecutive loads with such a difference the row gets a higher version, and takes effect.
func (r *Registry) dispute(e *entry) int64 {
	l := e.limiter.Load()
	if l == nil {
		return r.disputeKeys(e)
	}
	there := l.InForce()
	if there.Own {
		e.disputed = 0
		return e.version
	}
	if e.disputed++; e.disputed < 2 {
		return e.version
	}
	r.log.Warn("registry: the bucket has differed from its row for two loads; the row is put in force again", "bucket", e.limit.Name, "row", e.limit.Row,
		"bucket's rate", there.Rate, "row says", e.limit.String(), "version", there.Version+1)
	return there.Version + 1
}

// keep decides about the names whose rows are bad, and counts the limits that are no longer in the table.
func (r *Registry) keep(old, next map[string]*entry, load *Load) {
	rows := map[string]*entry{} // entries that are not among the next, by row
	named := map[string]int{}   // number of limits of one row: a file has one name for all its rows
	for name, e := range old {
		if named[e.limit.Row]++; next[name] == nil {
			rows[e.limit.Row] = e
		}
	}
	for row, n := range named {
		if n > 1 || row == "" {
			delete(rows, row)
		}
	}
	for i := range load.Rejected {
		r.rule(&load.Rejected[i], old, next, rows, load)
	}
	var gone []string
	for name := range old {
		if next[name] == nil {
			gone = append(gone, name)
		}
	}
	has := func(name string) bool { return next[name] != nil }
	event := r.lost.load(time.Now(), maps.Keys(old), gone, len(next), has)
	r.logLoss(event)
	if event == lossHeld {
		load.Held = len(gone)
		for _, name := range gone {
			if next[name] = old[name]; old[name].bad {
				load.Bad++
			}
		}
		return
	}
	for _, name := range gone {
		e := old[name]
		if e.bad {
			continue
		}
		if load.Removed++; load.Removed <= mostLogged {
			r.log.Info("registry: a limit is gone", "bucket", name, "row", e.limit.Row)
		}
		r.past.put(name, e.version)
	}
	if load.Removed > mostLogged {
		r.log.Info("registry: further limits are gone", "limits", load.Removed-mostLogged)
	}
}

// rule decides about the name of a bad row: its last valid limit stays in force; if there is none, WithBadRows decides.
func (r *Registry) rule(bad *RowError, old, next, rows map[string]*entry, load *Load) {
	name, was := bad.Name, old[bad.Name]
	if strings.Contains(strings.TrimSuffix(name, "*"), "*") {
		name = "" // it matches no call
	}
	if was == nil || was.bad {
		if e := rows[bad.Row]; e != nil && !e.bad { // the row had another name, or its name cannot be read now
			next[e.limit.Name] = e
			load.Kept++
			bad.Consequence = fmt.Sprintf("the last good limit of the row, %s for %.80q, stays in force", e.limit.String(), e.limit.Name)
		}
	}
	switch e := next[name]; {
	case name == "" && bad.Consequence != "":
	case name == "":
		if bad.Consequence = "it limits nothing, since it has no name"; bad.Name != "" {
			bad.Consequence = "it limits nothing: such a name matches no call"
		}
	case e != nil && !e.bad && e.limit.Row != bad.Row:
		bad.Consequence = fmt.Sprintf("row %.80s is in force for the name", e.limit.Row)
	case was != nil && !was.bad:
		if e == nil {
			next[name] = was
			load.Kept++
		}
		bad.Consequence = fmt.Sprintf("its last good limit, %s, stays in force; in a process that starts now, %s", was.limit.String(), r.consequence(bad))
	case e == nil:
		if was == nil || was.limit.Shadow != bad.Shadow {
			was = &entry{bad: true}
			if d := r.badRows.limit; d != nil {
				was.limit, was.version, was.wait = *d, d.Version, d.MaxWait
			}
			was.limit.Name, was.limit.Row, was.limit.Shadow = name, bad.Row, bad.Shadow
		}
		next[name] = was
		load.Bad++
		bad.Consequence = r.consequence(bad)
	default:
		bad.Consequence = r.consequence(bad)
	}
}
