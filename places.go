package tokenbucket

import (
	"slices"
	"time"
)

// A run is a stretch of a bucket's account that belongs to this process: requests granted one after another, nobody
// else's between them. It is what lets a cancelled request leave no trace: the requests behind it in the run are booked
// again as if it had never come, and what becomes free at the end goes back to the store.
type run struct {
	limiter *RateLimiter // whose configuration the run was granted under, for requests to the store
	setting setting
	epoch   int64
	offset  int64 // local time − store's time, never too small, so that nobody is let go early

	cursor mark // the account after the last entry
	limit  mark // where this process's part ends; beyond the cursor it is a gap for our next caller
	prev   int64
	tag    int64 // the place that ends at limit, as the store knows it

	entries []*call // used ones first, then those who wait, in order of time
	waiting int     // how many of the entries wait
	inBack  bool    // a giveBack is under way
	fixed   bool    // held back since: those behind a gone entry keep their times
	freed   freed   // stored permits of cancelled entries since the last giveBack
}

// freed sums up the stored permits of cancelled calls, as GiveBack wants them.
type freed struct {
	spent, level float64
	granted, id  int64
}

func (f *freed) add(c *call) {
	spent := c.place.before.Stored - c.place.after.Stored
	if c.run.setting.Kind == Bursty {
		f.merge(freed{spent: spent, level: c.place.after.Stored, granted: c.granted, id: c.id})
	}
}

func (f *freed) merge(o freed) {
	if o.spent <= 0 {
		return
	}
	if f.spent == 0 || o.granted < f.granted {
		f.granted = o.granted
	}
	f.spent += o.spent
	f.level = max(f.level, o.level)
	f.id = max(f.id, o.id)
}

// maxJitter, in microseconds, is how far apart the store's clock may seem through answers that take different times.
const maxJitter = 100_000

// maxHistory bounds how many used reservations a run remembers for being cancelled late.
const maxHistory = 64

// join adds a granted call to the line's runs. Those that wait are released in order by tick.
func (l *line) join(c *call, g *Grant, out *Outcome, received, now int64) {
	p := &g.Place
	r := l.lastRun()
	due := received + g.WaitMicros
	// First come, first served, though answers take different times to arrive. More than that apart, the store has
	// forgotten those who wait, or its clock has stepped: they keep their times, and this call has its own.
	stepped := l.lastDue-due > maxJitter || r != nil && r.epoch != p.Epoch
	if !stepped {
		due = max(due, l.lastDue)
	}
	if r == nil || stepped || r.tag != p.Prev || r.setting.Config != out.Bucket.Config || r.cursor != r.limit || r.inBack {
		r = &run{
			limiter: c.limiter, setting: out.Bucket.setting(), epoch: p.Epoch,
			prev: p.Prev,
		}
		l.runs = append(l.runs, r)
	}
	r.offset = received - out.NowMicros
	r.cursor, r.limit, r.tag = p.after, p.after, p.Tag
	r.entries = append(r.entries, c)
	c.run, c.arrived = r, out.NowMicros
	c.due, l.lastDue = due, due
	if due <= now && r.waiting == 0 && !c.gone {
		c.used = true
		r.fold()
		return
	}
	r.waiting++
}

// head is the first entry that waits.
func (r *run) head() *call { return r.entries[len(r.entries)-r.waiting] }

func (l *line) lastRun() *run {
	if len(l.runs) == 0 {
		return nil
	}
	return l.runs[len(l.runs)-1]
}

// release lets everybody go whose permits are due, in order. Nobody is gone, see compact.
func (l *line) release(now int64) {
	if l.overslept(now) {
		l.startOver(now)
	}
	for _, r := range l.runs {
		for r.waiting > 0 && r.head().due <= now {
			c := r.head()
			r.waiting--
			c.used = true
			c.arrived = max(c.arrived, c.usedAt())
			r.fold()
			c.finish(nil)
		}
	}
	l.prune(now)
}

// tolerated, in microseconds, is how late a caller may be let go by a machine that is merely busy. It adds at most
// rate × lateness permits to a window at the upstream.
const tolerated = 100_000

// overslept tells whether somebody should have been let go long ago: this process, or its machine, was stopped. A clock
// that is not the system's jumps as it likes.
func (l *line) overslept(now int64) bool {
	if !l.paces {
		return false
	}
	for _, r := range l.runs {
		if r.waiting > 0 && now-r.head().due > tolerated {
			return true
		}
	}
	return false
}

// startOver lets all who wait ask again, in their order. The times of the first of them have passed while this process was
// stopped: let go now, they would all arrive at once. A permit that nobody used at its time lapses; what lies ahead, and what
// the bucket could have saved up meanwhile, goes back, if nobody else has asked since. So it is as if those who wait had come
// just now, and not one permit too many is used.
//
// A TryAcquire whose timeout has passed is refused.
func (l *line) startOver(now int64) {
	var again []*call
	for _, r := range l.runs {
		waiting := r.entries[len(r.entries)-r.waiting:]
		for i, c := range waiting {
			if c.gone {
				continue
			}
			stub := *c // stays behind, gone, until the run is booked again
			stub.gone, stub.done = true, true
			waiting[i] = &stub
			l.dirty = true
			if c.afresh(now) {
				again = append(again, c)
			}
		}
	}
	l.forget()
	l.compact(now)
	l.queue = append(again, l.queue...)
}

// afresh makes a granted call one that asks, or refuses it: then it is its caller's.
func (c *call) afresh(now int64) bool {
	passed := now - max(c.decided, c.again)
	c.run, c.place, c.id = nil, Place{}, 0
	c.again, c.sent = now, mono()
	switch {
	case c.reserved:
		c.maxWait, c.deadline = maxExact, time.Time{} // it was promised, whatever has become of the context since
	case c.acquire:
		c.parked0 = max(c.parked0, c.decided) // nobody overtakes it
	case c.maxWait < passed:
		c.refused, c.wait = true, c.maxWait+passed
		c.finish(nil)
		return false
	default:
		c.maxWait -= passed
	}
	return true
}

// retryMicros is how long reservations wait that have asked again in vain.
const retryMicros = 100_000

// retry lets reservations that asked again, in vain, ask once more: they were promised, and a permit that nobody granted
// must not be used.
func (l *line) retry(promised []*call) {
	if len(promised) == 0 {
		return
	}
	for _, c := range promised {
		c.waits = true
		l.ahead += c.permits
	}
	l.parked = append(promised, l.parked...)
	l.retryAt = l.now() + retryMicros
}

// usedAt is the time, by the store's clock, at which a call that had to wait was let go.
func (c *call) usedAt() int64 {
	if c.run.setting.Payment == PayLater {
		return c.place.before.Next
	}
	return c.place.after.Next
}

// fold forgets entries at the head that nobody can cancel any more: the account begins after them.
func (r *run) fold() {
	for len(r.entries) > r.waiting {
		c := r.entries[0]
		pinned := c.reserved && !(r.setting.Kind == WarmingUp && r.setting.Payment == PayNow)
		if pinned && len(r.entries)-r.waiting <= maxHistory {
			return
		}
		r.prev = 0
		c.run = nil
		r.entries = r.entries[1:]
	}
}

// prune drops runs that hold nobody and nothing.
func (l *line) prune(now int64) {
	l.runs = slices.DeleteFunc(l.runs, func(r *run) bool {
		if r.waiting > 0 || r.inBack {
			return false
		}
		gap := r.cursor != r.limit && r.limit.Next+r.offset > now
		return !gap && (len(r.entries) == 0 || r != l.runs[len(l.runs)-1])
	})
	if len(l.runs) == 0 {
		l.runs, l.lastDue = nil, 0
	}
}

// resync is PermitBucket.ReSync on a mark. A caller of a PayNow bucket that waits may save up what it waits for, even
// if that is more than the bucket holds: the window bound is max(max permits, largest request).
func (r *run) resync(m mark, now, n int64) mark {
	most := r.setting.max
	if r.setting.Kind == Bursty && r.setting.Payment == PayNow {
		most = max(most, float64(n))
	}
	return r.setting.resync(m, now, most)
}

// book returns the place that n permits get at a point of the run for a caller that arrives now.
func (r *run) book(at mark, now, n int64) (before, after mark, due int64, ok bool) {
	before = r.resync(at, now, n)
	after, ok = r.setting.after(r.setting.Kind, before, n)
	due = after.Next
	if r.setting.Payment == PayLater {
		due = before.Next
	}
	return before, after, due, ok
}

// fits tells whether a booked place stays inside what this process holds.
func (r *run) fits(after mark) bool {
	return !r.limit.before(after) && after.Stored >= min(r.limit.Stored, r.setting.max)
}

// compact removes the calls that are gone from the runs: those behind each of them move up, as if it had never come.
//
// Why that over-issues nothing: a run is ours alone, so moving up touches nobody else. Within it, entries that were
// used stay at the times at which they were used, and those that still wait are booked as if they arrived now, at the
// account that the bucket would have had without the gone ones. That is a history which the bucket itself could have
// produced, so the window bound holds for it. And time that has passed is not saved up beyond max permits (or beyond
// what the one who waited for it wants): a permit that nobody used at its time lapses.
func (l *line) compact(now int64) {
	l.dirty = false
	dues := int64(0)
	for i := 0; i < len(l.runs); i++ {
		r := l.runs[i]
		r.rebook(now, &dues)
		if r.cursor == r.limit {
			continue
		}
		for _, next := range l.runs[i+1:] { // callers behind, first come first served, move into the gap
			if !r.pull(next, now, &dues) {
				break
			}
		}
	}
	l.lastDue = dues
	l.giveBackTail()
}

// hold lets everybody wait longer, for the bucket was held back (Penalize). Who was let go before that was known is gone.
// A lease is worthless, and what is cancelled of these runs lapses: the bucket's time stood still, and they do not know where.
func (l *line) hold(longer int64) {
	if longer <= 0 {
		return // another bucket: the old one was lost, or reset
	}
	l.forget()
	for l.lease.Load() != nil {
		l.rotate()
	}
	for _, r := range l.runs {
		r.fixed = true
		for _, m := range []*mark{&r.cursor, &r.limit} {
			m.Next += longer
		}
		for _, c := range r.entries[len(r.entries)-r.waiting:] {
			c.due += longer
			c.place.before.Next += longer
			c.place.after.Next += longer
		}
	}
	if l.lastDue > 0 {
		l.lastDue += longer
	}
}

// rebook books the entries behind the first gone one again.
func (r *run) rebook(now int64, dues *int64) {
	first := slices.IndexFunc(r.entries, func(c *call) bool { return c.gone })
	if first < 0 {
		for _, c := range r.entries[len(r.entries)-r.waiting:] {
			*dues = max(*dues, c.due)
		}
		return
	}
	at := r.entries[first].place.before
	kept := r.entries[:first]
	for _, c := range r.entries[first:] {
		if c.gone {
			if !c.used {
				r.waiting--
			}
			r.freed.add(c)
			c.run = nil
			continue
		}
		if r.fixed {
			at = c.place.after
			*dues = max(*dues, c.due)
		} else {
			at = r.move(c, at, now, dues)
		}
		kept = append(kept, c)
	}
	clear(r.entries[len(kept):])
	r.entries, r.cursor = kept, at
	r.own()
}

// move books one entry at a point of the account, no later than it stands, and returns the point after it.
func (r *run) move(c *call, at mark, now int64, dues *int64) mark {
	arrival := now - r.offset
	if c.used {
		arrival = c.arrived
	}
	before, after, due, ok := r.book(at, arrival, c.permits)
	if !ok || c.run == r && c.place.after.before(after) {
		before, after, due = c.place.before, c.place.after, c.due-r.offset
	}
	c.run, c.place.before, c.place.after, c.place.Tag = r, before, after, 0
	if !c.used {
		c.due = min(c.due, max(due+r.offset, *dues))
		*dues = max(*dues, c.due)
	}
	return after
}

// pull moves entries from the head of a later run into this run's gap, and reports whether that run gave all it had.
func (r *run) pull(next *run, now int64, dues *int64) bool {
	if next.setting.Config != r.setting.Config || next.epoch != r.epoch || r.fixed || next.fixed {
		return false
	}
	for i, c := range next.entries {
		if c.gone {
			continue
		}
		_, after, due, ok := r.book(r.cursor, now-r.offset, c.permits)
		if c.used || !ok || !r.fits(after) || due+r.offset > c.due {
			return false
		}
		stub := *c // stays behind, gone, until the later run is booked again
		stub.gone = true
		next.entries[i] = &stub
		r.cursor = r.move(c, r.cursor, now, dues)
		r.entries = append(r.entries, c)
		r.waiting++
		r.own()
	}
	return true
}

// own gives the last entry the tag that the store knows the end of the run by.
func (r *run) own() {
	if n := len(r.entries); n > 0 {
		p := &r.entries[n-1].place
		p.Tag, p.Prev = r.tag, r.tag
		if n == 1 {
			p.Prev = r.prev
		}
	}
}

// giveBackTail sends back what is free at the end of the last run, and of the runs before it while nothing is left. What
// was about to be sent is sent together with what has become free since.
func (l *line) giveBackTail() {
	for i := len(l.runs) - 1; i >= 0; i-- {
		r := l.runs[i]
		b := l.unsent(r)
		if r.inBack && b == nil {
			return
		}
		if b != nil {
			r.limit = b.limit
			r.freed.merge(b.freed)
		}
		if !r.cursor.before(r.limit) && !(r.cursor.Stored > r.limit.Stored) {
			return
		}
		if b == nil {
			b = &back{run: r}
			l.backs = append(l.backs, b)
		}
		b.limiter, b.limit, b.freed = r.limiter, r.limit, r.freed
		b.give = GiveBack{Epoch: r.epoch, Tag: r.tag, Tail: r.tag, Version: r.setting.Version, to: r.cursor, end: r.limit.Next}
		if r.waiting == 0 {
			b.give.ID, b.give.spent, b.give.level, b.give.granted = r.freed.id, r.freed.spent, r.freed.level, r.freed.granted
		}
		if len(r.entries) == 0 {
			b.give.Tail = r.prev
		}
		r.freed, r.limit, r.inBack = freed{}, r.cursor, true
		if len(r.entries) > 0 || i == 0 || l.runs[i-1].tag != r.prev {
			return
		}
	}
}

// unsent is the giveBack of a run that has not left yet.
func (l *line) unsent(r *run) *back {
	for _, b := range l.backs {
		if b.run == r {
			return b
		}
	}
	return nil
}

// returned settles a giveBack. What the store did not take back, because somebody else's place is behind it, stays with
// this process for its next caller whom it suits; in doubt it is lost.
func (l *line) returned(b *back, accepted bool, err error) {
	r := b.run
	if r == nil {
		return
	}
	r.inBack = false
	if accepted {
		l.retryAt = 0 // there is room for those who are parked
	}
	if err == nil && !accepted {
		r.limit = b.limit
	}
	if len(r.entries) == 0 && r.cursor == r.limit {
		l.runs = slices.DeleteFunc(l.runs, func(o *run) bool { return o == r })
	}
	if (accepted || err != nil) && (r.cursor.before(r.limit) || r.freed.spent > 0) {
		l.dirty = true // cancelled meanwhile
	}
}

// fromGap serves a call from what cancelled calls of this process left behind, unless its time has passed or the bucket
// has forgotten it.
func (l *line) fromGap(c *call, now int64) bool {
	r := l.lastRun()
	if r == nil || r.cursor == r.limit || r.inBack {
		return false
	}
	if slot := l.slot.Load(); slot != nil { // others may have passed by the line
		slot.mu.Lock()
		l.epoch = slot.state.Epoch
		slot.mu.Unlock()
	}
	if r.epoch != l.epoch || r.setting.Config != c.limiter.effective().Config {
		return false
	}
	arrival := now - r.offset
	before, after, due, ok := r.book(r.cursor, arrival, c.permits)
	if !ok || !r.fits(after) || due-arrival > c.maxWait {
		return false
	}
	r.cursor = after
	r.entries = append(r.entries, c)
	c.place = Place{Epoch: r.epoch, Tag: 0, Prev: r.tag, Version: r.setting.Version, before: before, after: after}
	c.granted, c.arrived, c.run = arrival, arrival, r
	c.due, c.decided = max(due+r.offset, l.lastDue), now
	l.lastDue = c.due
	if c.reserved {
		c.level = r.setting.level(r.limit, arrival)
	}
	r.waiting++
	if r.cursor == r.limit {
		r.own()
	}
	return true
}
