package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/go-tokenbucket/tokenbucket/internal/group"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Rule is what decides about the calls of a limiter of [Following] at a time.
type Rule struct {
	// Limiter decides; nil if none does.
	Limiter *RateLimiter
	// Err is the error of every call if Limiter is nil. If both are nil, calls pass, as while a switch is off ([WithSwitch]).
	Err error
	// Watch, if Limiter is nil, is what the one who changes the rule calls Changed of then. Nil: no call waits for other members of a group meanwhile.
	Watch *Watch
}

// Rules have the rule in force for a limiter of [Following]. Two limiters with equal Rules follow the same rule, so the members of a group must have
// Rules that are comparable, such as pointers, else the error is [ErrInvalidConfig]. All methods are called concurrently.
type Rules interface {
	// Rule returns the rule in force. Every call asks for it, so it must be fast.
	Rule() Rule
	// Repair is called if the bucket of a rule's limiter is of another kind, bursty or warming up, with the error of the call. If it returns
	// nil, the call asks again.
	Repair(ctx context.Context, l *RateLimiter, cause error) error
}

// ErrSuperseded: another limiter is in force in place of this one ([RateLimiter.Supersede]). Nothing was taken.
var ErrSuperseded = errors.New("tokenbucket: superseded by another limiter")

// Following returns a limiter that decides each call by the rule in force at that time: for limits that are kept elsewhere and change while
// their limiters are in use, such as the rows of a table. It may be a member of groups. name is what its Name returns while no limiter is in force.
//
// If the rule changes while calls wait, whoever changes it calls [RateLimiter.Supersede] of the limiter that was in force. Then the rule in force is
// asked about the waiting calls, with what is left of their timeouts. Reservations that were granted keep their due times.
//
// Without a limiter in force, SetRate, State, Reset and the like return the rule's error, or [ErrInvalidConfig]. Penalize does nothing if calls pass.
func Following(name string, rules Rules) *RateLimiter {
	return &RateLimiter{following: &following{name: name, rules: rules}}
}

// following makes a limiter one of Following. It is never changed.
type following struct {
	name  string
	rules Rules
	floor Priority // its callers have this priority, or the one of the rule's limiter if that is lower
}

// rule returns the rule in force, with the limiter of the callers' priority.
func (f *following) rule() Rule {
	r := f.rules.Rule()
	if r.Limiter != nil && r.Limiter.priority < f.floor {
		r.Limiter = r.Limiter.ForPriority(f.floor)
	}
	return r
}

// limiter returns the limiter in force, or the error of an operation that needs one.
func (f *following) limiter() (*RateLimiter, error) {
	switch r := f.rule(); {
	case r.Limiter != nil:
		return r.Limiter, nil
	case r.Err != nil:
		return nil, r.Err
	}
	return nil, invalid(f.name, errors.New("no limit is in force"))
}

// inUse returns the limiter in force, for facts about it; nil if there is none.
func (l *RateLimiter) inUse() *RateLimiter {
	if l.following == nil {
		return l
	}
	return l.following.rule().Limiter
}

// decideFollowing decides a call by the rule in force, and again if another comes in force while it waits. The reservation of the verdict is
// complete.
func (l *RateLimiter) decideFollowing(ctx context.Context, v verb, permits int, timeout time.Duration) (got verdict, err error) {
	f, began, repaired := l.following, int64(-1), false
	var waited time.Duration
	for {
		r := f.rule()
		if r.Limiter == nil {
			return f.withoutLimiter(ctx, r.Err, v, permits, waited)
		}
		if now := r.Limiter.time.Micros(); began < 0 {
			began = now
		} else {
			waited = time.Duration(now-began) * time.Microsecond
		}
		left := max(0, timeout)
		if timeout != math.MaxInt64 {
			left -= waited
		}
		if now := r.Limiter; now.plain || now.following != nil {
			got, err = now.decide(ctx, v, permits, left)
		} else {
			got, err = now.decideObserved(ctx, v, permits, left, waited)
		}
		switch {
		case err == nil:
			if v != acquire {
				got.reservation = r.Limiter.complete(v, got, permits, left)
				if got.reservation.limiter != nil {
					got.reservation.limiter = l // its Close waits for the settlement
				}
			}
			got.wait += waited
			return got, nil
		case errors.Is(err, ErrSuperseded):
		case errors.Is(err, ErrInvalidConfig) && !repaired:
			repaired = true
			if err := f.rules.Repair(ctx, r.Limiter, err); err != nil {
				return got, err
			}
		default:
			return got, err
		}
	}
}

// withoutLimiter decides a call for which no limiter is in force.
func (f *following) withoutLimiter(ctx context.Context, refused error, v verb, permits int, waited time.Duration) (verdict, error) {
	switch {
	case permits < 1:
		return verdict{by: ByCheck}, fmt.Errorf("%w: bucket %q: permits %d: want at least 1", ErrInvalidPermits, f.name, permits)
	case ctx.Err() != nil:
		return verdict{by: ByCheck}, ctx.Err()
	case refused != nil:
		return verdict{by: ByCheck}, refused
	}
	got := verdict{granted: true, by: BySwitch, wait: waited}
	if v != acquire {
		got.reservation = new(Reservation)
	}
	return got, nil
}

// Supersede ends the waits of the limiter's callers, because by is in force in its place; nil if no limiter is. Callers that wait by a limiter of
// [Following] are decided by the rule in force then, in their order if by has the same bucket and priority. Others get [ErrSuperseded], now and
// for each later call, unless by has the same bucket and priority: then that decides. The bucket's time that the process has taken for the waiters stays
// theirs, with as many permits as fit into it by the new configuration, or goes back to the bucket (docs/consistency.md). Reservations that were granted,
// operations and settlements keep what they have.
//
// prepare, if not nil, is called before the waiting callers of l are decided by a limiter of the same bucket and priority: it may reset a bucket of
// another kind.
//
// A limiter that was superseded may supersede another one: then it decides again. A limiter of Following cannot be superseded; as by it stands for the
// limiter that its rule names.
//
// A limiter may supersede itself: for its callers that wait, another limiter may be in force. They ask for it, or get [ErrSuperseded].
func (l *RateLimiter) Supersede(by *RateLimiter, prepare func()) {
	if l.following != nil { // it has no callers of its own: they wait by the limiter in force
		return
	}
	if by != nil {
		if by = by.inUse(); by != nil {
			by.reinstate()
		}
	}
	l.supersede(by, prepare)
	for p := Normal; p <= Lowest; p++ {
		if from := l.made(p); from != nil && from != l {
			to := by
			if to != nil && to.priority < p && l.priority <= to.priority { // it was made for callers of a lower priority
				to = to.ForPriority(p)
			}
			from.supersede(to, nil)
		}
	}
}

// reinstate lets a limiter that was superseded decide again.
func (l *RateLimiter) reinstate() {
	for p := Normal; p <= Lowest; p++ {
		if of := l.made(p); of != nil {
			of.limiter.Coordinator.Reinstate(&of.limiter)
			of.groups.reinstate()
		}
	}
}

// made returns the limiter of a priority, if it is l or ForPriority has made it; else nil.
func (l *RateLimiter) made(p Priority) *RateLimiter {
	if p == l.priority {
		return l
	}
	if k := l.kin.Load(); k != nil {
		return k[p].Load()
	}
	return nil
}

func (l *RateLimiter) supersede(by *RateLimiter, prepare func()) {
	forGood := by == nil || l.made(by.priority) != by
	c := l.limiter.Coordinator
	succeeds := forGood && by != nil && by.limiter.Coordinator == c
	goesOn := succeeds && by.own.Kind == l.own.Kind && !l.limiter.Rarer(&by.limiter) // the next reply may show the new rate as that of before
	if succeeds {
		c.Supersede(&l.limiter, &by.limiter, prepare)
	} else {
		if prepare != nil {
			prepare()
		}
		c.Recall(&l.limiter, ErrSuperseded, forGood)
	}
	if s := l.share.Load(); s != nil {
		s.limiter.limiter.Coordinator.Recall(&s.limiter.limiter, ErrSuperseded, forGood)
		s.limiter.groups.supersede(forGood, false)
	}
	l.groups.supersede(forGood, goesOn)
}

// Watch is a rule without a limiter, for the calls of groups that wait for other members while it is in force. The zero value is ready for use. It must
// not be copied.
type Watch struct{ groups groups }

// Changed is called once, when another rule is in force. The calls of groups that wait are decided by the rules in force then.
func (w *Watch) Changed() { w.groups.supersede(true, false) }

// groups are the participants of groups that have a limiter as a member. The zero value has none.
type groups struct {
	mu         sync.Mutex
	of         []weak.Pointer[group.Participant]
	superseded bool // for good
}

// join adds a participant. That of a superseded limiter decides nothing.
func (g *groups) join(p *group.Participant) {
	g.mu.Lock()
	defer g.mu.Unlock()
	kept := g.of[:0]
	for _, other := range g.of {
		if other.Value() != nil {
			kept = append(kept, other)
		}
	}
	if g.of = append(kept, weak.Make(p)); g.superseded {
		p.Recall(ErrSuperseded, true, false)
	}
}

// reinstate lets the participants decide again.
func (g *groups) reinstate() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.superseded = false
	for _, p := range g.of {
		if p := p.Value(); p != nil {
			p.Reinstate()
		}
	}
}

// supersede ends the waits of the participants' callers. See [group.Participant.Recall].
func (g *groups) supersede(forGood, goesOn bool) {
	g.mu.Lock()
	g.superseded = g.superseded || forGood
	var all []*group.Participant
	for _, p := range g.of {
		if p := p.Value(); p != nil {
			all = append(all, p)
		}
	}
	g.mu.Unlock()
	for _, p := range all {
		p.Recall(ErrSuperseded, forGood, goesOn)
	}
}

// live is several whose members follow rules. The zero value has none that do.
type live struct {
	on      bool
	now     atomic.Pointer[several] // with the limiters in force; nil before the first call
	without []*Watch                // of those in force, the rules without a limiter
}

// resolved returns several with the limiters in force of those members that count, nil if no member does. missing is the error of a member that
// refuses every call: a group has it at once, a choice if no other member can grant the call.
func (g *several) resolved() (now *several, missing error) {
	var members []Member
	var without []*Watch
	for _, w := range g.members {
		f := w.limiter.following
		if f == nil {
			members = append(members, w)
			continue
		}
		r := f.rule()
		if r.Limiter != nil {
			members = append(members, weighted{limiter: r.Limiter, permits: w.permits, listed: w.limiter})
			continue
		}
		if r.Watch != nil {
			without = append(without, r.Watch)
		}
		if r.Err != nil && missing == nil {
			missing = &MemberError{Bucket: f.name, Err: r.Err}
		}
	}
	if len(members) == 0 {
		return nil, missing
	}
	now, err := g.withInForce(members, without)
	if err != nil {
		return nil, err
	}
	return now, missing
}

// withInForce returns several for the limiters in force. The last one is kept.
func (g *several) withInForce(members []Member, without []*Watch) (*several, error) {
	same := func(now *several) bool {
		return now != nil && now.has(members) && slices.Equal(now.live.without, without)
	}
	if now := g.live.now.Load(); same(now) {
		return now, nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	before := g.live.now.Load()
	if same(before) {
		return before, nil
	}
	now := new(several)
	now.live.without = without
	if err := now.init(g.choice, members); err != nil {
		return nil, err
	}
	now.lost = g.lost
	if before != nil {
		now.succeed(before)
	}
	g.live.now.Store(now)
	return now, nil
}

// succeed lets the participants take over from those of several whose limiters were in force before, if they have the same buckets.
func (g *several) succeed(before *several) {
	same := func(a, b weighted) bool {
		return a.limiter.limiter.Coordinator == b.limiter.limiter.Coordinator && a.permits == b.permits
	}
	if !slices.EqualFunc(g.members, before.members, same) {
		return
	}
	before.mu.Lock()
	defer before.mu.Unlock()
	for set, c := range before.counted {
		g.participant(set).Succeed(c.Participant)
	}
}

// askFollowing asks the limiters in force for permits, and again if others come in force while the call waits.
func (g *several) askFollowing(ctx context.Context, v verb, permits int, timeout time.Duration) (answer, error) {
	began, repaired := int64(-1), false
	var waited time.Duration
	for {
		now, missing := g.resolved()
		if missing != nil && (now == nil || g.choice == permit.All) {
			return answer{asked: g, refused: -1, by: ByCheck}, missing
		}
		if now == nil {
			return g.passes(ctx, permits, waited)
		}
		if micros := now.members[0].limiter.time.Micros(); began < 0 {
			began = micros
		} else {
			waited = time.Duration(micros-began) * time.Microsecond
		}
		left := max(0, timeout)
		if timeout != math.MaxInt64 {
			left -= waited
		}
		a, err := now.askInForce(ctx, v, permits, left, waited)
		switch {
		case err == nil:
			return a, nil
		case errors.Is(err, ErrSuperseded):
		case errors.Is(err, ErrInvalidConfig) && !repaired:
			repaired = true
			if !now.repair(ctx, err) {
				return a, err
			}
		default:
			return a, err
		}
	}
}

// passes decides a call for which no member counts.
func (g *several) passes(ctx context.Context, permits int, waited time.Duration) (answer, error) {
	a := answer{asked: g, refused: -1, by: ByCheck}
	if permits < 1 {
		return a, fmt.Errorf("%w: permits %d: want at least 1", ErrInvalidPermits, permits)
	}
	if err := ctx.Err(); err != nil {
		return a, err
	}
	a.granted, a.by, a.wait = true, BySwitch, waited
	return a, nil
}

// repair has the member repaired whose bucket is of another kind. It reports whether the call may ask again.
func (g *several) repair(ctx context.Context, err error) bool {
	var failed *MemberError
	if !errors.As(err, &failed) || failed.of == nil {
		return false
	}
	for _, w := range g.members {
		if w.limiter == failed.of && w.listed != nil && w.listed.following != nil {
			return w.listed.following.rules.Repair(ctx, w.limiter, failed.Err) == nil
		}
	}
	return false
}
