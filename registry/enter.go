package registry

import (
	"context"
	"errors"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// Enter blocks until a call of that name may begin, at most as long as the row's WaitShare allows. Then the Admission is OK, and the caller
// must call Leave when the call has ended. A refusal is an Admission that is not OK: it names the limit that refused, and takes nothing.
// Calls pass at once while the switch is off, if the row is disabled, and if the name has no row and the policy lets it pass
// ([WithUnknown]). Enter makes a Registry a gate.Gate.
//
// Calls wait for the rate only. A waiting call holds its permit and nothing else, so others can use the place and the count meanwhile.
// Shortly before the permit is due, the call asks for its place, and then it is counted in the window. If either refuses, permit and place
// are given back. If the window stays full for longer than the call may wait, the call is refused at once.
//
// A place of a fleet is a lease that is renewed until Leave (package semaphore). A lease that is lost earlier is logged.
func (r *Registry) Enter(ctx context.Context, name string) (*gate.Admission, error) {
	f, err := r.find(name)
	for attempt := 1; err == nil; attempt++ {
		var a *gate.Admission
		switch {
		case f.bounded():
			a, err = r.enterBounded(ctx, name, &f)
		case f.limiter != nil:
			a, err = r.enterRate(ctx, &f)
		default:
			return r.bypassed(name, &f), nil
		}
		if attempt > 1 || f.limiter == nil || !errors.Is(err, tokenbucket.ErrInvalidConfig) {
			return a, err
		}
		f, err = r.replace(ctx, name, f, err)
	}
	return nil, err
}

// enterRate implements Enter for a row that has a rate only.
func (r *Registry) enterRate(ctx context.Context, f *found) (*gate.Admission, error) {
	permit, err := f.limiter.TryReserve(ctx, 1, f.entry.wait)
	r.decided(f.entry, err == nil && permit.OK(), err)
	if err != nil {
		return nil, err
	}
	return gate.Wait(ctx, permit)
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

// patience bounds how long a caller waits for the reply to a refund. The reply is nearly always there by then, so a call that follows at
// once finds the permit.
const patience = 20 * time.Millisecond

// aside calls giveBack with a context of its own, since the call's context may have ended.
func aside(giveBack func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return giveBack(ctx)
}
