package engine

import (
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// localShare is the bucket of this process for outages of the store. The mu of the coordinator that falls back guards it.
//
// Invariant: in each outage the local bucket begins empty once, after what this process has reserved in the bucket itself (O2).
type localShare struct {
	local  *Coordinator   // of the local bucket; nil before the first outage
	served bool           // the store has replied since the local bucket was last used
	outage *outage.Outage // in which the local bucket was last used
}

// LocalShare attaches a limiter to the local bucket that is used during outages. All outages use the same local bucket, so that what was
// reserved in one counts in the next. The local bucket begins empty in a new outage, and if the store has replied meanwhile.
func (c *Coordinator) LocalShare(l *Limiter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &c.share
	begins := s.served
	if s.local == nil {
		s.local, begins = c.Env.LocalShare(), true
	}
	if o := c.Down(); o != nil && o != s.outage {
		s.outage, begins = o, true
	}
	if l.Coordinator == nil {
		l.Coordinator = s.local
	}
	if !begins {
		return
	}
	s.served = false
	now := c.Now()
	s.local.beginEmpty(l, max(1, c.View.heldUntil-now), c.queue.last()-now)
}

// beginEmpty empties the bucket of an Immediate store: nothing falls due within the time held, in microseconds. If nothing is reserved in
// the bucket, nothing falls due within the time reserved either.
func (c *Coordinator) beginEmpty(l *Limiter, held, reserved int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.Now()
	if c.queue.last() <= now {
		held = max(held, reserved)
	}
	f := c.inFlight.next(l, now)
	f.batch.Requests = append(f.batch.Requests, permit.Request{Op: permit.Hold, HoldMicros: held})
	c.decide(f)
	c.dispatch(now)
}
