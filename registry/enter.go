package registry

import (
	"context"
	"errors"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry/internal/admission"
)

// Enter blocks until a call of that name may begin, at most as long as the row's MaxWait allows. Then the Admission is OK, and the caller
// must call Leave when the call has ended. A refusal is an Admission that is not OK: it names the limit that refused, and takes nothing.
// Calls pass at once while the switch is off, if the row is disabled, and if the name has no row and the policy lets it pass
// ([WithUnknown]). Enter makes a Registry a gate.Gate.
//
// A call that waits for the rate holds its permit and nothing else, so others can use the place and the count meanwhile.
// Shortly before the permit is due, the call asks for its place, and then it is counted in the window. If either refuses, permit and place
// are given back. If the window stays full for longer than the call may wait, the call is refused at once.
//
// If no place is free and the row lets calls wait for one (Limit.ConcurrentWait), the call gives its permit back, waits in turn, holding
// nothing, and asks for its permit again once it has its place. So it waits at most twice for the rate and once for a place. While a place of a
// fleet is released, the first call that waits for one in this process asks for its permit already. Once a call waits for a place, calls
// that wait for their permits give them back and join it.
//
// A place of a fleet is a lease that is renewed until Leave (package semaphore). A lease that is lost earlier is logged.
func (r *Registry) Enter(ctx context.Context, name string) (*gate.Admission, error) {
	return r.enter(ctx, name, 1)
}

// enter implements Enter and EnterN.
func (r *Registry) enter(ctx context.Context, name string, cost int) (*gate.Admission, error) {
	f, err := r.find(name)
	v := visit{began: time.Now()}
	defer v.passOn()
	if err == nil && v.awaitOthers(ctx, f.entry) {
		f, err = r.find(name)
	}
	for attempt := 1; err == nil; attempt++ {
		var a *gate.Admission
		switch {
		case f.bounded():
			a, err = r.enterBounded(ctx, name, &f, cost, &v)
		case f.limiter != nil:
			a, err = r.enterRate(ctx, &f, cost, &v)
		default:
			v.passOn()
			return r.bypassed(name, &f), nil
		}
		if err != nil && errors.Is(err, tokenbucket.ErrSuperseded) { // another row is in force
			v.awaitTurn(ctx)
			attempt--
			f, err = r.find(name)
			continue
		}
		if attempt > 1 || f.limiter == nil || !errors.Is(err, tokenbucket.ErrInvalidConfig) {
			return a, err
		}
		f, err = r.replace(ctx, name, f, err)
	}
	return nil, err
}

// enterRate implements Enter for a row that has a rate only.
func (r *Registry) enterRate(ctx context.Context, f *found, cost int, v *visit) (*gate.Admission, error) {
	crowd := f.entry.waiting()
	if crowd.find(v); !r.isInForce(f) {
		return nil, tokenbucket.ErrSuperseded
	}
	wait := f.entry.wait
	if v.number != 0 { // it has waited by another row
		wait = max(0, wait-v.waited())
	}
	permit, err := gate.Await(ctx, f.limiter, cost, wait)
	v.passOn()
	if err != nil && errors.Is(err, tokenbucket.ErrSuperseded) {
		return nil, err
	}
	r.decided(f.entry, err == nil && permit.OK(), err)
	if err != nil {
		return nil, err
	}
	if !permit.OK() || isReady(permit) {
		return gate.Wait(ctx, permit)
	}
	v.reservation, v.give = permit, nil
	return crowd.await(ctx, v)
}

// decided records the outcome of a call of a row that has a rate only.
func (r *Registry) decided(e *entry, ok bool, err error) {
	if ok && err == nil {
		r.faults.passed(e)
	} else {
		r.faults.failed(e, gate.ByLimit, err)
	}
}

// bypassed returns the admission of a call for which no bucket is asked.
func (r *Registry) bypassed(name string, f *found) *gate.Admission {
	if r.bypass != nil {
		r.bypass(name, f.by, f.pass)
	}
	return &gate.Admission{OK: f.pass, By: f.by}
}

// bounded reports whether a window or a concurrency decides, too.
func (f *found) bounded() bool { return f.by == gate.ByLimit && f.entry != nil && f.entry.slot != nil }

// enterBounded implements Enter for a row that has a window or a concurrency.
func (r *Registry) enterBounded(ctx context.Context, name string, f *found, cost int, v *visit) (*gate.Admission, error) {
	c := &f.entry.limit
	call := admission.Call{Name: name, Cost: cost, Limiter: f.limiter, Wait: f.entry.wait, PlaceWait: c.ConcurrentWait, Shadow: r.shadows(c), Asked: v.passOn}
	if v.number != 0 { // it has waited by another row
		call.Wait, call.PlaceWait = max(0, call.Wait-v.waited()), max(0, call.PlaceWait-v.waited())
	}
	crowd := f.entry.waiting()
	if crowd.find(v); !r.isInForce(f) {
		return nil, tokenbucket.ErrSuperseded
	}
	within, give := context.WithCancelCause(ctx)
	defer give(nil)
	if v.give = give; !crowd.join(v) {
		return nil, tokenbucket.ErrSuperseded
	}
	defer crowd.leave(v)
	defer close(v.gave)
	a, outcome, err := r.admissions.Enter(within, f.entry.slot, r.bounds(c, f.entry.version), call)
	if err != nil && ctx.Err() == nil && (errors.Is(err, tokenbucket.ErrSuperseded) || context.Cause(within) == tokenbucket.ErrSuperseded) {
		return nil, tokenbucket.ErrSuperseded
	}
	if outcome.OK {
		r.faults.passed(f.entry)
	} else {
		r.faults.failed(f.entry, outcome.By, outcome.Err)
	}
	return a, err
}
