package semaphore

import "time"

// holdings are the permits that this process holds of a fleet's semaphore. renewAt and firstEnd are never later than the first of
// permits needs, and may be earlier: to find that again at each release would cost a pass over all. The coordinator's lock guards it.
type holdings struct {
	permits  map[string]*Permit // by id
	fixed    bool               // they are not renewed
	renewAt  time.Duration      // 0: none
	firstEnd time.Duration      // 0: none
}

// add notes a permit, or that it was renewed.
func (h *holdings) add(p *Permit, lease time.Duration) {
	h.permits[p.more.id] = p
	if !h.fixed {
		h.renewAt = earlier(h.renewAt, p.more.renewed+lease/3)
	}
	h.firstEnd = earlier(h.firstEnd, p.more.deadline)
}

// due returns the permits that want to be renewed, at most a batch of them.
func (h *holdings) due(now, lease time.Duration) (due []*Permit) {
	if len(h.permits) == 0 {
		h.renewAt = 0
	}
	if h.renewAt == 0 || now < h.renewAt {
		return nil
	}
	h.renewAt = 0
	for _, p := range h.permits {
		if at := p.more.renewed + lease/3; at > now {
			h.renewAt = earlier(h.renewAt, at)
		} else if due = append(due, p); len(due) == maxBatch {
			h.renewAt = now
			break
		}
	}
	return due
}

// nextRenewal is when the first wants to be renewed; 0: none does.
func (h *holdings) nextRenewal() time.Duration {
	if len(h.permits) == 0 {
		return 0
	}
	return h.renewAt
}

// ends is when the first may have to end; 0: none does.
func (h *holdings) ends() time.Duration {
	if len(h.permits) == 0 {
		h.firstEnd = 0
	}
	return h.firstEnd
}

// expired takes out the permits whose time has come.
func (h *holdings) expired(now time.Duration) (over []*Permit) {
	if h.ends() == 0 || now < h.firstEnd {
		return nil
	}
	h.firstEnd = 0
	for id, p := range h.permits {
		if now >= p.more.deadline {
			delete(h.permits, id)
			over = append(over, p)
		} else {
			h.firstEnd = earlier(h.firstEnd, p.more.deadline)
		}
	}
	return over
}
