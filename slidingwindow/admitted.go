package slidingwindow

import "slices"

// admitted is what this process has admitted, each at the latest that the server's time could be; until the server's clock was heard, at
// times of its own. While Redis is away, a share goes by it. If Redis has lost the state, it is told this.
type admitted struct {
	counts     counts
	unreported counts // what of it Redis does not know
	refunds    []part // what is to be given back there, and is in the counts no more
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

// follow moves the rest as the counts were.
func (a *admitted) follow(r *rule, by int64) {
	if by == 0 {
		return
	}
	a.unreported.shift(r, by)
	for i := range a.refunds {
		a.refunds[i].last += by
	}
}

// take admits permits without asking Redis, unless more than a share would be in the window then; share 0: there is none. They count from
// the latest that it can be, and the window ends at the earliest.
func (a *admitted) take(r *rule, n, share, earliest, latest int64) (at int64, ok bool) {
	a.unreported.advance(r, earliest)
	if at = a.counts.advance(r, earliest); share > 0 && a.counts.used(r, at)+n > share {
		return at, false
	}
	a.counts.addAt(r, latest, n) // beyond 2^37 it counts no more
	a.unreported.addAt(r, latest, n)
	return max(latest, a.counts.seen), true
}

// refund takes back permits that were admitted at a time, and notes what Redis must give back.
func (a *admitted) refund(r *rule, at, n int64) {
	if n = a.counts.remove(r, at, n); n > 0 {
		a.refunds = append(a.refunds, part{at, n})
	}
}

// report takes what is to be told. What is to be given back, and was not told yet, is not told at all.
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

// owes tells whether there is something that Redis does not know, and that is in the window yet.
func (a *admitted) owes(r *rule, now int64) bool {
	first := r.index(now) - r.parts
	return a.unreported.size > 0 && r.index(a.unreported.at(a.unreported.size-1).last) >= first ||
		slices.ContainsFunc(a.refunds, func(p part) bool { return r.index(p.last) >= first })
}

// restore takes back what could not be told.
func (a *admitted) restore(r *rule, parts []part) {
	if len(parts) > 0 {
		parts = append(parts, a.unreported.list()...)
		a.unreported.load(r, a.counts.seen, parts)
	}
}

// lost notes that Redis has lost the state, and with it what is to be given back. What it was told meanwhile it knows.
func (a *admitted) lost(r *rule, told []part) {
	a.refunds = nil
	a.unreported.load(r, a.counts.seen, without(r, a.counts.list(), told))
}

// without is parts less those of others, by sub-interval.
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
