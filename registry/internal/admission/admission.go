// Package admission decides whether a call of a row with a window or a concurrency may begin. It asks rate, concurrency and window in turn,
// so that a call that one of them refuses holds nothing of the others.
//
// A [Slot] has the counts of one row in this process. An [Env] is what all slots need of the registry: it knows neither the table nor the
// rows, and sees of a row only what a [Row] has.
package admission

import (
	"context"
	"log/slog"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// Env makes the windows and semaphores of rows, and has what calls report to. It does not change once calls have begun.
type Env struct {
	Windows    func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error)
	Semaphores func(name string, permits int, opts ...semaphore.Option) (*semaphore.Semaphore, error)
	Policy     tokenbucket.FailurePolicy                     // for calls during an outage of the semaphores' backend
	Bypassed   func(name string, by gate.Decider, pass bool) // reports a decision that no bucket has made; nil if there is no hook
	Log        *slog.Logger
}

// Row has the window and the concurrency of one version of a row.
type Row struct {
	Name        string // under which they are counted
	Version     int64
	Window      time.Duration // 0 if there is none
	WindowLimit int
	Concurrent  int // 0 if there is none
}

// Try returns an error if the window or the concurrency of a row cannot be made.
func (e *Env) Try(row Row) error {
	_, err := e.bounds(row, nil)
	return err
}

// Call is a call that asks to begin.
type Call struct {
	Name      string                   // for messages and reports
	Cost      int                      // permits of the rate and of the window, at least 1; the call has one place, whatever it costs
	Limiter   *tokenbucket.RateLimiter // nil if the row has no rate
	Wait      time.Duration            // longest wait for the rate; not used without a rate
	PlaceWait time.Duration            // longest wait for a place; 0 if the call does not wait for one
	Shadow    bool                     // whether the call passes even if a limit refuses it
	Asked     func()                   // is called when the call has asked for its permits, or is about to wait for a place, maybe more than once
}

// Outcome is the decision of a call's limits, without the shadow. If a limit has failed, Err is its error, and By the limit.
type Outcome struct {
	OK  bool
	By  gate.Decider
	Err error
}

// Enter blocks until a call of a row may begin. If it is refused or fails, it holds nothing. In shadow it passes.
func (e *Env) Enter(ctx context.Context, s *Slot, row Row, call Call) (*gate.Admission, Outcome, error) {
	b, err := s.get(e, row)
	if err != nil {
		return nil, Outcome{}, err
	}
	a := &attempt{bounds: b, Call: call, env: e, slot: s}
	if a.Limiter == nil {
		a.Wait = 0
	}
	if !call.Shadow { // a call in shadow never waits
		a.patience = call.PlaceWait
	}
	ended := false
	defer func() {
		if !ended { // an observer or the hook has panicked
			a.giveBack()
		}
	}()
	refused, err := a.run(ctx)
	outcome := Outcome{OK: err == nil && refused == nil, By: a.asked, Err: err}
	if outcome.OK {
		if err = ctx.Err(); err == nil {
			a.grant.admitted()
		}
	}
	var admission *gate.Admission
	switch {
	case call.Shadow && ctx.Err() == nil && refused != nil && refused.By == gate.ByConcurrency && call.PlaceWait > 0:
		admission, err = a.passes(), nil
	case call.Shadow && ctx.Err() == nil:
		admission, err = a.passed(refused, err), nil
	default:
		admission, err = a.end(refused, err)
	}
	ended = true
	return admission, outcome, err
}

// end returns the admission of a call that is not in shadow, and gives back what a call holds that may not begin.
func (a *attempt) end(refused *gate.Admission, err error) (*gate.Admission, error) {
	if refused != nil || err != nil {
		a.giveBack()
	}
	switch {
	case err != nil:
		return nil, err
	case refused != nil:
		if refused.By != gate.ByLimit {
			a.report(refused.By, false)
		}
		return refused, nil
	case a.Limiter != nil:
		return a.admitted(gate.ByLimit), nil
	}
	return a.admitted(a.reportPassed()), nil
}

// localShare returns the number of calls of a row that this process admits during an outage of the semaphores' backend.
func (e *Env) localShare(concurrent int) int {
	n, shares := e.Policy.Instances()
	switch {
	case shares:
		return max(1, concurrent/n)
	case e.Policy == tokenbucket.FailOpen:
		return concurrent
	}
	return 0
}
