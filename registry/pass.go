package registry

import (
	"context"
	"errors"
	"fmt"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/seam"
)

// ErrNeedsEnter: the row names something that a call has to give back when it ends, or that must be taken when it begins. Enter does that.
var ErrNeedsEnter = errors.New("registry: want Enter")

func needsEnter(name string, c *Limit) error {
	return fmt.Errorf("%w for bucket %.80q: its row says%s", ErrNeedsEnter, name, c.boundsText()[1:])
}

// Admission is the answer to Enter and Begin: whether the call may begin, and what decided. Leave must be called when a call that was let
// pass has ended; until then it counts as under way.
type Admission struct {
	// OK tells that the call may begin now.
	OK bool
	// By is what decided: of a refusal, which of all that the row names.
	By Decider
	// RetryAfter is of a refusal when to try again, as far as that is known: a second if as many calls are under way as may.
	RetryAfter time.Duration

	reservation *tokenbucket.Reservation // nil: no bucket was asked
	place       *place                   // nil: there is nothing to give back
}

// Leave tells that the call has ended: its place is another's. It returns when that is done, or in a moment if the backend takes
// longer. After a refusal, and the second time, it does nothing.
func (p *Admission) Leave() {
	if p.place != nil {
		p.place.leave()
	}
}

// Holds tells whether there is something that Leave gives back.
func (p *Admission) Holds() bool { return p.place != nil }

// Reservation is the permit of the rate. Where no bucket was asked it is one that is ready; of a refusal it is not OK.
func (p *Admission) Reservation() *tokenbucket.Reservation {
	switch {
	case p.reservation != nil:
		return p.reservation
	case p.OK:
		return &tokenbucket.Reservation{}
	}
	return seam.Refused(p.RetryAfter).(*tokenbucket.Reservation)
}

// Enter is the call for every row, whatever it names: a rate, a window, a concurrency. It waits until the call may begin, at most as long as
// the row's cache says. Then the Admission is OK, and Leave must be called when the call has ended. A refusal is an Admission that is
// not OK: it says what refused, and nothing is taken. Calls pass as with Allow while the switch is off, the row is disabled, or there is
// none and the policy says so.
//
// A row's window is asked first, then its concurrency, then its rate: a refusal of the first costs least. If a later one refuses, what
// was taken from the others is given back. Only the rate is waited for. A call that waits for it holds nothing else meanwhile, so others
// may use its place. It asks for window and place again just before its time, while the permit of the rate can still go back.
//
// A place of a fleet is a lease that is renewed until Leave (package semaphore). The log tells if one is lost before.
func (r *Registry) Enter(ctx context.Context, name string) (*Admission, error) {
	p, err := r.Begin(ctx, name)
	if err != nil || !p.OK || p.reservation == nil {
		return p, err
	}
	select {
	case <-p.reservation.Ready():
		return p, nil
	case <-ctx.Done():
		p.Leave()
		_ = aside(p.reservation.Cancel)
		return nil, ctx.Err()
	}
}

// Admit makes a Registry an httplimit.Entrance, and one of contrib/grpc; other callers want Enter. It is Begin with its answer in two parts:
// the permit, which is not OK if the call is refused, and leave, which is nil if there is nothing to give back.
func (r *Registry) Admit(ctx context.Context, name string) (permit *tokenbucket.Reservation, leave func(), err error) {
	if f, err := r.find(name); err == nil && !f.bounded() {
		if permit, err = r.reserve(ctx, name, f, nil); !errors.Is(err, ErrNeedsEnter) { // else the row has changed
			return permit, nil, err
		}
	}
	p, err := r.Begin(ctx, name)
	if err != nil {
		return nil, nil, err
	}
	if p.Holds() {
		leave = p.Leave
	}
	return p.Reservation(), leave, nil
}

// Begin is Enter for callers that wait for the rate by themselves: if the row names nothing but a rate, it returns at once, and the call may
// begin when Admission.Reservation is ready. For other rows it is Enter. Most callers want Enter.
func (r *Registry) Begin(ctx context.Context, name string) (*Admission, error) {
	f, err := r.find(name)
	for again := true; err == nil && f.bounded(); again = false {
		p, e := r.enter(ctx, name, &f)
		if e == nil || !again || f.limiter == nil || !errors.Is(e, tokenbucket.ErrInvalidConfig) {
			return p, e
		}
		f, err = r.replace(ctx, name, f, e)
	}
	by := f.by
	if f.limiter != nil { // also that of a Default
		by = ByLimit
	}
	reservation, err := r.reserve(ctx, name, f, err)
	switch {
	case errors.Is(err, ErrNeedsEnter): // the row has changed
		return r.Begin(ctx, name)
	case err != nil:
		return nil, err
	}
	return &Admission{OK: reservation.OK(), By: by, RetryAfter: reservation.RetryAfter(), reservation: reservation}, nil
}

// bounded tells whether more than a bucket decides.
func (f *found) bounded() bool { return f.by == ByLimit && f.entry != nil && f.entry.slot != nil }

// allowBounded is Allow for a row that names more than a rate.
func (r *Registry) allowBounded(ctx context.Context, name string, f *found) (bool, error) {
	if f.entry.limit.Concurrent != 0 {
		return false, needsEnter(name, &f.entry.limit)
	}
	p, err := r.Enter(ctx, name)
	switch {
	case err != nil:
		return false, err
	case p.Holds(): // the row has changed
		p.Leave()
		return false, fmt.Errorf("%w for bucket %.80q: its row has a concurrency now", ErrNeedsEnter, name)
	}
	return p.OK, nil
}

// patience is how long a call is kept for what it gives back. In nearly all cases that is done by then, and a call that follows at once
// finds it.
const patience = 20 * time.Millisecond

// aside gives something back, whatever became of the call's context.
func aside(giveBack func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return giveBack(ctx)
}
