package slidingwindow

// admitted is what this process has admitted, by the server's clock at the latest; until that was heard, by its own. It is what a share
// goes by while Redis is away, and what is told if Redis has lost the state.
type admitted struct {
	counts     counts
	unreported counts // what of it Redis does not know
}

// shift moves everything in time.
func (a *admitted) shift(r *rule, by int64) {
	a.counts.shift(r, by)
	a.unreported.shift(r, by)
}

// take admits permits without asking Redis, unless more than a share would be in the window then; share 0: there is none. They count from
// the latest that it can be, and the window ends at the earliest.
func (a *admitted) take(r *rule, n, share, earliest, latest int64) bool {
	a.unreported.advance(r, earliest)
	if at := a.counts.advance(r, earliest); share > 0 && a.counts.used(r, at)+n > share {
		return false
	}
	a.counts.addAt(r, latest, n) // beyond 2^37 it counts no more
	a.unreported.addAt(r, latest, n)
	return true
}

// report takes what is to be told.
func (a *admitted) report() []part {
	parts := a.unreported.list()
	a.unreported = counts{}
	return parts
}

// restore takes back what could not be told.
func (a *admitted) restore(r *rule, parts []part) {
	if len(parts) > 0 {
		parts = append(parts, a.unreported.list()...)
		a.unreported.load(r, a.counts.seen, parts)
	}
}

// lost notes that Redis has lost the state. What it was told meanwhile it knows.
func (a *admitted) lost(r *rule, told []part) {
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
