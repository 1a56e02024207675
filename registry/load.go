package registry

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry/internal/rows"
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
		r.learnPauses(ctx)
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

// content is a row for package rows. Its Limit is not changed.
type content struct {
	*Limit
	line int // in a file, when the content was new; else 0
}

func (c content) Same(o content) bool { return c.Row == o.Row && c.same(o.Limit) }
func (c content) Off() bool           { return c.Disabled }

// place identifies the row in messages.
func (c content) place() string {
	if c.line != 0 {
		return fmt.Sprint(c.Row, ":", c.line)
	}
	return c.Row
}

// SameBucket ignores the fields that no store keeps, so that a change of them needs no new version.
func (c content) SameBucket(o content) bool {
	return c.same(o.Limit, "disabled", "max_wait", "concurrent_wait", "penalty", "priority")
}

// apply puts a table in force.
func (r *Registry) apply(ctx context.Context, table Table, load *Load) {
	before := r.limits.Load()
	if before == nil {
		before = new(book)
	}
	load.Rejected = slices.Clone(table.Rejected)
	load.Rows = len(table.Limits) + len(table.Rejected)
	given := rows.Table[content]{Rows: r.valid(table, load), Differs: r.differing(before)}
	for i := range load.Rejected {
		bad := &load.Rejected[i]
		b := rows.Bad{ID: bad.Row, Name: bad.Name, Shadow: bad.Shadow}
		if strings.Contains(strings.TrimSuffix(b.Name, "*"), "*") {
			b.Name = "" // it matches no call
		}
		if table.Lines != nil {
			if b.ID = ""; !(nameValue{}).valid(&Limit{Name: b.Name}) {
				b.Name = ""
			}
		}
		given.Bad = append(given.Bad, b)
	}
	r.machine.mu.Lock()
	step := r.machine.Load(time.Now(), &given)
	loss := r.machine.Loss()
	r.machine.mu.Unlock()
	next := make(map[string]*entry, len(step.Rules))
	for name, rule := range step.Rules {
		next[name] = r.enact(before.rows[name], rule)
		load.count(rule)
	}
	for _, twin := range step.Twins {
		c, first := given.Rows[twin.Row].Content, given.Rows[twin.Before].Content
		load.Rejected = append(load.Rejected, RowError{Row: c.place(), Name: c.Name, Field: "name", Value: fmt.Sprintf("%.80q", c.Name), Shadow: c.Shadow,
			Want: fmt.Sprintf("one row for each name: row %s is newer, has a larger key, or comes first", first.place())})
	}
	for i := range step.Verdicts {
		r.explain(&load.Rejected[i], &step.Verdicts[i])
	}
	load.Held = step.Held
	slices.Sort(load.Shadow)
	slices.Sort(load.Outdated)
	r.logEvents(step.Events, load, &loss, before.rows == nil)
	after := &book{next, newWide(next, r.parts)}
	for name, was := range before.rows {
		was.over.Store(next[name] != was) // before any call finds the next one, so that no entry of a key takes the place of a later one
	}
	r.limits.Store(after)
	r.forgetSlots(next)
	r.faults.do(func() { r.faults.Loaded(after.asks) })
	r.countUnmatched(next, load)
	if before.rows != nil {
		r.handOver(ctx, before, after)
	}
	r.renewShadows(ctx, next)
}

// valid returns the valid rows of a table, and adds the others to load.Rejected.
func (r *Registry) valid(table Table, load *Load) []rows.Row[content] {
	valid := make([]rows.Row[content], 0, len(table.Limits))
	for i := range table.Limits {
		c := &table.Limits[i]
		row := rows.Row[content]{Name: c.Name, ID: c.Row, Version: c.Version, Content: content{Limit: c}}
		if table.Lines != nil {
			row.ID, row.Content.line = "", table.Lines[i]
		}
		if rule := r.machine.Rule(c.Name); rule.Valid() && rule.Content.Same(row.Content) {
			row.Content.Limit = rule.Content.Limit
		} else if err := r.try(c, c.Version); err != nil {
			err.Shadow = c.Shadow
			load.Rejected = append(load.Rejected, *err)
			continue
		} else {
			own := c.clone()
			row.Content.Limit = &own
		}
		if slot := r.slots[c.Name]; slot != nil {
			if version, ok := slot.Version(); ok {
				r.machine.Recall(c.Name, version)
			}
		}
		valid = append(valid, row)
	}
	return valid
}

// differing returns the versions of the buckets, windows and concurrencies that have other contents than their rows. The row was changed within the
// resolution of the table's times, or another program has set them, or another process has loaded a later row.
func (r *Registry) differing(b *book) map[string]int64 {
	differs := map[string]int64{}
	note := func(name string, e *entry) {
		if l := e.limiter.Load(); l != nil {
			if there := l.InForce(); !there.Own {
				differs[name] = max(differs[name], there.Version)
			}
		}
	}
	for name, e := range b.rows {
		note(name, e)
		if e.slot != nil {
			if there, differ := e.slot.Differs(e.version); differ {
				differs[name] = max(differs[name], there)
			}
		}
	}
	r.keys.all(func(key *entry) {
		if name := key.of.limit.Name; b.rows[name] == key.of {
			note(name, key)
		}
	})
	return differs
}

// enact returns the entry of a rule. It is the earlier entry, was, if nothing has changed for calls.
func (r *Registry) enact(was *entry, rule *rows.Rule[content]) *entry {
	if !rule.Valid() {
		return r.enactBad(was, rule)
	}
	if was != nil && was.bad {
		was = nil // it never was valid
	}
	if was != nil && was.version == rule.Bucket && was.content == rule.Content {
		return was
	}
	e := &entry{limit: *rule.Content.Limit, content: rule.Content, version: rule.Bucket, wait: rule.Content.MaxWait, slot: r.slot(rule.Content.Limit)}
	e.unmatched = r.unmatchedBy(&e.limit)
	if was == nil {
		return e
	}
	e.follower.Store(was.follower.Load())
	if e.version == was.version && e.wait == was.wait && e.limit.ConcurrentWait == was.limit.ConcurrentWait && e.limit.Priority == was.limit.Priority &&
		!e.limit.Disabled && e.content.SameBucket(was.content) {
		e.limiter.Store(was.limiter.Load())
		e.with = was.waiting()
	}
	return e
}

// enactBad returns the entry of a row that never was valid.
func (r *Registry) enactBad(was *entry, rule *rows.Rule[content]) *entry {
	if was != nil && was.bad && was.limit.Row == rule.ID && was.limit.Shadow == rule.Shadow {
		return was
	}
	e := &entry{bad: true, name: rule.Name}
	if d := r.badRows.limit; d != nil {
		e.limit, e.version, e.wait = *d, d.Version, d.MaxWait
	}
	e.limit.Name, e.limit.Row, e.limit.Shadow = unique(badPrefix+rule.Name), rule.ID, rule.Shadow
	return e
}

// explain sets the consequence of a bad row.
func (r *Registry) explain(bad *RowError, v *rows.Verdict[content]) {
	switch v.Fate {
	case rows.Renamed:
		bad.Consequence = fmt.Sprintf("the last good limit of the row, %s for %.80q, stays in force", v.Rule.Content.Limit, v.Rule.Name)
	case rows.Nameless:
		bad.Consequence = "it limits nothing, since it has no name"
		if bad.Name != "" {
			bad.Consequence = "it limits nothing: such a name matches no call"
		}
	case rows.Other:
		bad.Consequence = fmt.Sprintf("row %.80s is in force for the name", v.Rule.Content.Row)
	case rows.Kept:
		bad.Consequence = fmt.Sprintf("its last good limit, %s, stays in force; in a process that starts now, %s", v.Rule.Content.Limit, r.consequence(bad))
	default:
		bad.Consequence = r.consequence(bad)
	}
}

// count counts a rule that is in force after the load.
func (l *Load) count(rule *rows.Rule[content]) {
	if !rule.Valid() {
		l.Bad++
		if rule.Shadow {
			l.Shadow = append(l.Shadow, rule.Name)
		}
		return
	}
	l.Limits++
	switch rule.State {
	case rows.RowBad:
		l.Kept++
	case rows.Outdated, rows.Overruled:
		l.Outdated = append(l.Outdated, rule.Name)
	}
	switch {
	case rule.Content.Disabled:
		l.Disabled++
	case rule.Content.Shadow:
		l.Shadow = append(l.Shadow, rule.Name)
	}
}

// logEvents counts and logs what a load has changed.
func (r *Registry) logEvents(events []rows.Event[content], load *Load, loss *rows.Loss, first bool) {
	var outdated []string
	for i := range events {
		e := &events[i]
		switch e.Kind {
		case rows.Began:
			if load.Added++; !first {
				r.log.Info("registry: a limit is new", "bucket", e.Name, "row", e.After.Content.Row, "limit", e.After.Content.String(), "version", e.After.Bucket)
			}
		case rows.Changed:
			load.Changed++
			level := slog.LevelInfo
			if e.After.Content.Disabled || e.After.Content.Shadow {
				level = slog.LevelWarn // less is limited than before
			}
			r.log.Log(r.ctx, level, "registry: a limit changed", "bucket", e.Name, "row", e.After.Content.Row, "from", e.Before.Content.String(),
				"to", e.After.Content.String(), "version", e.After.Bucket)
		case rows.Put:
			r.log.Warn("registry: the bucket has differed from its row for two loads; the row is put in force again", "bucket", e.Name,
				"row", e.After.Content.Row, "row says", e.After.Content.String(), "version", e.After.Bucket)
		case rows.Turned:
			if e.After.State == rows.Outdated || e.After.State == rows.Overruled {
				outdated = load.Outdated
			}
			if e.After.State == rows.RowBad && e.After.ID == "" { // else the bad row tells it
				r.log.Warn("registry: the item of a limit is bad, or may be one whose name cannot be read; its last good limit stays in force",
					"bucket", e.Name, "limit", e.After.Content.String())
			}
		case rows.Ended:
			if !e.Before.Valid() {
				continue
			}
			if load.Removed++; load.Removed <= mostLogged {
				r.log.Info("registry: a limit is gone", "bucket", e.Name, "row", e.Before.Content.Row)
			}
		case rows.SourceBack:
			r.log.Info("registry: limits are loaded again", "limits", load.Limits)
		default:
			r.logLoss(e.Kind, loss)
		}
	}
	r.logOutdated(outdated)
	if load.Removed > mostLogged {
		r.log.Info("registry: further limits are gone", "limits", load.Removed-mostLogged)
	}
}
