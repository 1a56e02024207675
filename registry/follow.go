package registry

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry/internal/rows"
)

// RefusedError is the error of a limiter of [Registry.Limiter] while every call of its name is refused without a bucket: the row's rate is 0
// (gate.ByZero), the row is bad (gate.ByBadRow), or the name has no row (gate.ByUnknown). It matches tokenbucket.ErrNeverGranted. Of a row without
// a rate (Limit.NoRate, gate.ByLimit), which only Registry.Enter can enter, it matches tokenbucket.ErrInvalidConfig.
type RefusedError struct {
	Name string
	By   gate.Decider
}

func (e *RefusedError) Error() string {
	if e.By == gate.ByLimit {
		return fmt.Sprintf("registry: %v: %.80q: the row has no rate: want Registry.Enter", tokenbucket.ErrInvalidConfig, e.Name)
	}
	return fmt.Sprintf("registry: %v: %.80q: every call is refused (%v)", tokenbucket.ErrNeverGranted, e.Name, e.By)
}

// Unwrap returns tokenbucket.ErrNeverGranted or tokenbucket.ErrInvalidConfig.
func (e *RefusedError) Unwrap() error {
	if e.By == gate.ByLimit {
		return tokenbucket.ErrInvalidConfig
	}
	return tokenbucket.ErrNeverGranted
}

// Limiter returns a limiter for the calls of a name that follows its row for as long as it is used, also as a member of groups: the rate, a warm-up, a
// quota, the priority, a shadow, the switch, and a row that is removed, bad or new. A load puts a changed row in force for its calls that wait, too
// (tokenbucket.RateLimiter.Supersede). Reservations that were granted keep their due times.
//
// Calls pass while Enter lets them pass without a bucket: the switch is off, the row is disabled, or the name has no row and unknown names pass. In a
// group such a member does not count. While Enter refuses every call, the error is a [*RefusedError]. A window and a concurrency are for Enter only: the
// limiter is the row's rate alone. It calls no hook of [WithBypassHook].
//
// The error is one of the limiter's constructor.
func (r *Registry) Limiter(name string) (*tokenbucket.RateLimiter, error) {
	f, err := r.find(name)
	if err != nil {
		return nil, err
	}
	if e := f.entry; e != nil && e.of == nil && e.row() == name {
		return r.followerOf(e), nil
	}
	return tokenbucket.Following(name, follower{r, name}), nil
}

// followerOf returns the limiter that follows a row by the row's own name.
func (r *Registry) followerOf(e *entry) *tokenbucket.RateLimiter {
	if e.follower.Load() == nil {
		e.follower.CompareAndSwap(nil, tokenbucket.Following(e.row(), follower{r, e.row()}))
	}
	return e.follower.Load()
}

// follower implements tokenbucket.Rules for a name.
type follower struct {
	*Registry
	name string
}

// Rule implements tokenbucket.Rules.
func (f follower) Rule() tokenbucket.Rule {
	of, err := f.find(f.name)
	for err == nil && of.limiter == nil {
		var rule tokenbucket.Rule
		if rule.Watch = f.watch(&of).current(); !of.pass {
			rule.Err = &RefusedError{f.name, of.by}
		}
		before := of
		if of, err = f.find(f.name); of.entry == before.entry && of.by == before.by { // so a change from now on is one that the watch is for
			return rule
		}
	}
	return tokenbucket.Rule{Limiter: of.limiter, Err: err}
}

// Repair implements tokenbucket.Rules.
func (f follower) Repair(ctx context.Context, l *tokenbucket.RateLimiter, cause error) error {
	of, err := f.find(f.name)
	if err != nil || of.limiter == nil || of.limiter != l.ForPriority(of.limiter.Priority()) {
		return err // another row is in force
	}
	_, err = f.replace(ctx, f.name, of, cause)
	return err
}

// watch is for the calls of groups that wait while a rule without a limiter is in force. The zero value is ready for use.
type watch struct {
	now atomic.Pointer[tokenbucket.Watch] // nil if no call has asked for it since the last change
}

// current returns what is told of the next change.
func (w *watch) current() *tokenbucket.Watch {
	for {
		if now := w.now.Load(); now != nil {
			return now
		}
		w.now.CompareAndSwap(nil, new(tokenbucket.Watch))
	}
}

// changed lets the calls that wait be decided by the rules in force.
func (w *watch) changed() {
	if w.now.Load() != nil {
		w.now.Swap(nil).Changed()
	}
}

// watch returns the watch of a rule without a limiter.
func (r *Registry) watch(f *found) *watch {
	switch {
	case f.by == gate.BySwitch:
		return &r.off
	case f.entry != nil:
		return &f.entry.watch
	}
	return &r.unlisted
}

// handOver lets the calls that wait be decided by the rows of a load. before is nil for the first one.
func (r *Registry) handOver(ctx context.Context, before, after *book) {
	if before == nil {
		return
	}
	fresh, split := false, map[*entry]bool{} // split: some of their names have a row of their own now
	for name := range after.rows {
		if before.rows[name] == nil {
			fresh = true
			split[before.wide.find(strings.TrimSuffix(name, "*"))] = true
		}
	}
	var all sync.WaitGroup
	defer all.Wait()
	for name, was := range before.rows {
		by := after.rows[name]
		switch {
		case split[was]:
			r.supersede(ctx, &all, was, nil)
		case by != was:
			r.supersede(ctx, &all, was, by)
		}
	}
	if fresh {
		r.unnamed.all(func(e *entry) { r.supersede(ctx, &all, e, nil) })
		r.unlisted.changed()
	}
}

// supersede ends the waits of an entry's calls, in goroutines of all. They are decided by another entry; by is nil if that depends on their names.
func (r *Registry) supersede(ctx context.Context, all *sync.WaitGroup, was, by *entry) {
	was.watch.changed()
	r.move(ctx, all, was, by)
	if !was.limit.PerKey {
		return
	}
	r.keys.all(func(key *entry) {
		switch {
		case key.of != was:
		case by != nil && by.limit.PerKey && by.limits():
			next, _ := r.keys.of(by, key.limit.Name) // in place of key, or of nothing
			r.move(ctx, all, key, next)
		default:
			r.move(ctx, all, key, nil)
		}
	})
}

// move ends the waits of the calls of one bucket in a goroutine of all. Until they have asked again, calls that come are held back.
func (r *Registry) move(ctx context.Context, all *sync.WaitGroup, was, by *entry) {
	if was.waiting().empty() {
		r.supersedeEntry(ctx, was, by) // it does not block, except for the reset of a bucket
		return
	}
	asked, to := make(chan struct{}), cmp.Or(by, was)
	to.moving.Store(&asked)
	all.Go(func() {
		r.supersedeEntry(ctx, was, by)
		to.moving.CompareAndSwap(&asked, nil)
		close(asked)
	})
}

// drop ends the waits of the calls of entries that a cache has dropped. They find entries of their own again.
func (r *Registry) drop(entries map[string]*entry) {
	for _, e := range entries {
		e.over.Store(true)
		r.supersedeEntry(r.ctx, e, nil)
	}
}

// waiting returns the calls of Enter that wait by the entry's limiter.
func (e *entry) waiting() *crowd {
	if e.with != nil {
		return e.with
	}
	return &e.crowd
}

// supersedeEntry implements supersede for one bucket.
func (r *Registry) supersedeEntry(ctx context.Context, was, by *entry) {
	if by == nil || by == was || by.waiting() != was.waiting() {
		resume := was.waiting().end(ctx)
		defer resume()
	}
	l := was.limiter.Load()
	if l == nil {
		return
	}
	if was == by {
		l.Supersede(l, nil)
		return
	}
	if by != nil && by.limits() && by.limit.Name == was.limit.Name {
		if next, err := r.limiterOf(by); err == nil {
			if next != l {
				l.Supersede(next, r.prepare(ctx, next, was, by))
			}
			return
		}
	}
	was.limiter.CompareAndSwap(l, nil) // the entry may be used again
	l.Supersede(nil, nil)
}

// limits reports whether a limiter decides about the calls of an entry with a row.
func (e *entry) limits() bool { return !e.bad && !e.limit.Disabled && e.limit.Rate != 0 }

// prepare returns a function that resets the bucket of a row which has got or lost its warm-up, so that calls that wait find it of their kind; else
// nil. See replace, too.
func (r *Registry) prepare(ctx context.Context, next *tokenbucket.RateLimiter, was, by *entry) func() {
	if (was.limit.Warmup == 0) == (by.limit.Warmup == 0) || r.shadows(&by.limit) {
		return nil
	}
	return func() {
		r.log.Warn("registry: the bucket is of another kind than its row; it is reset", "bucket", by.limit.Name, "row", by.limit.Row)
		if err := r.renew(ctx, next, &by.limit); err != nil {
			r.log.Debug("registry: the bucket could not be reset", "bucket", by.limit.Name, "error", err)
		}
	}
}

// limiterOf returns the limiter of an entry, and makes it if there is none yet.
func (r *Registry) limiterOf(e *entry) (*tokenbucket.RateLimiter, error) {
	if l := e.limiter.Load(); l != nil {
		return l, nil
	}
	l, err := r.limiter(&e.limit, e.version, e.limiterOptions()...)
	if err != nil {
		return nil, err
	}
	if !e.limiter.CompareAndSwap(nil, l) {
		if other := e.limiter.Load(); other != nil {
			return other, nil
		}
	}
	return l, nil
}

// watchSwitch looks at the switch until Close.
func (r *Registry) watchSwitch() {
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			r.lookAtSwitch()
		case <-r.ctx.Done():
			return
		}
	}
}

// lookAtSwitch logs if the switch was turned. While it is off, the calls that wait pass; else those of groups are told that it is on.
func (r *Registry) lookAtSwitch() {
	position, origin := rows.On, ""
	if !r.sw.Enabled() {
		position = rows.Off
	}
	if o, ok := r.sw.(interface{ Origin() string }); ok {
		origin = o.Origin()
	}
	r.machine.mu.Lock()
	effect := r.machine.Look(time.Now(), position, origin)
	r.machine.mu.Unlock()
	switch effect {
	case rows.SwitchOff:
		r.log.Warn("registry: the switch is off: every call passes", "origin", origin)
	case rows.SwitchOn:
		r.log.Warn("registry: the switch is on: calls are limited", "origin", origin)
	}
	if position == rows.On {
		r.off.changed() // at each look: it may have been off in between
	} else if effect != rows.Nothing {
		r.recallAll()
	}
}

// recallAll lets all calls that wait ask for the rule in force.
func (r *Registry) recallAll() {
	recall := func(e *entry) { r.supersedeEntry(r.ctx, e, e) }
	for _, e := range r.limits.Load().rows {
		recall(e)
	}
	r.keys.all(recall)
	r.unnamed.all(recall)
}
