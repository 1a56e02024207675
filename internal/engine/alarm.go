package engine

import (
	"time"

	"github.com/jonboulle/clockwork"
)

// alarm is the timer of a coordinator by the limiter's clock. One timer serves all callers, so thousands of them wait at no cost. The
// coordinator's mu must be held for all methods.
//
// Invariant: while the timer is set, it fires no later than the first of the reasons.
type alarm struct {
	timer clockwork.Timer
	at    int64 // when the timer fires, in limiter microseconds; 0 if unset
}

// reasons are the times at which the alarm must ring, in limiter microseconds; 0 for a reason that does not apply.
type reasons struct {
	due    int64 // the permits of a waiter are due, or its timeout ends
	ask    int64 // the store is asked again for the uncovered waiters
	listen int64 // the store is asked for the state of a bucket without a recent reply
	review int64 // a lease is half over, or ends
	yield  int64 // permits that no waiter needs go back
}

// first returns the first of the times; 0 if no reason applies.
func (r reasons) first() int64 {
	return sooner(sooner(sooner(r.due, r.ask), sooner(r.listen, r.review)), r.yield)
}

// set sets the timer for the first of the reasons.
func (a *alarm) set(c *Coordinator, r reasons) {
	next := r.first()
	if next == a.at {
		return
	}
	a.at = next
	now := c.Now()
	switch {
	case next == 0:
		a.timer.Stop()
		return
	case a.timer == nil:
		a.timer = c.Clock.AfterFunc(time.Duration(next-now)*time.Microsecond, c.Ring)
		if c.System() || c.Now() == now {
			return
		}
	}
	c.SetTimer(a.timer, next, now)
}
