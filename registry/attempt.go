package registry

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// attempt is a call that wants to begin, and what it holds.
type attempt struct {
	*bounds
	registry    *Registry
	name        string
	slot        *slot
	limiter     *tokenbucket.RateLimiter // nil: no rate
	wait        time.Duration            // how long it may wait for that; 0 without a rate
	counted     slidingwindow.Result     // in the window, if it was allowed
	countedAt   time.Time
	asked       gate.Decider // what was asked last
	place       *place
	reservation *tokenbucket.Reservation
	reserved    time.Time
	grant       tentative // of the rate
}

// enterBounded is Enter for a row that names more than a rate.
func (r *Registry) enterBounded(ctx context.Context, name string, f *found) (*gate.Admission, error) {
	b, err := f.entry.slot.get(&r.backends, f.entry, r.countedAs(&f.entry.limit))
	if err != nil {
		return nil, err
	}
	a := &attempt{bounds: b, registry: r, name: name, slot: f.entry.slot, limiter: f.limiter}
	if a.limiter != nil {
		a.wait = f.entry.wait
	}
	refused, err := a.run(ctx)
	if err == nil && refused == nil {
		r.faults.passed(f.entry)
	} else {
		r.faults.failed(f.entry, a.asked, err)
	}
	if refused == nil && err == nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	if refused == nil && err == nil {
		a.grant.admitted()
	}
	if r.shadows(&f.entry.limit) && ctx.Err() == nil {
		return a.passed(refused, err), nil
	}
	if refused != nil || err != nil {
		a.giveBack()
	}
	switch {
	case err != nil:
		return nil, err
	case refused != nil:
		if refused.By != gate.ByLimit {
			a.tell(refused.By, false)
		}
		return refused, nil
	case f.limiter != nil:
		return a.admitted(gate.ByLimit), nil
	}
	return a.admitted(a.tellPassed()), nil
}

// admitted returns the admission of a call that may begin.
func (a *attempt) admitted(by gate.Decider) *gate.Admission {
	admission := &gate.Admission{OK: true}
	if a.reservation != nil {
		admission = gate.Admit(a.reservation)
	}
	admission.OK, admission.By = true, by
	if a.place != nil {
		admission.Release = a.place.leave
	}
	return admission
}

// tellPassed tells the hook that a row without a rate lets a call pass, which no observer is told.
func (a *attempt) tellPassed() (by gate.Decider) {
	if by = gate.ByWindow; a.window == nil {
		by = gate.ByConcurrency
	}
	a.tell(by, true)
	return by
}

// passed is the answer of a row in shadow: the call passes, and the hook hears if the window or the concurrency would refuse it, or, of a
// row without a rate, would let it pass.
// What refuses it leaves no trace, as without shadow.
func (a *attempt) passed(refused *gate.Admission, err error) *gate.Admission {
	switch {
	case err != nil:
		a.registry.log.Debug("registry: what is in shadow was not counted", "bucket", a.name, "error", err)
	case refused != nil:
		a.giveBack()
		if refused.By != gate.ByLimit { // else the limiter's observer has counted it
			a.tell(gate.ByShadow, true)
		}
	case a.limiter == nil:
		a.tellPassed()
	}
	return a.admitted(gate.ByShadow)
}

// tell tells the hook of what no bucket has decided.
func (a *attempt) tell(by gate.Decider, pass bool) {
	if a.registry.bypass != nil {
		a.registry.bypass(a.name, by, pass)
	}
}

// A call begins when its rate, its concurrency and its window all agree. Each of them is asked by itself, so their order decides what a
// refusal by one costs in the others:
//
//	step              when                             a refusal gives back       what others may see until then
//	1. what is known  at once, for nothing             nothing                    nothing
//	2. rate           at once; then the call waits     nothing                    nothing
//	3. concurrency    a lead before the permit is due  the permit                 the bucket without the permit
//	4. window         right after that                 the permit and the place   the same, and one place fewer
//
// A call that waits holds its permit alone: others use its place, and count in the window. The window is last because a count costs others
// most: they are refused for the window's whole length. Nothing refuses after it. A place is held in vain only while the window is full,
// when every other call is refused as well.
//
// A permit goes back while it is not due. One that was due at once goes back, too, unless others have taken permits behind it that are not
// due yet. It is lost if it falls due while the concurrency and the window are asked, that is if they take longer than the lead.

// run asks for all that the row names, and returns when the call may begin, or with the refusal of the first that refuses.
func (a *attempt) run(ctx context.Context) (refused *gate.Admission, err error) {
	if refused = a.known(ctx); refused != nil {
		return refused, nil
	}
	if refused, err = a.reserve(ctx); refused != nil || err != nil {
		return refused, err
	}
	for due := false; !due; {
		if err = a.awaitLead(ctx, a.slot.lead(a.bounds)); err != nil {
			return nil, err
		}
		if refused, err = a.take(ctx); refused != nil || err != nil {
			return refused, err
		}
		if due, err = a.awaitDue(ctx); err != nil {
			return nil, err
		}
		if !due { // a penalty postpones it
			a.untake()
		}
	}
	return a.recount(ctx)
}

// known refuses a call by what this process knows: a penalty that lasts, a window that is full for longer than the call may wait, or, if the
// call may not wait at all, places that are all taken.
func (a *attempt) known(ctx context.Context) *gate.Admission {
	if left := a.slot.pause.left(); left > 0 && a.limiter == nil {
		return &gate.Admission{By: gate.ByPenalty, RetryAfter: left}
	}
	if a.wait == 0 && a.slot.crowded(a.bounds) {
		return noPlace()
	}
	if a.windowFull() <= a.wait {
		return nil
	}
	if _, err := a.window.Remaining(ctx); err != nil { // it asks once in a hundredth of the window at most
		return nil // what happens then is the window's policy: take asks it
	}
	if full := a.windowFull(); full > a.wait {
		return &gate.Admission{By: gate.ByWindow, RetryAfter: full}
	}
	return nil
}

// windowFull returns for how long the window has no room, as far as this process knows.
func (a *attempt) windowFull() time.Duration {
	if a.window == nil {
		return 0
	}
	return a.window.RetryAfter(1)
}

// reserve takes a permit of the rate that falls due in time, if the row has a rate.
func (a *attempt) reserve(ctx context.Context) (refused *gate.Admission, err error) {
	if a.limiter == nil {
		return nil, nil
	}
	if a.reservation, err = a.limiter.TryReserve(a.grant.under(ctx), 1, a.wait); err != nil {
		return nil, err
	}
	a.reserved = time.Now()
	switch {
	case !a.reservation.OK():
		refused = gate.Admit(a.reservation)
		refused.RetryAfter = max(refused.RetryAfter, a.windowFull())
		return refused, nil
	case a.reservation.Overruled():
		return &gate.Admission{By: gate.ByLimit}, ctx.Err()
	}
	return nil, nil
}

// awaitLead waits until the permit of the rate is due in a lead. That may be sooner than it was, as callers in front give up, and later, as
// the bucket is held back.
func (a *attempt) awaitLead(ctx context.Context, lead time.Duration) error {
	if a.reservation == nil {
		return nil
	}
	for {
		ahead := a.ahead()
		if ahead <= lead {
			return nil
		}
		timer := time.NewTimer(ahead - lead)
		select {
		case <-a.reservation.Ready():
			timer.Stop()
			return nil
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
	}
}

// awaitDue waits until the permit of the rate is due. It returns false as soon as that will be later than the longest lead.
func (a *attempt) awaitDue(ctx context.Context) (due bool, err error) {
	if a.reservation == nil || isClosed(a.reservation.Ready()) {
		return true, ctx.Err()
	}
	look := time.NewTicker(longestLead)
	defer look.Stop()
	for {
		select {
		case <-a.reservation.Ready():
			return true, nil
		case <-ctx.Done():
			return false, ctx.Err()
		case <-look.C:
			if a.ahead() > longestLead {
				return false, nil
			}
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// ahead returns how long it takes until the permit of the rate is due.
func (a *attempt) ahead() time.Duration { return a.reservation.Delay() - time.Since(a.reserved) }

// noPlace is a refusal by the concurrency. When a place will be free is not known.
func noPlace() *gate.Admission {
	return &gate.Admission{By: gate.ByConcurrency, RetryAfter: time.Second}
}

// take gives the call a place, and counts it in the window: at once or not at all.
func (a *attempt) take(ctx context.Context) (refused *gate.Admission, err error) {
	asked := time.Now()
	if a.places != nil {
		a.asked = gate.ByConcurrency
		if a.slot.crowded(a.bounds) {
			return noPlace(), nil
		}
		if a.place, err = a.slot.enter(ctx, a.bounds, a.registry.backends.localShare(a.most)); err != nil {
			return nil, fmt.Errorf("registry: bucket %.80q: concurrency: %w", a.name, err)
		}
		if a.place == nil {
			return noPlace(), nil
		}
		a.place.lost = a.lost
	}
	if refused, err = a.count(ctx); refused == nil && err == nil {
		a.slot.took(time.Since(asked))
	}
	return refused, err
}

// count has the call counted in the window, if there is one.
func (a *attempt) count(ctx context.Context) (refused *gate.Admission, err error) {
	if a.window == nil {
		return nil, nil
	}
	a.asked = gate.ByWindow
	asked := time.Now()
	counted, err := a.window.Take(ctx, 1)
	if err != nil {
		return nil, fmt.Errorf("registry: bucket %.80q: window: %w", a.name, err)
	}
	if !counted.Allowed {
		return &gate.Admission{By: gate.ByWindow, RetryAfter: counted.RetryAfter}, nil
	}
	a.counted, a.countedAt = counted, asked // the reply may come long after the call was counted
	return nil, nil
}

// recount counts a call anew that was counted much earlier than it can begin: the window's reply took long.
func (a *attempt) recount(ctx context.Context) (refused *gate.Admission, err error) {
	if !a.counted.Allowed || time.Since(a.countedAt) <= latest(a.lead) {
		return nil, nil
	}
	a.uncount()
	return a.count(ctx)
}

func (a *attempt) uncount() {
	if a.counted.Allowed { // on an error it counts until it is out of the window
		_ = aside(func(ctx context.Context) error { return a.window.Refund(ctx, a.counted, 1) })
	}
	a.counted = slidingwindow.Result{}
}

// giveBack returns all that the call holds, each without waiting for the reply of another.
func (a *attempt) giveBack() {
	var giving sync.WaitGroup
	giving.Go(a.untake)
	a.cancel()
	giving.Wait()
}

// untake undoes take.
func (a *attempt) untake() {
	var leaving sync.WaitGroup
	if a.place != nil {
		leaving.Go(a.place.leave)
	}
	a.uncount()
	leaving.Wait()
	a.place = nil
}

// cancel gives the permit of the rate back, unless it fell due while the call waited.
func (a *attempt) cancel() {
	if a.reservation == nil {
		return
	}
	if err := aside(a.reservation.Return); err != nil {
		a.registry.log.Debug("registry: a permit may be lost", "bucket", a.name, "error", err)
	}
}

// lost tells that a call was no longer counted while it was under way.
func (a *attempt) lost(err error) {
	now, told := int64(clock.Mono()), a.slot.told.Load()
	if told != 0 && now-told < int64(again) || !a.slot.told.CompareAndSwap(told, now) {
		return
	}
	a.registry.log.Warn("registry: the place of a call was lost before it ended: more may have been under way than its row says",
		"bucket", a.name, "error", err)
}

// place is one among the calls that are under way.
type place struct {
	slot   *slot
	permit *semaphore.Permit // nil: the backend is away
	lost   func(error)
	left   atomic.Bool
}

func (p *place) leave() {
	if p.left.Swap(true) {
		return
	}
	var err error
	if p.permit != nil {
		err = aside(p.permit.Release)
	}
	p.slot.inside.Add(-1)
	if errors.Is(err, semaphore.ErrExpired) || errors.Is(err, semaphore.ErrLost) {
		p.lost(err)
	}
}

// enter returns a place, or nil if none is free. During an outage of the backend this process has share places of its own; if share is 0,
// enter fails.
func (s *slot) enter(ctx context.Context, b *bounds, share int) (*place, error) {
	n := s.inside.Add(1)
	if n > int64(b.most) {
		s.inside.Add(-1)
		return nil, nil
	}
	permit, err := s.acquire(ctx, b)
	switch {
	case err == nil:
		return &place{slot: s, permit: permit}, nil
	case errors.Is(err, semaphore.ErrRefused):
		err = nil
	case isOutage(ctx, err) && share > 0:
		if err = nil; n <= int64(share) {
			return &place{slot: s}, nil
		}
	}
	s.inside.Add(-1)
	return nil, err
}

// acquire asks for a permit, unless its backend was away a moment ago.
func (s *slot) acquire(ctx context.Context, b *bounds) (*semaphore.Permit, error) {
	if err := s.outage.known(); err != nil {
		return nil, err
	}
	permit, err := b.places.TryAcquire(ctx, 1, 0)
	if err != nil && isOutage(ctx, err) {
		s.outage.began(err)
	} else if ctx.Err() == nil {
		s.outage.ended()
	}
	return permit, err
}
