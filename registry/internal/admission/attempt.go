package admission

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// attempt is a call that asks to begin. It has the permit, the place and the count that the call holds so far.
type attempt struct {
	*bounds
	Call
	env         *Env
	slot        *Slot
	counted     slidingwindow.Result // the count in the window; zero if there is none
	countedAt   time.Time
	asked       gate.Decider // the limit that was asked last
	place       *place
	reservation *tokenbucket.Reservation
	reserved    time.Time
	grant       tentative     // the grant of the rate
	early       *reserved     // the rate's reply that was asked for while the call waited for its place; nil if there is none, or it is used
	patience    time.Duration // how long the call may still wait for a place
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

// reportPassed calls the hook for a call that a row without a rate lets pass. No observer is called for it.
func (a *attempt) reportPassed() (by gate.Decider) {
	if by = gate.ByWindow; a.window == nil {
		by = gate.ByConcurrency
	}
	a.report(by, true)
	return by
}

// passed returns the admission of a call of a row in shadow: the call passes. It calls the hook if the window or the concurrency would
// refuse the call, or if a row without a rate would let it pass. A call that would be refused gives everything back, as without shadow.
func (a *attempt) passed(refused *gate.Admission, err error) *gate.Admission {
	switch {
	case err != nil:
		a.env.Log.Debug("registry: a call in shadow was not counted", "bucket", a.Name, "error", err)
	case refused != nil:
		a.giveBack()
		if refused.By != gate.ByLimit { // the limiter's observer counts refusals by the rate
			a.report(gate.ByShadow, true)
		}
	case a.Limiter == nil:
		a.reportPassed()
	}
	return a.admitted(gate.ByShadow)
}

// report calls the hook for a decision that no bucket has made.
func (a *attempt) report(by gate.Decider, pass bool) {
	if a.env.Bypassed != nil {
		a.env.Bypassed(a.Name, by, pass)
	}
}

// begin returns what a call of the row needs at first. While calls of this process wait for a place, and while they have all places, a call
// that may wait queues at once.
func (a *attempt) begin() progress {
	p := progress{permits: wanted, place: untried, count: uncounted}
	if a.Limiter == nil {
		p.permits = due
	}
	switch {
	case a.places == nil:
		p.place = taken
	case a.patience > 0 && (a.slot.queueing.Load() > 0 || a.slot.crowded(a.bounds) && a.slot.approach.empty()):
		p.place = full
	}
	if a.window == nil {
		p.count = inWindow
	}
	return p
}

// run asks the limits of the row in turn. It returns when the call may begin, or with the first refusal.
func (a *attempt) run(ctx context.Context) (refused *gate.Admission, err error) {
	if refused, err = a.known(ctx); refused != nil || err != nil {
		return refused, err
	}
	for p := a.begin(); ; {
		next := p.next()
		if next == toBegin {
			return a.recount(ctx)
		}
		if p, refused, err = a.do(ctx, next, p); refused != nil || err != nil {
			return refused, err
		}
	}
}

// do takes one step, and returns what the call has after it.
func (a *attempt) do(ctx context.Context, s step, p progress) (after progress, refused *gate.Admission, err error) {
	switch s {
	case toQueue:
		p.place = taken
		refused, err = a.queue(ctx)
	case toReserve:
		p.permits = ahead
		refused, err = a.reserve(ctx)
	case toApproach:
		return a.approaches(ctx, p)
	case toTake:
		return a.take(ctx, p)
	case toAwait:
		p.permits = due
		var postponed bool
		if postponed, err = a.awaitDue(ctx); postponed { // by a penalty
			a.untake()
			p.permits = ahead
			if a.places != nil {
				p.place = untried
			}
			if a.window != nil {
				p.count = uncounted
			}
		}
	}
	return p, refused, err
}

// known returns a refusal that follows from local state: a penalty, a window that stays full for longer than the call may wait, or, if the
// call may not wait, a lack of places. A cost above the window's limit is a *gate.CostError. Otherwise known returns nil, and the limits must
// be asked.
func (a *attempt) known(ctx context.Context) (refused *gate.Admission, err error) {
	if left := a.slot.Pause.Left(); left > 0 && a.Limiter == nil {
		return &gate.Admission{By: gate.ByPenalty, RetryAfter: left}, nil
	}
	patience := a.patience
	if a.Shadow { // something waits in its stead
		patience = a.PlaceWait
	}
	longest := a.Wait + min(patience, math.MaxInt64-a.Wait)
	if longest == 0 && a.slot.crowded(a.bounds) {
		return noPlace(), nil
	}
	if a.windowFull() <= longest {
		return nil, nil
	}
	if _, err := a.window.Remaining(ctx); err != nil { // at most one round trip in a hundredth of the window
		return nil, nil // take applies the window's policy
	}
	if limit := a.window.Limit(); a.Cost > limit {
		a.asked = gate.ByWindow
		return nil, a.tooCostly(limit)
	}
	if full := a.windowFull(); full > longest {
		return &gate.Admission{By: gate.ByWindow, RetryAfter: full}, nil
	}
	return nil, nil
}

// tooCostly returns the error of a cost above the window's limit, which would be refused for ever.
func (a *attempt) tooCostly(limit int) error {
	return &gate.CostError{Key: a.Name, Cost: a.Cost, Want: fmt.Sprintf("1 to the limit of the window, %d", limit), Err: tokenbucket.ErrNeverGranted}
}

// windowFull returns the time until the window has room, by the last reply.
func (a *attempt) windowFull() time.Duration {
	if a.window == nil {
		return 0
	}
	return a.window.RetryAfter(a.Cost)
}

// reserve reserves the permits of the call that fall due in time, if the row has a rate.
func (a *attempt) reserve(ctx context.Context) (refused *gate.Admission, err error) {
	if a.Limiter == nil {
		return nil, nil
	}
	if early := a.early; early != nil {
		a.early = nil
		early.wait()
		a.reservation, a.reserved, a.grant, err = early.reservation, early.at, early.grant, early.err
	} else {
		a.reservation, err = a.ask(ctx, &a.grant)
		a.reserved = time.Now()
	}
	a.Asked()
	if err != nil {
		return nil, err
	}
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

// ask asks the rate for the permits of the call.
func (a *attempt) ask(ctx context.Context, grant *tentative) (*tokenbucket.Reservation, error) {
	return gate.Reserve(grant.under(ctx), a.Limiter, a.Cost, a.Wait)
}

// approaches waits until a lead before the permits are due. A call that may wait for a place gives its permits back and queues as soon as
// another one has found no place.
func (a *attempt) approaches(ctx context.Context, p progress) (after progress, refused *gate.Admission, err error) {
	lead := a.slot.lead(a.bounds)
	if p.permits = near; p.place != untried || a.patience == 0 || a.ahead() <= lead {
		err = a.awaitLead(ctx, lead, nil)
		return p, nil, err
	}
	w := a.slot.approach.join()
	queued := a.slot.queueing.Load() > 0 // another one, while it reserved
	if !queued {
		err = a.awaitLead(ctx, lead, w.summoned)
	}
	switch summoned := w.leave(); {
	case summoned && err != nil:
		a.slot.approach.summon()
	case summoned || queued:
		a.abandon()
		p.permits, p.place = wanted, full
	}
	return p, nil, err
}

// awaitLead blocks until a lead before the permit is due, or the call is summoned. The due time moves earlier if callers ahead give up, and
// later if a penalty holds the bucket back.
func (a *attempt) awaitLead(ctx context.Context, lead time.Duration, summons <-chan struct{}) error {
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
		case <-summons:
			timer.Stop()
			return nil
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
	}
}

// awaitDue blocks until the permits are due. It returns true as soon as the due time has moved beyond the longest lead.
func (a *attempt) awaitDue(ctx context.Context) (postponed bool, err error) {
	if isClosed(a.reservation.Ready()) {
		return false, ctx.Err()
	}
	look := time.NewTicker(longestLead)
	defer look.Stop()
	for {
		select {
		case <-a.reservation.Ready():
			return false, nil
		case <-ctx.Done():
			return false, ctx.Err()
		case <-look.C:
			if a.ahead() > longestLead {
				return true, nil
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

// ahead returns the time until the permit is due.
func (a *attempt) ahead() time.Duration { return a.reservation.Delay() - time.Since(a.reserved) }

// noPlace returns a refusal by the concurrency. The time until a place is free is not known, so RetryAfter is one second.
func noPlace() *gate.Admission {
	return &gate.Admission{By: gate.ByConcurrency, RetryAfter: time.Second}
}

// queue waits for a place, while the call holds nothing else, or but permits that it has reserved as its place is about to be free. What is
// left of its patience is for a later queue.
func (a *attempt) queue(ctx context.Context) (refused *gate.Admission, err error) {
	a.asked = gate.ByConcurrency
	began := time.Now()
	var e *early
	if a.Limiter != nil && a.remote {
		e = a.slot.line.join(func(r *reserved) {
			r.reservation, r.err = a.ask(ctx, &r.grant)
			r.at = time.Now()
		})
	}
	a.slot.queueing.Add(1)
	a.slot.approach.summon()
	a.Asked()
	a.place, err = a.slot.await(ctx, a.bounds, a.env.localShare(a.most), a.patience)
	a.slot.queueing.Add(-1)
	if e != nil {
		a.early = e.leave()
	}
	a.patience = max(0, a.patience-time.Since(began))
	if refused, err = a.placed(err); refused != nil || err != nil {
		return refused, err
	}
	if left := a.slot.Pause.Left(); left > 0 && a.Limiter == nil { // it began meanwhile
		return &gate.Admission{By: gate.ByPenalty, RetryAfter: left}, nil
	}
	return nil, nil
}

// placed returns the refusal or the error if the concurrency has not given a place.
func (a *attempt) placed(err error) (refused *gate.Admission, _ error) {
	switch {
	case err != nil:
		return nil, fmt.Errorf("registry: bucket %.80q: concurrency: %w", a.Name, err)
	case a.place == nil:
		return noPlace(), nil
	}
	a.place.lost = a.lost
	return nil, nil
}

// take acquires a place, if the call has none, and counts the call in the window. It does not wait for either to become free. If there is no
// place and the call may wait for one, it gives its permits back, for the queue.
func (a *attempt) take(ctx context.Context, p progress) (after progress, refused *gate.Admission, err error) {
	asked := time.Now()
	if p.place == untried {
		a.asked = gate.ByConcurrency
		if !a.slot.crowded(a.bounds) {
			a.place, err = a.slot.enter(ctx, a.bounds, a.env.localShare(a.most))
		}
		if err == nil && a.place == nil && a.patience > 0 {
			a.abandon()
			if p.place = full; a.Limiter != nil {
				p.permits = wanted
			}
			return p, nil, nil
		}
		if refused, err = a.placed(err); refused != nil || err != nil {
			return p, refused, err
		}
		p.place = taken
	}
	p.count = inWindow
	if refused, err = a.count(ctx); refused == nil && err == nil {
		a.slot.took(time.Since(asked))
	}
	return p, refused, err
}

// count counts the call in the window, if there is one.
func (a *attempt) count(ctx context.Context) (refused *gate.Admission, err error) {
	if a.window == nil {
		return nil, nil
	}
	a.asked = gate.ByWindow
	asked := time.Now()
	counted, err := a.window.Take(ctx, a.Cost)
	if errors.Is(err, slidingwindow.ErrInvalidPermits) {
		return nil, a.tooCostly(a.window.Limit())
	}
	if err != nil {
		return nil, fmt.Errorf("registry: bucket %.80q: window: %w", a.Name, err)
	}
	if !counted.Allowed {
		return &gate.Admission{By: gate.ByWindow, RetryAfter: counted.RetryAfter}, nil
	}
	a.counted, a.countedAt = counted, asked // the reply may arrive long after the store counted the call
	return nil, nil
}

// recount counts a call again if the window's reply took so long that the count is much older than the beginning of the call.
func (a *attempt) recount(ctx context.Context) (refused *gate.Admission, err error) {
	if !a.counted.Allowed || time.Since(a.countedAt) <= latest(a.lead) {
		return nil, nil
	}
	a.uncount()
	return a.count(ctx)
}

func (a *attempt) uncount() {
	if a.counted.Allowed { // after an error the count stays until the window has passed
		_ = aside(func(ctx context.Context) error { return a.window.Refund(ctx, a.counted, a.Cost) })
	}
	a.counted = slidingwindow.Result{}
}

// giveBack gives back the permit, the place and the count, in parallel.
func (a *attempt) giveBack() {
	var giving sync.WaitGroup
	giving.Go(a.untake)
	a.cancel()
	giving.Wait()
}

// untake reverses take.
func (a *attempt) untake() {
	var leaving sync.WaitGroup
	if a.place != nil {
		leaving.Go(a.place.leave)
	}
	a.uncount()
	leaving.Wait()
	a.place = nil
}

// cancel refunds the permits of the rate, unless they fell due while the call waited.
func (a *attempt) cancel() {
	var err error
	switch early := a.early; {
	case early != nil:
		a.early = nil
		err = early.drop()
	case a.reservation != nil:
		err = aside(a.reservation.Return)
	}
	if err != nil {
		a.env.Log.Debug("registry: a permit could not be returned, and may be lost", "bucket", a.Name, "error", err)
	}
}

// abandon is cancel for a call that goes on without its permits: it does not wait for the reply.
func (a *attempt) abandon() {
	if a.reservation == nil {
		return
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	_ = a.reservation.Return(ended) // the context's error
}

// lost logs that a call in flight has lost its place, at most once a minute for each row.
func (a *attempt) lost(err error) {
	now, last := int64(clock.Mono()), a.slot.logged.Load()
	if last != 0 && now-last < int64(lostAgain) || !a.slot.logged.CompareAndSwap(last, now) {
		return
	}
	a.env.Log.Warn("registry: the place of a call was lost before it ended: more calls may have been under way than its row allows",
		"bucket", a.Name, "error", err)
}
