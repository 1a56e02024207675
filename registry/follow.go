package registry

import (
	"context"
	"fmt"
	"strings"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
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
	if e := f.entry; e != nil && e.limit.Name == name && e.of == nil && !e.unnamed {
		return r.followerOf(e), nil
	}
	return tokenbucket.Following(name, follower{r, name}), nil
}

// followerOf returns the limiter that follows a row by the row's own name.
func (r *Registry) followerOf(e *entry) *tokenbucket.RateLimiter {
	if e.follower.Load() == nil {
		e.follower.CompareAndSwap(nil, tokenbucket.Following(e.limit.Name, follower{r, e.limit.Name}))
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
	switch {
	case err != nil:
		return tokenbucket.Rule{Err: err}
	case of.limiter != nil:
		return tokenbucket.Rule{Limiter: of.limiter}
	case of.pass:
		return tokenbucket.Rule{Watch: f.watch(&of)}
	}
	return tokenbucket.Rule{Err: &RefusedError{f.name, of.by}, Watch: f.watch(&of)}
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

// watch returns the watch of a rule without a limiter.
func (r *Registry) watch(f *found) *tokenbucket.Watch {
	switch {
	case f.by == gate.BySwitch:
		return nil // all names pass, so no group waits
	case f.entry != nil:
		return &f.entry.watch
	}
	return r.unlisted.Load()
}

// handOver lets the calls that wait be decided by the rows of a load. before is nil for the first one.
func (r *Registry) handOver(ctx context.Context, before, after *book) {
	if before == nil {
		return
	}
	for name, was := range before.rows {
		if e := after.rows[name]; e != was {
			r.supersede(ctx, was, e)
		}
	}
	fresh := false
	for name := range after.rows {
		if before.rows[name] != nil {
			continue
		}
		fresh = true
		if e := before.wide.find(strings.TrimSuffix(name, "*")); e != nil && after.rows[e.limit.Name] == e {
			r.supersede(ctx, e, e) // some of its names have a row of their own now
		}
	}
	if fresh {
		r.unnamed.all(func(e *entry) { r.supersede(ctx, e, nil) })
		r.unlisted.Swap(new(tokenbucket.Watch)).Changed()
	}
}

// supersede ends the waits of an entry's calls, because another is in force; nil if none is known. They are decided by the rows in force.
func (r *Registry) supersede(ctx context.Context, was, by *entry) {
	if was != by {
		was.watch.Changed()
	}
	r.supersedeEntry(ctx, was, by)
	if !was.limit.PerKey {
		return
	}
	r.keys.all(func(key *entry) {
		switch {
		case key.of != was:
		case by == was:
			r.supersedeEntry(ctx, key, key)
		case by != nil && by.limit.PerKey && by.limits():
			r.supersedeEntry(ctx, key, r.keys.of(by, key.limit.Name))
		default:
			r.supersedeEntry(ctx, key, nil)
		}
	})
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

// lookAtSwitch is the time between two looks at the switch for the sake of the calls that wait.
const lookAtSwitch = 50 * time.Millisecond

// passWaiting lets the calls that wait pass when the switch is off, until Close.
func (r *Registry) passWaiting() {
	ticker := time.NewTicker(lookAtSwitch)
	defer ticker.Stop()
	for looks := 0; ; looks++ {
		select {
		case <-ticker.C:
			switch {
			case r.sw.Enabled():
				looks = -1
			case looks < 2 || looks%32 == 0: // again and again: a call may have found the switch on, and begun to wait since
				r.recallAll()
			}
		case <-r.ctx.Done():
			return
		}
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
