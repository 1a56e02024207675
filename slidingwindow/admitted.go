package slidingwindow

import "slices"

// admitted are the permits that this process has admitted, each at the latest time that the server's clock may have shown. Before the first
// reply, times are those of the process's own clock. During an outage a local share counts by it. If Redis has lost the state, it is
// reported to Redis. Without Redis only the counts are used.
type admitted struct {
	counts     counts
	unreported counts  // the permits that Redis does not know
	doubtful   *report // until the reply to a batch with it: Redis has counted it then
	refunds    []part  // to be sent to Redis; no longer in the counts
}

// report is permits that were sent to Redis, and that it may know, because the reply was lost: nil if there are none. They are sent with their
// number until a reply comes. Redis remembers the number of the last report that it has counted, so it counts them once.
type report struct {
	number int64
	parts  []part
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
	if d := a.doubtful; d != nil {
		d.parts = slices.Clone(d.parts) // a batch has the others
		for i := range d.parts {
			d.parts[i].last += by
		}
	}
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

// report returns the report to send, or nil. number is that of a new one. Permits that are refunded before they were reported are not reported
// at all.
func (a *admitted) report(r *rule, number int64) *report {
	refunds := a.refunds
	a.refunds = nil
	for _, p := range refunds {
		if p.count -= a.unreported.remove(r, p.last, p.count); p.count > 0 {
			a.refunds = append(a.refunds, p)
		}
	}
	if a.doubtful == nil && a.unreported.size > 0 {
		a.doubtful = &report{number, a.unreported.list()}
		a.unreported = counts{}
	}
	return a.doubtful
}

// owes reports whether there are permits or refunds in the window that Redis does not know.
func (a *admitted) owes(r *rule, now int64) bool {
	first := r.index(now) - r.parts
	counts := func(p part) bool { return r.index(p.last) >= first }
	return a.unreported.size > 0 && counts(*a.unreported.at(a.unreported.size - 1)) ||
		a.doubtful != nil && slices.ContainsFunc(a.doubtful.parts, counts) || slices.ContainsFunc(a.refunds, counts)
}

// lost handles the loss of the state in Redis: the refunds lapse, and everything must be reported but the parts that the new state has been
// told.
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
