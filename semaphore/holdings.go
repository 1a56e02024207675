package semaphore

import (
	"math"
	"time"
)

// never is the deadline of a permit without a lease.
const never = math.MaxInt64

// holdings are the permits of a fleet's semaphore that this process holds. renewAt and firstEnd may be earlier than needed, but never
// later: finding the exact times at each release would take a pass over all permits. The coordinator's mu guards it.
type holdings struct {
	permits  map[string]*Permit // by id
	fixed    bool               // leases are not renewed
	renewAt  time.Duration      // when the next renewal is due; 0 if none is
	firstEnd time.Duration      // the first deadline; 0 if there is none
}

// add records a permit that was granted or renewed.
func (h *holdings) add(p *Permit, lease time.Duration) {
	h.permits[p.more.id] = p
	if p.more.deadline == never {
		return
	}
	if !h.fixed {
		h.renewAt = earlier(h.renewAt, p.more.renewed+lease/3)
	}
	h.firstEnd = earlier(h.firstEnd, p.more.deadline)
}

// due returns the permits whose renewal is due, at most a batch of them.
func (h *holdings) due(now, lease time.Duration) (due []*Permit) {
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
		if at := p.more.renewed + lease/3; at > now {
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

// expired removes and returns the permits whose deadline has passed.
func (h *holdings) expired(now time.Duration) (over []*Permit) {
	if h.ends() == 0 || now < h.firstEnd {
		return nil
	}
	h.firstEnd = 0
	for id, p := range h.permits {
		if now >= p.more.deadline {
			delete(h.permits, id)
			over = append(over, p)
		} else if p.more.deadline != never {
			h.firstEnd = earlier(h.firstEnd, p.more.deadline)
		}
	}
	return over
}
