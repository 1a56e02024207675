package tokenbucket

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/group"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
)

// Member is a limiter in a [Group] or a [Choice]: a *[RateLimiter], or one that [Weighted] returns.
type Member interface{ asMember() weighted }

// weighted is a limiter and the number of its permits that one permit of the group costs.
type weighted struct {
	limiter *RateLimiter
	permits int64
	listed  *RateLimiter // the member whose rule's limiter or local share limiter is; nil otherwise
	local   bool         // limiter is a local share
}

// member returns the limiter as it was listed.
func (w weighted) member() *RateLimiter {
	if w.listed != nil {
		return w.listed
	}
	return w.limiter
}

func (w weighted) asMember() weighted { return w }

func (l *RateLimiter) asMember() weighted { return weighted{limiter: l, permits: 1} }

// Weighted returns a member from which a request for n permits takes n times permits. permits is at least 1.
func Weighted(l *RateLimiter, permits int) Member {
	return weighted{limiter: l, permits: int64(permits)}
}

// maxMembers bounds the members of a group.
const maxMembers = 32

// Group is several limits that a call must all pass: per second and per day, per upstream and per tenant. Each call is one decision. If one member
// refuses, nothing is taken from any of them. Otherwise all permits are taken at once, and the call waits until the last of them is due.
//
// A group is a participant of its own in each bucket, as another process would be. It has its own queue, first come first served, and takes permits
// no further ahead than others do (see [RateLimiter.Acquire]). So limiters of a member, and other groups with the same members, get their shares of
// the rate. Two groups cannot block each other, in whatever order they list their members.
//
// The decision is one atomic step if all members are on one store, and that is a MemoryStore, a Store of your own, or a Redis store of a single server.
// On a cluster or a ring the members' buckets must also share a slot ([WithSlot]). Otherwise the members are asked one after the other, the slowest
// first, and what some have granted goes back if another refuses. If another process has taken later permits by then, they cannot go back, and lapse:
// [Group.Lost] counts them.
//
// A member that is due before the others is used later than its time. So the bound on its permits in a window ([PayNow], [PayLater]) grows by its rate
// times the longest wait for another member, which is at most that member's look-ahead: a second, or the time of four of its permits if that is longer,
// and for a request of several permits the time of the others in addition. [Group.Reserve] is not bounded by a look-ahead.
//
// A member does not count while its switch is off ([WithSwitch]), if it is a shadow ([WithShadow]), or while its store is unavailable and its policy
// is [FailOpen]. With [LocalShare] its local share counts instead. The store timeout and the maximum number of waiters ([WithMaxWaiters]) are the smallest
// of the members'. Each member's priority counts in its own bucket.
//
// A grant is a [Decision] for the observers of all members, and a refusal for that of the member which refused. All methods are safe for concurrent use.
type Group struct {
	several
	lower lower[Group]
}

// All returns a group of limits that a call must all pass. It must have at least one member and at most 32, of different buckets and with the same clock
// ([WithClock]), else the error is [ErrInvalidConfig]. A limiter of [NewQuota] cannot be a member beside others: its permits would be used later than
// they are due, so more of them would fall into a window. Two names of one bucket on two stores are not recognised.
func All(members ...Member) (*Group, error) {
	g := new(Group)
	if err := g.init(permit.All, members); err != nil {
		return nil, err
	}
	return g, nil
}

// several is what Group and Choice share.
type several struct {
	choice  permit.Choice
	members []weighted
	maxWait time.Duration
	// observed: at least one member has an observer of decisions.
	observed bool
	live     live

	full atomic.Pointer[counted] // with all members; nil before it is used

	mu       sync.Mutex
	counted  map[uint64]*counted // by the members that count, as a set of bits
	degraded *several            // the last one in which members were replaced; nil before

	lost *atomic.Int64 // permits that lapsed, with those of degraded and live.now, and of those before them
}

// counted is the participant for the members that count, and their indexes.
type counted struct {
	*group.Participant
	indexes []int
	locks   []int // positions in indexes, in the order in which takeNow locks the buckets; nil if it does not apply
}

// init sets the members.
func (g *several) init(choice permit.Choice, members []Member) error {
	g.choice, g.maxWait, g.counted, g.lost = choice, math.MaxInt64, map[uint64]*counted{}, new(atomic.Int64)
	if n := len(members); n < 1 || n > maxMembers {
		return invalidGroup("", wanted("members", n, fmt.Sprintf("1 to %d", maxMembers)))
	}
	for i, m := range members {
		if isNil(m) {
			return invalidGroup("", wanted("member", i, "a limiter, not nil"))
		}
		w := m.asMember()
		if w.limiter == nil {
			return invalidGroup("", wanted("member", i, "a limiter, not nil"))
		}
		if w.permits < 1 || w.permits > maxExact {
			return invalidGroup(w.limiter.Name(), wanted("weight", w.permits, "1 to 2^53"))
		}
		if q := w.limiter.quota; q != nil {
			if w.permits != 1 {
				return invalidGroup(w.limiter.Name(), wanted("weight", w.permits, "1 for a quota"))
			}
			if choice == permit.All && len(members) > 1 { // a member's permits may be used later than they are due
				return invalidGroup(w.limiter.Name(), wanted("member", i, "no quota beside other members: more than its calls would fall into a window"))
			}
		}
		if f := w.limiter.following; f != nil {
			if !reflect.ValueOf(f.rules).Comparable() {
				return invalidGroup(f.name, wanted("rules", fmt.Sprintf("%T", f.rules), "a comparable type, such as a pointer"))
			}
			if slices.ContainsFunc(g.members, func(o weighted) bool { return o.limiter.following != nil && o.limiter.following.rules == f.rules }) {
				return invalidGroup(f.name, wanted("member", i, "each bucket once"))
			}
			g.live.on = true
			g.members = append(g.members, w)
			continue
		}
		for _, o := range g.members {
			if o.limiter.following != nil {
				continue
			}
			if sameBucket(w.limiter, o.limiter) {
				return invalidGroup(w.limiter.Name(), wanted("member", i, "each bucket once"))
			}
			if !sameClock(w.limiter, o.limiter) {
				return invalidGroup(w.limiter.Name(), wanted("clock", i, "the same for all members"))
			}
		}
		g.members = append(g.members, w)
		g.maxWait = min(g.maxWait, w.limiter.maxWait)
		g.observed = g.observed || w.limiter.observer != nil && w.limiter.observer.Decision != nil
	}
	if g.live.on { // those in force must fit together, now and later
		_, missing := g.resolved()
		if errors.Is(missing, ErrInvalidConfig) {
			return missing
		}
	}
	return nil
}

// has reports whether several has these members.
func (g *several) has(members []Member) bool {
	return slices.EqualFunc(g.members, members, func(w weighted, m Member) bool { return w == m.asMember() })
}

// patience returns the timeout of Try.
func (g *several) patience() time.Duration {
	most := g.maxWait
	for _, w := range g.members {
		if w.limiter.following == nil {
			continue
		}
		if now := w.limiter.inUse(); now != nil {
			most = min(most, now.maxWait)
		}
	}
	return most
}

func invalidGroup(bucket string, err error) error {
	if bucket == "" {
		return fmt.Errorf("%w: group: %w", ErrInvalidConfig, err)
	}
	return fmt.Errorf("%w: group: %w", ErrInvalidConfig, &MemberError{Bucket: bucket, Err: err})
}

// sameBucket reports whether two limiters use one bucket.
func sameBucket(a, b *RateLimiter) bool {
	if a.limiter.Coordinator == b.limiter.Coordinator {
		return true
	}
	return a.limiter.Coordinator.Key == b.limiter.Coordinator.Key && sameStore(a, b)
}

func sameStore(a, b *RateLimiter) bool {
	return reflect.ValueOf(a.store).Comparable() && reflect.ValueOf(b.store).Comparable() && a.store == b.store
}

func sameClock(a, b *RateLimiter) bool {
	x, y := a.limiter.Coordinator.Clock, b.limiter.Coordinator.Clock
	return a.time.System() && b.time.System() || reflect.ValueOf(x).Comparable() && reflect.ValueOf(y).Comparable() && x == y
}

// MemberError is the error of a call of a [Group] or a [Choice] that one member has caused. Match Err with errors.Is.
type MemberError struct {
	// Bucket is the name of the member.
	Bucket string
	Err    error

	of *RateLimiter // the member whose store has failed; nil if none has
}

func (e *MemberError) Error() string {
	return fmt.Sprintf("tokenbucket: member %q: %v", e.Bucket, e.Err)
}

// Unwrap returns Err.
func (e *MemberError) Unwrap() error { return e.Err }

// participant returns the participant for the members in a set of bits.
func (g *several) participant(set uint64) *counted {
	whole := set == 1<<len(g.members)-1
	if c := g.full.Load(); whole && c != nil {
		return c
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.counted[set]
	if c == nil {
		c = &counted{Participant: g.newParticipant(set)}
		for i, w := range g.members {
			if set&(1<<i) != 0 {
				w.limiter.groups.join(c.Participant)
				c.indexes = append(c.indexes, i)
			}
		}
		for _, w := range g.live.without {
			w.groups.join(c.Participant)
		}
		lower := slices.ContainsFunc(c.indexes, func(i int) bool { return g.members[i].limiter.priority != Normal }) // the queue knows its floor
		if n := len(c.indexes); c.Immediate && len(c.Parts) == 1 && n <= maxNow && !lower {
			c.locks = byKey(n, func(i int) string { return g.members[c.indexes[i]].limiter.limiter.Coordinator.Key })
		}
		if g.counted[set] = c; whole {
			g.full.Store(c)
		}
	}
	return c
}

// newParticipant returns a participant for the members in a set of bits.
func (g *several) newParticipant(set uint64) *group.Participant {
	c := group.Config{Choice: g.choice, Immediate: true, MaxWaiters: math.MaxInt, Timeout: math.MaxInt64,
		NewSession: func() permit.Session { return new(redisbucket.Session) }, Lost: g.lost}
	var limiters []*RateLimiter
	for i, w := range g.members {
		if set&(1<<i) == 0 {
			continue
		}
		l := w.limiter
		limiters = append(limiters, l)
		c.Members = append(c.Members, group.Member{Limiter: &l.limiter, Weight: w.permits})
		c.Clock, c.MaxWaiters = l.limiter.Coordinator.Clock, min(c.MaxWaiters, l.limiter.MaxWaiters)
		if l.memory == nil {
			c.Immediate, c.Timeout = false, min(c.Timeout, l.limiter.Coordinator.Timeout)
		}
	}
	c.Parts = partsOfGroup(g.choice, limiters, c.Members)
	if c.Immediate {
		c.Timeout = 0
	}
	c.Failure = func(member int, err error) error {
		name := limiters[member].Name()
		var already *MemberError
		if errors.As(err, &already) {
			return err
		}
		return &MemberError{name, storeError(name, err), limiters[member]}
	}
	deciders := make([]decider, len(c.Parts))
	c.Direct = true
	for k, part := range c.Parts {
		store := limiters[part[0]].store
		deciders[k].store, deciders[k].traits = store, traitsOf(store)
		c.Direct = c.Direct && deciders[k].traits.bounded
	}
	trips := tripsOf(c.Parts, limiters)
	c.Decide = func(until time.Time, part int, b *permit.Group) error {
		trip := trips[part]
		if trip == nil {
			return deciders[part].decide(until, b)
		}
		began := clock.Mono()
		err := deciders[part].decide(until, b)
		t := engine.Trip{Elapsed: clock.Mono() - began, Err: err}
		for _, m := range b.Members {
			t.Requests, t.LockWait = t.Requests+len(m.Requests), max(t.LockWait, m.Outcome.LockWait)
		}
		trip(t)
		return err
	}
	return group.New(c)
}

// tripsOf returns for each part what observes its round trips: that of its first member that has an observer; nil if none has, or in memory.
func tripsOf(parts [][]int, limiters []*RateLimiter) []func(engine.Trip) {
	trips := make([]func(engine.Trip), len(parts))
	for k, part := range parts {
		for _, i := range part {
			if l := limiters[i]; trips[k] == nil && l.memory == nil {
				trips[k] = l.limiter.OnTrip
			}
		}
	}
	return trips
}

// partsOfGroup returns the members that one store decides in one step, by their indexes: those of one store and, if that has several servers, of one
// slot. The part with the slowest member comes first, because it refuses most; those of a choice stay in the order of the list, because of several members
// that are due at once the first is taken.
func partsOfGroup(choice permit.Choice, limiters []*RateLimiter, members []group.Member) (parts [][]int) {
	slots := make([]string, len(limiters))
	for i, l := range limiters {
		if t := traitsOf(l.store); t.slot != nil {
			slots[i] = t.slot(l.limiter.Coordinator.Key)
		}
		at := slices.IndexFunc(parts, func(part []int) bool { return sameStore(limiters[part[0]], l) && slots[part[0]] == slots[i] })
		if at < 0 {
			at = len(parts)
			parts = append(parts, nil)
		}
		parts[at] = append(parts[at], i)
	}
	if choice == permit.Any {
		return parts
	}
	pace := func(part []int) (slowest float64) {
		for _, i := range part {
			slowest = max(slowest, limiters[i].own.interval*float64(members[i].Weight))
		}
		return slowest
	}
	slices.SortStableFunc(parts, func(a, b []int) int {
		switch x, y := pace(a), pace(b); {
		case x > y:
			return -1
		case x < y:
			return 1
		}
		return 0
	})
	return parts
}

// answer is the outcome of a call of several.
type answer struct {
	granted bool
	wait    time.Duration
	over    time.Duration // how much less a refused reservation would have to wait, to be granted; 0 if it is the wait less the timeout
	by      Decider
	sent    time.Duration      // when the stores were asked, by clock.Mono; 0 if they were not
	asked   *several           // whose members were asked
	indexes []int              // of those members
	p       *group.Participant // nil if no bucket was asked
	call    *group.Call        // of a reservation
	members []group.Outcome    // by indexes; nil if they are unknown
	member  int                // of a Choice: which of indexes has granted the call
	refused int                // the index of the member that refused first; -1 if none did
}

// ask asks for permits that are due within a timeout.
func (g *several) ask(ctx context.Context, v verb, permits int, timeout time.Duration) (answer, error) {
	if g.live.on {
		return g.askFollowing(ctx, v, permits, timeout)
	}
	return g.askInForce(ctx, v, permits, timeout, 0)
}

// askInForce asks for permits of members that do not follow rules. waited is how long the call has waited by other members.
func (g *several) askInForce(ctx context.Context, v verb, permits int, timeout, waited time.Duration) (answer, error) {
	var began time.Duration
	if g.observed {
		began = clock.Mono()
	}
	a, err := g.askStores(ctx, v, permits, timeout)
	if err != nil && ctx.Err() == nil {
		a, err = g.askOthers(ctx, v, permits, timeout, a, err)
	}
	a.wait += waited
	if g.observed && !errors.Is(err, ErrSuperseded) { // otherwise it is not decided yet
		g.observe(ctx, permits, a, err, waited+clock.Mono()-began)
	}
	return a, err
}

// askOthers asks again after a failure of a store, with what stands for its members by their failure policies. Several stores may have failed: each
// time at least one member is left out.
func (g *several) askOthers(ctx context.Context, v verb, permits int, timeout time.Duration, a answer, err error) (answer, error) {
	sent := a.sent
	var again func(*several) (answer, error)
	again = func(other *several) (answer, error) {
		spent := max(0, clock.Mono()-sent-g.longestTimeout())
		a, err := other.askStores(ctx, v, permits, max(0, timeout)-spent)
		if err != nil && ctx.Err() == nil {
			return other.fallback(ctx, a, err, again)
		}
		return a, err
	}
	return g.fallback(ctx, a, err, again)
}

// askStores asks the stores of the members that count.
func (g *several) askStores(ctx context.Context, v verb, permits int, timeout time.Duration) (answer, error) {
	n, maxWait := int64(permits), min(max(0, timeout.Microseconds()), maxExact)
	a := answer{asked: g, refused: -1, by: ByCheck}
	if err := ctx.Err(); err != nil {
		return a, err
	}
	set, err := g.check(n, maxWait)
	if err != nil {
		return a, err
	}
	if set == 0 {
		a.granted, a.by = true, BySwitch
		return a, nil
	}
	c := g.participant(set)
	a.p, a.indexes, a.by = c.Participant, c.indexes, ByStore
	if maxWait == 0 && g.giveWay(v, &a) {
		return a, nil
	}
	most, deadline := maxWait, deadlineOf(ctx)
	if v == acquire && c.locks != nil && c.Idle() && g.takeNow(c, n, maxWait, &a) {
		if a.granted {
			return a, nil
		}
		return a, g.hopeless(n, maxWait, &a, deadline)
	}
	if deadline != 0 {
		most = min(most, max(0, (deadline-clock.Mono()).Microseconds()))
	}
	if m, wait, refused := a.p.Refuses(n, most); refused {
		a.by, a.wait, a.refused = BySnapshot, time.Duration(wait)*time.Microsecond, a.indexes[m]
		if v == reserve {
			a.members = make([]group.Outcome, len(a.indexes))
			a.members[m] = group.Outcome{Seen: a.p.Seen(m), Wait: wait, Refused: true}
		}
		return a, g.hopeless(n, maxWait, &a, deadline)
	}
	a.sent = clock.Mono()
	q := group.NewCall(n, maxWait, deadline, v == reserve)
	r := a.p.Wait(ctx, q, a.p.Submit(ctx, q))
	a.granted, a.members = r.Granted, r.Members
	a.wait, a.over = time.Duration(r.Wait)*time.Microsecond, time.Duration(r.Over)*time.Microsecond
	switch {
	case r.Err != nil:
		return a, r.Err
	case r.Granted:
		if a.member = r.Member; v == reserve {
			a.call = q
		} else {
			a.p.Recycle(q)
		}
		return a, nil
	}
	a.p.Recycle(q)
	a.refused = a.indexes[max(0, r.Member)]
	return a, g.hopeless(n, maxWait, &a, deadline)
}

// giveWay refuses a request that does not wait at all, and leaves stored permits to callers of a higher priority. See RateLimiter.giveWay. A choice
// refuses it if all of its members would.
func (g *several) giveWay(v verb, a *answer) (yields bool) {
	for at, i := range a.indexes {
		w := g.members[i]
		l := w.limiter
		if l.priority == Normal || !l.limiter.Coordinator.Yields() {
			if g.choice == permit.Any {
				return false
			}
			continue
		}
		if !yields {
			yields, a.refused, a.wait = true, i, time.Duration(l.effective().interval)*time.Microsecond
		}
		if v == reserve {
			if a.members == nil {
				a.members = make([]group.Outcome, len(a.indexes))
			}
			a.members[at] = group.Outcome{Seen: l.limiter.Coordinator.View.Seen(), Wait: int64(l.effective().interval), Refused: true}
		}
	}
	if yields {
		a.by = ByPriority
	}
	return yields
}

// check returns the members that count, as a set of bits, or the error of a request that must not be sent. A member of a choice that cannot grant the
// request does not count: another may. If all of them cannot, the error is the first one's.
func (g *several) check(n, maxWait int64) (set uint64, err error) {
	if n < 1 {
		return 0, fmt.Errorf("%w: permits %d: want at least 1", ErrInvalidPermits, n)
	}
	var cannot error
	for i, w := range g.members {
		counts, err := w.check(n, maxWait)
		switch {
		case err == nil && counts:
			set |= 1 << i
		case err != nil && g.choice == permit.All && !errors.Is(err, ErrNeverGranted):
			return 0, err
		case err != nil && cannot == nil:
			cannot = err
		}
	}
	if g.choice == permit.Any && set != 0 {
		cannot = nil
	}
	return set, cannot
}

// check reports whether a member counts, and returns the error of a request for n permits of the group that it cannot grant.
func (w weighted) check(n, maxWait int64) (counts bool, err error) {
	l := w.limiter
	if n > maxExact/w.permits {
		return false, &MemberError{Bucket: l.Name(), Err: l.limiter.Overflow(n)}
	}
	if err := l.checkPermits(n * w.permits); err != nil {
		return false, &MemberError{Bucket: l.Name(), Err: err}
	}
	if l.shadow || l.enabled != nil && !l.enabled() {
		return false, nil
	}
	if s := l.effective(); s.Kind == bursty && float64(n*w.permits) <= s.max {
		return true, nil
	}
	return true, w.never(n, maxWait, nil)
}

// never returns the [ErrNeverGranted] of a member. See [RateLimiter.neverGranted].
func (w weighted) never(n, maxWait int64, reply *engine.Result) error {
	if err := w.limiter.neverGranted(n*w.permits, maxWait, reply); err != nil {
		return &MemberError{Bucket: w.limiter.Name(), Err: err}
	}
	return nil
}

// hopeless returns the error of a request that was refused, and not only because the permits are in demand. See RateLimiter.hopeless.
func (g *several) hopeless(n, maxWait int64, a *answer, deadline time.Duration) error {
	if a.refused < 0 {
		return nil
	}
	w := g.members[a.refused]
	never := w.never(n, maxWait, &engine.Result{Wait: a.wait.Microseconds()})
	if g.choice == permit.Any {
		for _, i := range a.indexes {
			if i != a.refused && never != nil && g.members[i].never(n, maxWait, &engine.Result{Wait: unknownWait}) == nil {
				never = nil
			}
		}
	}
	if never != nil {
		return never
	}
	if a.wait.Microseconds() <= maxWait && deadline != 0 && deadline-clock.Mono() < a.wait {
		return &MemberError{Bucket: w.limiter.Name(), Err: &WaitError{w.limiter.Name(), int(n * w.permits), a.wait, context.DeadlineExceeded}}
	}
	return nil
}

// unknownWait is the wait of a member of a choice that did not decide the refusal: whether it is warm is not known.
const unknownWait = -2

// longestTimeout returns the longest store timeout of a member.
func (g *several) longestTimeout() (longest time.Duration) {
	for _, w := range g.members {
		longest = max(longest, w.limiter.limiter.Coordinator.Timeout)
	}
	return longest
}

// fallback decides by the failure policies of the members whose store is unavailable. It returns the error unchanged if one of them is FailClosed, or
// if the error is of another kind. A member of a choice that fails in another way counts as one that refuses.
func (g *several) fallback(ctx context.Context, a answer, err error, ask func(*several) (answer, error)) (answer, error) {
	var failed *MemberError
	unavailable := away(err) || notAsked(err)
	if !errors.As(err, &failed) || !unavailable && g.choice == permit.All {
		return a, err
	}
	at := slices.IndexFunc(g.members, func(w weighted) bool { return w.limiter == failed.of })
	if at < 0 {
		return a, err
	}
	if !unavailable {
		return g.goOn(a, err, at, ask)
	}
	cause := g.members[at].limiter.limiter.Coordinator
	var left []Member
	replaced := false
	for i, w := range g.members {
		l := w.limiter
		c := l.limiter.Coordinator
		if l.shadow || l.enabled != nil && !l.enabled() { // it does not count, whatever its store does
			if g.choice == permit.All {
				left = append(left, w)
			}
			continue
		}
		if c.Health == nil || i != at && c.Down() == nil && c.Health != cause.Health { // a store without a monitor does not fail
			left = append(left, w)
			continue
		}
		if l.policy == FailClosed {
			if g.choice == permit.Any {
				replaced = true
				continue // the others may grant it
			}
			return a, &MemberError{l.Name(), failed.Err, l}
		}
		var local *RateLimiter
		v, failure := l.fallback(ctx, verdict{}, failed.Err, func(part *RateLimiter) (verdict, error) {
			local = part
			return verdict{granted: true}, nil
		})
		switch {
		case failure != nil:
			return a, &MemberError{l.Name(), failure, l}
		case local != nil:
			left = append(left, weighted{local, w.permits, w.member(), true})
		case v.granted && g.choice == permit.Any:
			return answer{granted: true, by: ByPolicy, asked: g, indexes: []int{i}, refused: -1, members: []group.Outcome{{Taken: true}}}, nil
		}
		replaced = true
	}
	switch {
	case !replaced:
		return a, err
	case len(left) == 0 && g.choice == permit.All:
		return answer{granted: true, by: ByPolicy, asked: g, refused: -1}, nil
	case len(left) == 0:
		return a, err
	}
	other, invalid := g.without(left)
	if invalid != nil {
		return a, fmt.Errorf("%w; and no local share: %w", err, invalid)
	}
	a, err = ask(other)
	if errors.Is(err, ErrNeverGranted) { // the whole bucket could grant it in time
		return answer{by: ByPolicy, asked: g, refused: at}, nil
	}
	return a, err
}

// goOn asks the members of a choice other than one that has failed. Its error is returned if none of them grants the call.
func (g *several) goOn(a answer, err error, failed int, ask func(*several) (answer, error)) (answer, error) {
	var left []Member
	for i, w := range g.members {
		if i != failed {
			left = append(left, w)
		}
	}
	if len(left) == 0 {
		return a, err
	}
	other, invalid := g.without(left)
	if invalid != nil {
		return a, err
	}
	if b, other := ask(other); other == nil && b.granted {
		return b, nil
	}
	return a, err
}

// without returns several for other members. The last one is kept, because an outage lasts for many calls.
func (g *several) without(members []Member) (*several, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if d := g.degraded; d != nil && d.has(members) {
		return d, nil
	}
	d := new(several)
	d.live.without = g.live.without
	if err := d.init(g.choice, members); err != nil {
		return nil, err
	}
	d.lost, g.degraded = g.lost, d
	return d, nil
}

// observe calls the observers of the members that a decision is about: all of them for a grant of a group and for an error, the one that refused for a
// refusal, the one that was taken from for a choice.
func (g *several) observe(ctx context.Context, permits int, a answer, err error, elapsed time.Duration) {
	for _, w := range g.members {
		l := w.limiter
		if l.observer == nil || l.observer.Decision == nil {
			continue
		}
		by, concerned := a.by, true
		if err == nil {
			by, concerned = a.about(w)
		}
		if concerned {
			l.observer.Decision(ctx, Decision{Bucket: l.Name(), Label: l.label, Permits: permits * int(w.permits), Granted: err == nil && a.granted, Err: err,
				By: by, Wait: a.wait, Elapsed: elapsed, Priority: l.priority})
		}
	}
}

// about reports whether a decision is about a member, and what decided for that member.
func (a *answer) about(w weighted) (by Decider, concerned bool) {
	at := slices.IndexFunc(a.asked.members, func(asked weighted) bool { return asked.member() == w.member() })
	by = a.by
	if at < 0 || a.asked.members[at].local {
		by = ByPolicy
	}
	switch {
	case !a.granted:
		return by, a.refused >= 0 && at == a.refused
	case a.asked.choice == permit.Any:
		return by, a.chosen() == w.member()
	case at >= 0 && !slices.Contains(a.indexes, at) && by != ByPolicy:
		return BySwitch, !w.limiter.shadow // a shadow is not asked
	}
	return by, true
}

// Try is [Group.TryAcquire] of one permit with the shortest timeout that a member has for it ([WithMaxWait]).
func (g *Group) Try(ctx context.Context) (bool, error) { return g.TryAcquire(ctx, 1, g.patience()) }

// TryAcquire takes permits of all members and waits until they are due, if that is within the timeout. Otherwise it returns false and takes nothing.
// In all else it is [RateLimiter.TryAcquire]. An error that a member has caused is a [*MemberError].
func (g *Group) TryAcquire(ctx context.Context, permits int, timeout time.Duration) (bool, error) {
	a, err := g.ask(ctx, acquire, permits, timeout)
	return err == nil && a.granted, err
}

// Acquire takes permits of all members, waits until they are due, however long that is, and returns the time waited for them. Its errors are those of
// [Group.TryAcquire] except [ErrNeverGranted].
func (g *Group) Acquire(ctx context.Context, permits int) (waited time.Duration, err error) {
	a, err := g.ask(ctx, acquire, permits, math.MaxInt64)
	if err != nil || !a.granted {
		return 0, err
	}
	return a.wait, nil
}

// Reserve takes permits of all members, whenever they fall due, and returns at once. See [RateLimiter.Reserve].
func (g *Group) Reserve(ctx context.Context, permits int) (*GroupReservation, error) {
	return g.TryReserve(ctx, permits, math.MaxInt64)
}

// TryReserve takes permits of all members if the last of them falls due within the timeout, and returns at once. Otherwise the reservation is not OK,
// and says which member refused. See [RateLimiter.TryReserve].
func (g *Group) TryReserve(ctx context.Context, permits int, timeout time.Duration) (*GroupReservation, error) {
	return g.reserve(ctx, permits, timeout)
}

func (g *several) reserve(ctx context.Context, permits int, timeout time.Duration) (*GroupReservation, error) {
	a, err := g.ask(ctx, reserve, permits, timeout)
	if err != nil {
		return nil, err
	}
	r := &GroupReservation{answer: a, permits: int64(permits)}
	if !a.granted {
		r.retryAfter = cmp.Or(a.over, max(0, a.wait-max(0, timeout)))
	}
	return r, nil
}

// Members returns the limiters of the members, in the order in which they were listed: for their State, SetRate and Penalize.
func (g *Group) Members() []*RateLimiter { return g.limiters() }

func (g *several) limiters() (all []*RateLimiter) {
	for _, w := range g.members {
		all = append(all, w.limiter)
	}
	return all
}

// Lost returns how many permits this group has taken and could not give back. They lapse. On one store that happens if other processes have taken
// permits behind those of a caller who gave up, and no other caller of this group wanted them before they were due. Members on several stores or
// slots also lose permits to refusals. A refund whose reply is lost counts. Of one that gives some of its permits back, those that are missing count; a part
// of a permit counts as a whole one. [Observer.Lost] receives the same numbers, by member.
func (g *Group) Lost() int64 {
	permits := g.lost.Load()
	g.lower.each(func(other *Group) { permits += other.Lost() })
	return permits
}

// Close waits for the settlements of [GroupReservation.SettleLater] that have begun, as long as the context allows. It does not close the members.
func (g *Group) Close(ctx context.Context) error { return g.close(ctx) }

func (g *several) close(ctx context.Context) error {
	for _, w := range g.members {
		if err := w.limiter.settled(ctx); err != nil {
			return fmt.Errorf("close: %w", err)
		}
	}
	return nil
}
