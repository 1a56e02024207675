package semaphore

import (
	"math"
	"time"
)

// never is the deadline of a permit without a lease.
const never = math.MaxInt64

// holdings are the permits of a fleet's semaphore that this process holds, and the times of their leases. renewAt and firstEnd may be
// earlier than needed, but never later: finding the exact times at each release would take a pass over all permits. The coordinator's mu
// guards it, except the first five fields, which do not change.
type holdings struct {
	lease    time.Duration
	margin   time.Duration // work under a permit must stop this long before its lease ends
	fixed    bool          // leases are not renewed
	name     string        // of the semaphore, for the observer
	observer *Observer
	permits  map[string]*Permit // by id
	renewAt  time.Duration      // when the next renewal is due; 0 if none is
	firstEnd time.Duration      // the first deadline; 0 if there is none
}

// add records a permit that was granted or renewed.
func (h *holdings) add(p *Permit) {
	h.permits[p.more.id] = p
	if p.more.deadline == never {
		return
	}
	if !h.fixed {
		h.renewAt = earlier(h.renewAt, p.more.renewed+h.lease/3)
	}
	h.firstEnd = earlier(h.firstEnd, p.more.deadline)
}

// end removes a permit, and reports whether it was held until now.
func (h *holdings) end(p *Permit, why error) bool {
	delete(h.permits, p.more.id)
	held := p.end(why)
	if held {
		h.observer.ended(h.name, p, why)
	}
	return held
}

// renewed records whether the batch that was sent at the given time has renewed a permit.
func (h *holdings) renewed(p *Permit, ok bool, sent time.Duration) {
	switch {
	case h.permits[p.more.id] != p: // released meanwhile
	case ok:
		p.more.renewed, p.more.deadline = sent, sent+h.lease-h.margin
		h.add(p)
	default:
		h.end(p, ErrLost)
	}
}

// renewAgain makes the renewals due that failed or were not decided.
func (h *holdings) renewAgain(failed []*Permit, now time.Duration) {
	if len(failed) > 0 {
		h.renewAt = now
	}
}

// due returns the permits whose renewal is due, at most a batch of them.
func (h *holdings) due(now time.Duration) (due []*Permit) {
	if len(h.permits) == 0 {
		h.renewAt = 0
	}
	if h.renewAt == 0 || now < h.renewAt {
		return nil
	}
	h.renewAt = 0
	for _, p := range h.permits {
		if p.more.passed {
			continue
		}
		if at := p.more.renewed + h.lease/3; at > now {
			h.renewAt = earlier(h.renewAt, at)
		} else if due = append(due, p); len(due) == maxBatch {
			h.renewAt = now
			break
		}
	}
	return due
}

// nextRenewal returns when the next renewal is due; 0 if none is.
func (h *holdings) nextRenewal() time.Duration {
	if len(h.permits) == 0 {
		return 0
	}
	return h.renewAt
}

// ends returns the earliest deadline; 0 if there is none.
func (h *holdings) ends() time.Duration {
	if len(h.permits) == 0 {
		h.firstEnd = 0
	}
	return h.firstEnd
}

// expire ends and returns the permits that were not renewed before their deadline.
func (h *holdings) expire(now time.Duration) (over []*Permit) {
	if h.ends() == 0 || now < h.firstEnd {
		return nil
	}
	h.firstEnd = 0
	for _, p := range h.permits {
		if now >= p.more.deadline {
			h.end(p, ErrExpired)
			over = append(over, p)
		} else if p.more.deadline != never {
			h.firstEnd = earlier(h.firstEnd, p.more.deadline)
		}
	}
	return over
}
