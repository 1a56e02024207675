package slidingwindow

import "slices"

// admitted are the permits that this process has admitted, each at the latest time that the server's clock may have shown. Before the first
// reply, times are those of the process's own clock. During an outage a local share counts by it. If Redis has lost the state, it is
// reported to Redis. The coordinator's mu guards it.
type admitted struct {
	counts     counts
	unreported counts // the permits that Redis does not know
	refunds    []part // to be sent to Redis; no longer in the counts
}

// shift moves everything in time.
func (a *admitted) shift(r *rule, by int64) {
	a.counts.shift(r, by)
	a.follow(r, by)
}

// advance moves on to a time; see counts.advance.
func (a *admitted) advance(r *rule, at int64) {
	before := a.counts.shifted
	a.counts.advance(r, at)
	a.follow(r, a.counts.shifted-before)
}

// follow moves everything but the counts in time.
func (a *admitted) follow(r *rule, by int64) {
	if by == 0 {
		return
	}
	a.unreported.shift(r, by)
	for i := range a.refunds {
		a.refunds[i].last += by
	}
}

// take admits permits without Redis, unless more than share would be in the window then; 0 means no bound. The permits count from the
// latest time that it may be, and the window ends at the earliest.
func (a *admitted) take(r *rule, n, share, earliest, latest int64) (at int64, ok bool) {
	a.unreported.advance(r, earliest)
	if at = a.counts.advance(r, earliest); share > 0 && a.counts.used(r, at)+n > share {
		return at, false
	}
	a.counts.addAt(r, latest, n) // beyond 2^37 it has no effect
	a.unreported.addAt(r, latest, n)
	return max(latest, a.counts.seen), true
}

// refund removes permits that were admitted at a time, and queues their refund in Redis.
func (a *admitted) refund(r *rule, at, n int64) {
	if n = a.counts.remove(r, at, n); n > 0 {
		a.refunds = append(a.refunds, part{at, n})
	}
}

// report removes and returns the parts to report. Permits that are refunded before they were reported are not reported at all.
func (a *admitted) report(r *rule) []part {
	refunds := a.refunds
	a.refunds = nil
	for _, p := range refunds {
		if p.count -= a.unreported.remove(r, p.last, p.count); p.count > 0 {
			a.refunds = append(a.refunds, p)
		}
	}
	parts := a.unreported.list()
	a.unreported = counts{}
	return parts
}

// owes reports whether there are permits or refunds in the window that Redis does not know.
func (a *admitted) owes(r *rule, now int64) bool {
	first := r.index(now) - r.parts
	return a.unreported.size > 0 && r.index(a.unreported.at(a.unreported.size-1).last) >= first ||
		slices.ContainsFunc(a.refunds, func(p part) bool { return r.index(p.last) >= first })
}

// restore adds parts again that could not be reported.
func (a *admitted) restore(r *rule, parts []part) {
	if len(parts) > 0 {
		parts = append(parts, a.unreported.list()...)
		a.unreported.load(r, a.counts.seen, parts)
	}
}

// lost handles the loss of the state in Redis: the refunds lapse, and everything must be reported but the parts that were reported
// meanwhile.
func (a *admitted) lost(r *rule, told []part) {
	a.refunds = nil
	a.unreported.load(r, a.counts.seen, without(r, a.counts.list(), told))
}

// without returns parts less others, by sub-interval.
func without(r *rule, parts, others []part) (rest []part) {
	for _, p := range parts {
		for _, o := range others {
			if r.index(o.last) == r.index(p.last) {
				p.count -= o.count
			}
		}
		if p.count > 0 {
			rest = append(rest, p)
		}
	}
	return rest
}
