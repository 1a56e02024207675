package registry

import (
	"context"
	"errors"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// Enter blocks until a call of that name may begin, at most as long as the row's WaitShare allows. Then the Admission is OK, and Leave must
// be called when the call has ended. A refusal is an Admission that is not OK: it names the limit that refused, and nothing is taken. Calls
// pass at once while the switch is off, the row is disabled, or there is none and the policy lets them pass ([WithUnknown]). Enter makes a
// Registry a gate.Gate.
//
// Only the rate is waited for. A call that waits holds its permit alone, so others may use its place, and count in its window. Shortly before
// the permit is due it asks for its place, and last it is counted in the window. If one of them refuses, permit and place go back. A window
// that is full for longer than the call may wait refuses at once.
//
// A place of a fleet is a lease that is renewed until Leave (package semaphore). The log tells if one is lost before.
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

// enterRate is Enter for a row that names nothing but a rate.
func (r *Registry) enterRate(ctx context.Context, f *found) (*gate.Admission, error) {
	permit, err := f.limiter.TryReserve(ctx, 1, f.entry.wait)
	r.decided(f.entry, err == nil && permit.OK(), err)
	if err != nil {
		return nil, err
	}
	return gate.Wait(ctx, permit)
}

// decided records what became of a call that a row's bucket alone decides about.
func (r *Registry) decided(e *entry, ok bool, err error) {
	if ok && err == nil {
		r.faults.passed(e)
	} else {
		r.faults.failed(e, gate.ByLimit, err)
	}
}

// bypassed returns the reply to a call of a name without a bucket.
func (r *Registry) bypassed(name string, f *found) *gate.Admission {
	if r.bypass != nil {
		r.bypass(name, f.by, f.pass)
	}
	return &gate.Admission{OK: f.pass, By: f.by}
}

// bounded reports whether more than a bucket decides.
func (f *found) bounded() bool { return f.by == gate.ByLimit && f.entry != nil && f.entry.slot != nil }

// patience bounds how long a caller waits until what it gives back has arrived. It nearly always has by then, and a call that follows at
// once finds it.
const patience = 20 * time.Millisecond

// aside gives something back, whether or not the call's context has ended.
func aside(giveBack func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return giveBack(ctx)
}
