package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// verb is what a caller does with its permits.
type verb uint8

const (
	acquire verb = iota // waits until they are due
	await               // waits, and may settle them
	reserve             // returns at once
)

// String returns acquire, await or reserve.
func (v verb) String() string { return [...]string{"acquire", "await", "reserve"}[v] }

// verdict is the outcome of a call for permits. It is passed in registers, as long as it has no more than four fields.
type verdict struct {
	granted     bool
	by          Decider       // see Decision.By
	wait        time.Duration // see Decision.Wait
	reservation *Reservation  // of reserve, and of a grant to await; nil if no bucket was asked
}

// ask asks for permits that are due within a timeout. All calls for permits come here: TryAcquire with its timeout, Acquire without one, and
// Reserve and TryReserve, which do not wait for the due time.
//
// It takes five steps. check validates the request, and giveWay bounds that of a lower priority. shortcut decides it without the queue, if it
// can; for a MemoryStore that is takeNow. enqueue makes a call of it, and Wait blocks until the call has a result. verdict returns the
// result, with an error if no state of the bucket could grant the request in time.
func (l *RateLimiter) ask(ctx context.Context, v verb, permits int, timeout time.Duration) (verdict, error) {
	n, maxWait := int64(permits), min(max(0, timeout.Microseconds()), maxExact)
	if off, err := l.check(ctx, n, maxWait); off || err != nil {
		return passedBy(off), err
	}
	if l.priority != Normal {
		yields := false
		if maxWait, yields = l.giveWay(v, n, maxWait); yields {
			return l.yielded(v), nil
		}
	}
	got, decided := verdict{}, false
	if l.memory != nil {
		got, decided = l.takeNow(v, n, maxWait)
	} else {
		got, decided = l.shortcut(ctx, v, n, maxWait)
	}
	switch {
	case !decided:
	case got.granted:
		return got, nil
	default:
		return got, l.hopeless(ctx, n, maxWait, got.wait)
	}
	q, answered := l.enqueue(ctx, v, n, maxWait)
	r := l.limiter.Coordinator.Wait(ctx, q, answered)
	return l.verdict(ctx, v, q, &r, n, maxWait)
}

// giveWay returns how long a request of a lower priority may wait. It reports whether the request, which does not wait at all, leaves stored
// permits to callers of a higher priority. A reservation does not wait in the queue for the time that the look-ahead of its priority lacks,
// so its timeout is shorter. One without a timeout asks for its place, whenever that is.
func (l *RateLimiter) giveWay(v verb, n, maxWait int64) (most int64, yields bool) {
	switch c := l.limiter.Coordinator; {
	case maxWait == 0:
		return 0, c.Yields()
	case v == reserve && maxWait < maxExact:
		return min(maxWait, c.LookAhead(&l.limiter, n)), false
	}
	return maxWait, false
}

// yielded returns the verdict on a call that leaves stored permits to callers of a higher priority.
func (l *RateLimiter) yielded(v verb) verdict {
	got := verdict{by: ByPriority}
	if v == reserve {
		got.reservation = refusedReservation(int64(l.effective().interval), levelOf(l.limiter.Coordinator.View.Seen()))
	}
	return got
}

// passedBy returns the verdict on a call for which no bucket is asked: the switch is off, or the request is invalid.
func passedBy(off bool) verdict {
	if off {
		return verdict{granted: true, by: BySwitch}
	}
	return verdict{by: ByCheck}
}

// check returns the error of a request that must not be sent. It reports whether the switch is off: then the request passes.
func (l *RateLimiter) check(ctx context.Context, n, maxWait int64) (off bool, err error) {
	if err := l.checkPermits(n); err != nil {
		return false, err
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	if l.enabled != nil && !l.enabled() {
		return true, nil
	}
	if l.effective().holds(n) {
		return false, nil
	}
	return false, l.neverGranted(n, maxWait, nil)
}

// checkPermits returns the error of a number of permits that no request may have.
func (l *RateLimiter) checkPermits(n int64) error {
	if n == 1 { // the constructor has checked it
		return nil
	}
	if n <= 0 {
		return fmt.Errorf("%w: bucket %q: permits %d: want at least 1", ErrInvalidPermits, l.Name(), n)
	}
	if l.quota != nil {
		return l.quota.single(l.Name(), n)
	}
	if n > maxExact {
		return l.limiter.Overflow(n)
	}
	if _, ok := l.effective().after(l.own.Kind, permit.Balance{}, n); !ok && l.limiter.Coordinator.HeardLately() {
		return l.limiter.Overflow(n)
	}
	return nil
}

// neverGranted returns an [ErrNeverGranted] for a request that no state of the bucket grants within maxWait, and nil otherwise. reply is the
// result of the request, or nil before it is sent.
//
// The decision rests on the configuration that this process knows, and another may be in force. So before the request it is made only if the
// configuration is recent; afterwards if the store refused the request, or was unavailable. A limiter that warms up grants more while it is
// warm. So its request must be refused first, with the wait of a cold bucket.
func (l *RateLimiter) neverGranted(n, maxWait int64, reply *engine.Result) error {
	s := l.effective()
	if s.holds(n) {
		return nil
	}
	least := s.leastWait(n)
	if least <= maxWait {
		return nil
	}
	certain := l.own.Kind == bursty
	switch {
	case reply == nil:
		certain = certain && l.limiter.Coordinator.HeardLately()
	case reply.Err != nil:
		certain = certain && away(reply.Err)
	default:
		certain = certain || -1 <= reply.Wait-least && reply.Wait-least <= 1
	}
	if !certain {
		return nil
	}
	return &WaitError{l.Name(), int(n), time.Duration(least) * time.Microsecond, ErrNeverGranted}
}

// shortcut decides a request without a round trip, if it can: by a lease, or by the state in the last reply.
func (l *RateLimiter) shortcut(ctx context.Context, v verb, n, maxWait int64) (got verdict, decided bool) {
	c := l.limiter.Coordinator
	if e := c.FromLease(&l.limiter, n); e != nil {
		got = verdict{granted: true, by: ByPrefetch}
		switch v {
		case await:
			got.reservation = l.awaited(e.Origin())
		case reserve:
			var seen engine.Seen
			r := new(Reservation)
			r.call, seen = e.Reserved(&l.limiter, n)
			r.level, got.reservation = levelOf(seen), r
		}
		return got, true
	}
	if !c.View.HasSnapshot() || l.fairness != nil && c.Passage() == engine.Queue { // its turn may come before those of the waiters
		return verdict{}, false
	}
	most := maxWait
	if deadline := deadlineOf(ctx); deadline != 0 {
		most = min(most, max(0, (deadline-clock.Mono()).Microseconds()))
	}
	wait, refused := c.View.Refuses(&l.limiter, n, most)
	if !refused {
		return verdict{}, false
	}
	got = verdict{by: BySnapshot, wait: time.Duration(wait) * time.Microsecond}
	if v == reserve {
		got.reservation = refusedReservation(wait-maxWait, levelOf(c.View.Seen()))
	}
	return got, true
}

// enqueue submits a call.
func (l *RateLimiter) enqueue(ctx context.Context, v verb, n, maxWait int64) (q *engine.Call, answered <-chan struct{}) {
	switch {
	case l.shadow:
		q = engine.NewCharge(&l.limiter, n, maxWait, deadlineOf(ctx))
	case v == reserve:
		q = engine.NewReservation(&l.limiter, n, maxWait, deadlineOf(ctx))
	default:
		if q = engine.NewCall(&l.limiter, n, maxWait, deadlineOf(ctx)); l.fairness != nil {
			l.fairness.count(ctx, q)
		}
	}
	return q, l.limiter.Coordinator.Submit(ctx, q)
}

// deadlineOf returns when a context ends, by clock.Mono; 0 if it has no deadline.
func deadlineOf(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return clock.Of(deadline)
	}
	return 0
}

// verdict returns the verdict on a call that has a result.
func (l *RateLimiter) verdict(ctx context.Context, v verb, q *engine.Call, r *engine.Result, n, maxWait int64) (got verdict, err error) {
	if r.Err != nil {
		if ctx.Err() != nil { // the caller has given up
			return verdict{}, r.Err
		}
		if never := l.neverGranted(n, maxWait, r); never != nil {
			return verdict{by: ByCheck}, never
		}
		return verdict{}, r.Err
	}
	got = verdict{granted: r.Granted, wait: time.Duration(r.Wait) * time.Microsecond}
	switch {
	case v == await && r.Granted:
		got.reservation = l.awaited(q.Coordinator().Origin(q))
	case v == reserve && r.Granted:
		got.reservation = &Reservation{call: q, level: levelOf(q.Coordinator().Seen(q))}
	case v == reserve:
		got.reservation = refusedReservation(r.Wait-maxWait, levelOf(q.Coordinator().Seen(q)))
	}
	if !r.Granted {
		err = l.hopeless(ctx, n, maxWait, got.wait)
	}
	q.Recycle()
	return got, err
}

// awaited returns the reservation of permits that were due when the caller received them, for their settlement.
func (l *RateLimiter) awaited(of permit.Origin) *Reservation {
	return &Reservation{call: engine.Reserved(&l.limiter, of, nil)}
}

// hopeless returns the error of a request that was refused, and not only because the permits are in demand: no state of the bucket grants it
// within maxWait, or the wait is within maxWait but ends after the context does. Otherwise it returns nil.
func (l *RateLimiter) hopeless(ctx context.Context, n, maxWait int64, wait time.Duration) error {
	if !l.effective().holds(n) {
		if err := l.neverGranted(n, maxWait, &engine.Result{Wait: wait.Microseconds()}); err != nil {
			return err
		}
	}
	if wait.Microseconds() <= maxWait && deadlineOf(ctx) != 0 {
		return &WaitError{l.Name(), int(n), wait, context.DeadlineExceeded}
	}
	return nil
}

// decide asks for permits. With an observer, a failure policy or a shadow it calls decideObserved.
func (l *RateLimiter) decide(ctx context.Context, v verb, permits int, timeout time.Duration) (verdict, error) {
	if l.plain {
		return l.ask(ctx, v, permits, timeout)
	}
	if l.following != nil {
		return l.decideFollowing(ctx, v, permits, timeout)
	}
	return l.decideObserved(ctx, v, permits, timeout, 0)
}

// decideObserved asks for permits and calls the observer. If the store is unavailable, the failure policy decides. waited is how long the call has waited
// by other limiters.
func (l *RateLimiter) decideObserved(ctx context.Context, v verb, permits int, timeout, waited time.Duration) (verdict, error) {
	began := clock.Mono()
	var got verdict
	var err error
	if l.shadow {
		got, err = l.decideShadow(ctx, permits, timeout)
	} else if got, err = l.ask(ctx, v, permits, timeout); err != nil {
		got, err = l.fallback(ctx, got, err, func(local *RateLimiter) (verdict, error) { // within the timeout, however long the failure took
			return local.ask(ctx, v, permits, max(0, timeout)-max(0, clock.Mono()-began-l.limiter.Coordinator.Timeout))
		})
	}
	if err != nil && errors.Is(err, ErrSuperseded) { // it is not decided yet
		return verdict{}, err
	}
	if o := l.observer; o != nil && o.Decision != nil {
		o.Decision(ctx, Decision{
			Bucket: l.Name(), Label: l.label, Permits: permits, Granted: err == nil && got.granted, Err: err, By: got.by,
			Wait: waited + got.wait, Elapsed: waited + clock.Mono() - began, Priority: l.priority, Shadow: l.shadow,
		})
	}
	if l.shadow {
		return verdict{granted: true, reservation: &Reservation{overruled: err != nil || !got.granted}}, nil
	}
	return got, err
}

// boundless is a timeout that no row has. Calls that wait for longer would be refused by no limit, but a shadow, which nobody waits for, would
// run into debt without end.
const boundless = 24 * time.Hour

// decideShadow decides for a shadow, without waiting: a call is refused if its permits are not due within the timeout, as where callers wait for
// them. The bucket is the shadows' own: its name begins with shadowMark.
func (l *RateLimiter) decideShadow(ctx context.Context, permits int, timeout time.Duration) (verdict, error) {
	if timeout > boundless && permits > 0 && int64(permits) <= maxExact {
		timeout = time.Duration(engine.LookAhead(&l.effective().terms, engine.Class(l.priority), int64(permits), 0, 0)) * time.Microsecond
	}
	return l.ask(ctx, reserve, permits, timeout)
}

// fallback decides by the failure policy, if the store could not be asked. ask asks the local share. It returns the error unchanged if the
// policy does not apply.
func (l *RateLimiter) fallback(ctx context.Context, v verdict, err error, ask func(*RateLimiter) (verdict, error)) (verdict, error) {
	if l.policy == FailClosed || ctx.Err() != nil || !away(err) && !notAsked(err) {
		return v, err
	}
	c := l.limiter.Coordinator
	if c.Down() == nil { // rejected credentials can look like an outage, so probe first
		probed := c.AskHealth(ctx)
		switch {
		case ctx.Err() != nil:
			return v, ctx.Err()
		case probed != nil && !away(probed):
			return v, fmt.Errorf("%w; before that: %v", storeError(l.Name(), probed), err) // it was mistaken for an outage
		case notAsked(err) && probed == nil:
			return v, err
		}
	}
	if l.policy == FailOpen {
		return verdict{granted: true, by: ByPolicy}, nil
	}
	local, invalid := l.localShare()
	if invalid != nil {
		return verdict{}, fmt.Errorf("%w; and no local share: %w", err, invalid)
	}
	v, invalid = ask(local)
	v.by = ByPolicy
	switch {
	case errors.Is(invalid, ErrNeverGranted):
		return verdict{by: ByPolicy}, nil // the whole bucket could grant it in time
	case !errors.Is(invalid, ErrInvalidPermits):
		return v, invalid
	}
	return v, fmt.Errorf("%w; and no local share: %w", err, invalid)
}

// share is the limiter of a local share. In each outage the local bucket begins empty once, whichever caller asks it first (see
// engine.Coordinator.LocalShare). So an outage gives no process more than its share.
type share struct {
	whole     config
	instances int
	limiter   *RateLimiter
}

// localShare returns the limiter that decides during an outage.
func (l *RateLimiter) localShare() (*RateLimiter, error) {
	n, _ := l.policy.Instances()
	if l.member != nil {
		if counted := l.member.Live(); counted > 0 {
			n = int(counted)
		}
	}
	c := l.limiter.Coordinator
	whole := l.effective().config
	if s := l.share.Load(); s != nil && s.whole == whole && s.instances == n {
		c.LocalShare(&s.limiter.limiter)
		return s.limiter, nil
	}
	divided := whole
	divided.Version = 0
	divided.Rate /= float64(n)
	divided.Size /= float64(n)
	if err := divided.validate(); err != nil {
		return nil, invalid(l.Name(), fmt.Errorf("divided by %d instances: %w", n, err))
	}
	part := &RateLimiter{
		own: newSetting(divided), store: l.parts, plain: true, memory: l.parts, time: l.time, priority: l.priority, fairness: l.fairness,
	}
	part.limiter.Own, part.limiter.MaxWaiters, part.limiter.Floor = &part.own.terms, l.limiter.MaxWaiters, l.limiter.Floor
	part.limiter.OnLost = l.limiter.OnLost
	c.LocalShare(&part.limiter)
	l.share.Store(&share{whole, n, part})
	return part, nil
}

// Waiting returns how many calls of this process are in progress while the queue is not empty, and how long its head has waited, or with
// [WithFairness] how long any caller has. Calls
// that wait only for the store's reply are included. Both results are 0 if the queue is empty.
func (l *RateLimiter) Waiting() (calls int, longest time.Duration) {
	if l = l.inUse(); l == nil {
		return 0, 0
	}
	l.limiter.Coordinator.Inspect(func(s engine.State) {
		if s.Waiting {
			calls, longest = s.Calls, s.Longest
		}
	})
	return calls, longest
}
