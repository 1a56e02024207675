package matrix

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// result is what a cell has shown.
type result struct {
	world         world
	cell          *cell
	share         float64
	free, refused bool
	low           float64 // the share of lower priorities
	wrong         string
}

// holds reports whether the cell has shown nothing that is not known.
func (r result) holds() bool { return r.wrong == "" || isKnown(r.cell) != "" }

// judgement is a cell, of which all parts have been joined.
type judgement struct {
	*cell
	world   world
	control float64 // the share that a plain cell of the same batch has used; at most 1
}

// join adds the part of another process to that of the first.
func (p *part) join(other part) {
	p.Uses = append(p.Uses, other.Uses...)
	p.Failures = append(p.Failures, other.Failures...)
	p.Refusal = cmp.Or(p.Refusal, other.Refusal)
	p.EndedAt = max(p.EndedAt, other.EndedAt)
	p.Late = max(p.Late, other.Late)
}

// raised returns the permits that a raised rate has added between two times.
func (p *part) raised(from, to time.Duration) float64 {
	if p.RaisedAt == 0 {
		return 0
	}
	if p.ResetAt > 0 && !p.Stays {
		to = min(to, p.ResetAt)
	}
	return (faster - rate) * max(0, to-max(from, p.RaisedAt)).Seconds()
}

// possible returns the permits that fall due between two times.
func (p *part) possible(from, to time.Duration) float64 {
	n := rate * (to - from).Seconds()
	if p.Second {
		n *= 2
	}
	return n + p.raised(from, to)
}

// used returns the permits that were used between two times.
func (p *part) used(from, to time.Duration) (n int) {
	for _, u := range p.Uses {
		if u.At > from && u.At <= to {
			n += u.Permits
		}
	}
	return n
}

// window returns by how many permits the fullest window, of any length, exceeds the rate.
func (p *part) window() (most float64) {
	per := rate
	if p.Second {
		per += rate
	}
	if p.RaisedAt > 0 {
		per += faster - rate
	}
	sum, last := 0.0, time.Duration(0)
	for _, u := range p.Uses {
		sum = max(0, sum-per*(u.At-last).Seconds()) + float64(u.Permits)
		last, most = u.At, max(most, sum)
	}
	return most
}

// result judges the cell.
func (c judgement) result() result {
	r := result{world: c.world, cell: c.cell, free: c.Free}
	slices.SortStableFunc(c.Uses, func(a, b use) int { return cmp.Compare(a.At, b.At) })
	reason := refusal(c.cell)
	if r.refused = c.Refusal != ""; r.refused {
		if reason == "" {
			c.fail("refused, and refusals has no reason: %v", c.Refusal)
		}
		r.wrong = strings.Join(c.Failures, "; ")
		return r
	}
	if reason != "" && !c.has("WithShadow") { // a shadow lets pass what another one refuses
		c.fail("refusals has a reason, %q, and it is not refused", reason)
	}
	c.share(&r)
	c.bound()
	c.sum()
	c.order()
	c.priority(&r)
	c.turns()
	r.wrong = strings.Join(c.Failures, "; ")
	return r
}

// share judges how much of the rate is used, without the time in which processes start.
func (c judgement) share(r *result) {
	from, late := time.Duration(0), 0.0
	if c.world.real() {
		from, late = start, rate*slack.Seconds()
	}
	used, possible := c.used(from, c.EndedAt), c.possible(from, c.EndedAt)
	r.share = float64(used) / max(1, possible-c.Lost-1-late) / c.control
	if r.share < least {
		c.fail("%.3f of the rate is used: %d of %.0f permits (%.0f need not be; a plain cell uses %.3f)", r.share, used, possible, c.Lost, c.control)
	}
}

// bound judges that no more is used than is due, in all and in each window.
func (c judgement) bound() {
	if c.Free {
		return
	}
	used, possible := c.used(-1, c.EndedAt), c.possible(0, c.EndedAt)
	most := possible + c.More + 2 // the bucket begins empty, or with the one permit of a quota; a choice has two
	full := burst + c.More + 1
	if c.Second {
		full += burst + 1
	}
	if c.world.real() {
		lateness := rate * (late + c.Late).Seconds()
		most += lateness / 2 // how well the server's clock is known
		full += 2 * lateness // those of all processes are used late
	}
	if float64(used) > most {
		c.fail("%d permits are used, and at most %.0f are due", used, most)
	}
	if n := c.window(); n > full {
		c.fail("a window has %.0f permits beyond the rate, and at most %.0f may be", n, full)
	}
}

// sum judges what is left after Close: what was used and what is stored are what the rate has made. Permits that are owed to nobody may be
// missing only if two queues took turns, or calls were charged: behind the permits of another queue, or a charge, unused ones lapse.
func (c judgement) sum() {
	if c.Free || c.Second || c.AsOf == 0 || c.has("warm-up") {
		return
	}
	made, sum := c.possible(0, c.AsOf), float64(c.used(-1, c.AsOf))+c.Stored-c.Owed
	lapsed, lateness := 1.0, 0.0
	if c.world.processes > 1 || c.has("Low", "Lowest", "Settle up") {
		lapsed += c.owned()
	}
	if c.has("NewQuota", "SetQuota") { // they store one permit only
		lapsed += faster * drain.Seconds()
	}
	if c.world.real() {
		lateness = rate * (late/2 + c.Late).Seconds()
		lapsed += rate * start.Seconds()
	}
	if sum < least*c.control*made-c.Lost-lapsed || sum > made+c.More+2+lateness {
		c.fail("%.0f permits are used or stored after Close, of %.0f that the rate has made", sum, made)
	}
}

// order judges that the callers that wait in one queue are served first come, first served: those of a process, a priority and, in turns, a tenant.
func (c judgement) order() {
	if c.has("All", "Any", "Reset", "FailClosed", "FailOpen", "LocalShare", "WithPrefetch", "WithShadow", "WithSwitch") {
		return
	}
	slack := time.Duration(0)
	if c.world.real() {
		slack = late/2 + c.Late // the instant at which a call enters a queue is not known exactly
	}
	type queue struct{ process, face, tenant int }
	queues := map[queue][]use{}
	for _, u := range c.Uses {
		if u.Waited {
			q := queue{process: u.Process, face: u.Face}
			if c.has("WithFairness") {
				q.tenant = tenant(u.Caller)
			}
			queues[q] = append(queues[q], u)
		}
	}
	n := 0
	for _, uses := range queues {
		n += overtaken(uses, slack)
	}
	if n > 0 {
		c.fail("%d calls were overtaken", n)
	}
}

// overtaken counts the calls that were made earlier than another one, and served later, both by more than the slack. They are in the order of
// their service.
func overtaken(uses []use, slack time.Duration) (n int) {
	earlier, latest := 0, -time.Hour // the latest call of those that were served earlier by more than the slack
	for _, u := range uses {
		for uses[earlier].At < u.At-slack {
			latest = max(latest, uses[earlier].Asked)
			earlier++
		}
		if u.Asked < latest-slack {
			n++
		}
	}
	return n
}

// lined reports whether all callers wait in the queue of their process all the time, and its order alone decides who is served.
func (c judgement) lined() bool {
	for _, f := range c.features {
		if f.call != nil && !slices.Contains([]string{"Acquire", "TryAwait"}, f.name) {
			return false
		}
	}
	return !c.has("All", "Any", "WithShadow", "WithSwitch", "FailClosed", "FailOpen", "LocalShare", "window and places")
}

// priority judges that callers of a lower priority leave nearly all of the rate to those of the highest, who want all of it.
func (c judgement) priority(r *result) {
	if !c.has("Low", "Lowest") || !c.lined() {
		return
	}
	lower, all := 0, 0
	for _, u := range c.Uses {
		if u.At < start {
			continue
		}
		all += u.Permits
		if u.Face > 0 {
			lower += u.Permits
		}
	}
	r.low = float64(lower) / float64(max(1, all))
	if r.low > lowest*float64(len(c.faces())-1) {
		c.fail("lower priorities have %.2f of the rate", r.low)
	}
}

// turns judges that in each process every tenant has an equal part.
func (c judgement) turns() {
	if !c.has("WithFairness") || !c.lined() || c.has("Low", "Lowest") {
		return
	}
	for p := range c.world.processes {
		var tenants [3]int
		for _, u := range c.Uses {
			if u.Process == p && u.At >= start {
				tenants[tenant(u.Caller)] += u.Permits
			}
		}
		if least, most := slices.Min(tenants[:]), slices.Max(tenants[:]); float64(least) < unequal*float64(most)-2 {
			c.fail("tenants have %v permits of process %d", tenants, p)
		}
	}
}
