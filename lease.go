package tokenbucket

import (
	"math"
	"slices"
	"sync/atomic"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// lease is a block of permits that this process holds. All were due when it was taken.
type lease struct {
	limiter *limiter
	setting *setting
	place   permit.Place
	granted int64 // store's time
	permits int64
	local   int64 // the limiter's clock when it was taken, or before
	until   int64 // the limiter's clock from which it is worthless
	half    int64 // when so many are used, the next block is asked for
	used    atomic.Int64
	counted int64 // used, when demand was measured last
}

// leases are the blocks in use. But for current they are guarded by the coordinator's mu.
type leases struct {
	current atomic.Pointer[lease] // nil: none
	next    *lease                // granted while current still lasts
	refill  bool                  // it is time to ask for the next
	asked   int64                 // permits that the store granted to callers
	since   int64                 // that is counted from here
	review  int64                 // when to look after them; 0: never
}

// retired is more than any lease holds.
const retired = math.MaxInt64 / 2

// take hands out n permits. Exactly one of all callers is told that it is time to ask for the next block.
func (e *lease) take(n, now int64) (ok, low bool) {
	if now >= e.until {
		return false, false
	}
	for {
		used := e.used.Load()
		if used+n > e.permits {
			return false, false
		}
		if e.used.CompareAndSwap(used, used+n) {
			return true, used < e.half && used+n >= e.half
		}
	}
}

// left is how many permits can still be handed out.
func (e *lease) left(now int64) int64 {
	if e == nil || now >= e.until {
		return 0
	}
	return max(0, e.permits-e.used.Load())
}

// fromLease hands out leased permits, unless somebody waits already.
func (c *coordinator) fromLease(limiter *limiter, n int64) bool {
	e := c.leases.current.Load()
	if e == nil || limiter.lease == 0 || c.occupied.Load() != lineFree || e.limiter != limiter && e.limiter.own.config != limiter.own.config {
		return false
	}
	ok, low := e.take(n, c.now())
	if low {
		c.mu.Lock()
		c.leases.refill = true
		c.dispatch(c.now())
		c.mu.Unlock()
	}
	return ok
}

// wanted is how many permits the next lease should be for, 0 for none. That is what demand of late would use while the lease lasts, but
// at most four times what was used while demand was measured. So the first leases are small, and they grow fast.
func (c *coordinator) wanted(limiter *limiter, now int64) int64 {
	s := limiter.effective()
	if limiter.lease == 0 || c.leases.next != nil || limiter.closed.Load() || s.Kind != bursty || s.Payment != PayNow || c.waiters.beyond() ||
		c.snapshot.Load() != nil { // the bucket is empty
		return 0
	}
	used := c.leases.asked
	current := c.leases.current.Load()
	if current != nil {
		used += min(current.used.Load(), current.permits) - current.counted
	}
	elapsed := max(1, now-c.leases.since)
	expect := float64(used) * float64(limiter.lease) / float64(elapsed)
	if elapsed > 2*limiter.lease {
		c.measure(now)
	}
	most := min(float64(limiter.lease)*s.Rate/microsPerSecond, s.max) - float64(current.left(now)+c.leases.next.left(now))
	n := int64(min(most, expect, 4*float64(used)))
	if n < 2 {
		return 0
	}
	return n
}

// measure begins to count demand anew.
func (c *coordinator) measure(now int64) {
	c.leases.asked, c.leases.since = 0, now
	if e := c.leases.current.Load(); e != nil {
		e.counted = min(e.used.Load(), e.permits)
	}
}

// leased puts a block that was granted to use. It is as old as the question: how long the answer was under way is not known.
// If nobody waited for the answer any more, another block may have been asked for since, or the bucket held back.
func (c *coordinator) leased(f *flight, g *permit.Grant, out *permit.Outcome) {
	e := &lease{
		limiter: f.limiter, setting: settingOf(out.Bucket.Terms), place: g.Place, granted: out.NowMicros, permits: g.Permits,
		local: f.local, until: f.local + f.limiter.lease, half: (g.Permits + 1) / 2,
	}
	if f.late {
		c.giveUp(e)
		return
	}
	c.measure(c.now())
	if g.Permits < f.leased { // the bucket is empty: no use asking for more
		e.half = retired
	}
	if f.limiter.closed.Load() || c.leases.next != nil {
		c.giveUp(e)
		return
	}
	if c.leases.next = e; c.leases.current.Load().left(c.now()) == 0 {
		c.rotate()
	}
}

// rotate puts the next lease in the place of one that is used up or worthless.
func (c *coordinator) rotate() {
	old := c.leases.current.Swap(c.leases.next)
	c.leases.next = nil
	c.giveUp(old)
}

// reviewLeases gives back what will not be used, and notes when to look again.
func (c *coordinator) reviewLeases(now int64) {
	for e := c.leases.current.Load(); e != nil; e = c.leases.current.Load() {
		half := e.local + (e.until-e.local)/2
		if now < e.until && (now < half || e.used.Load() >= e.permits/4) {
			if c.leases.review = half; now >= half {
				c.leases.review = e.until
			}
			return
		}
		c.rotate()
	}
	c.leases.review = 0
	c.leases.refill = false
}

// dropLeases gives up all: the bucket was held back.
func (c *coordinator) dropLeases() {
	for c.leases.current.Load() != nil {
		c.rotate()
	}
}

// closeLeases gives up what was leased for a limiter, for one who waits for the answer to the refund of its leases that is sent last; nil:
// nothing is left to give back, or on its way. Another block may be coming.
func (c *coordinator) closeLeases(limiter *limiter) (last *refund, coming bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for e := c.leases.current.Load(); e != nil && e.limiter == limiter; e = c.leases.current.Load() {
		c.rotate()
	}
	if e := c.leases.next; e != nil && e.limiter == limiter {
		c.leases.next = nil
		c.giveUp(e)
	}
	refunds := c.refunds
	if f := c.sending.flight; f != nil {
		coming = f.leased > 0 && f.limiter == limiter
		refunds = slices.Concat(f.refunds, refunds)
	}
	for _, r := range refunds {
		if r.line == nil && r.limiter == limiter {
			last = r
		}
	}
	if last != nil && last.done == nil {
		last.done = make(chan struct{})
	}
	c.dispatch(c.now())
	return last, coming
}

// serveFromLease serves those from a lease who have lined up, if nobody waits for permits of a later time.
func (c *coordinator) serveFromLease(now int64) {
	line := c.waiters.line
	for w := line.Head(); w != nil; w = line.Head() {
		q := w.Value
		e := c.leases.current.Load()
		if e == nil || q.flight != nil || q.limiter.lease == 0 || e.limiter.own.config != q.limiter.own.config || line.Owns() || q.decided != 0 {
			return
		}
		ok, low := e.take(q.Permits, now)
		if !ok && c.leases.next != nil {
			c.rotate()
			ok, low = c.leases.current.Load().take(q.Permits, now)
		}
		c.leases.refill = c.leases.refill || low
		if !ok || !line.Serve(w) {
			return
		}
		q.due, q.decided = now, now
		c.end(q, done, nil)
	}
}

// giveUp ends a lease, and returns what is left of it to the store.
func (c *coordinator) giveUp(e *lease) {
	if e == nil {
		return
	}
	used := e.used.Swap(retired)
	e.limiter.observeLease(e.permits, min(used, e.permits))
	if used < e.permits {
		c.giveBack(e.limiter, e.place.Refund(e.setting, used, e.granted))
	}
}

// giveBack returns permits to the store. What is given back last is sent first: it was granted last, and nobody stands behind it.
func (c *coordinator) giveBack(limiter *limiter, give permit.Refund) {
	c.refunds = slices.Insert(c.refunds, 0, &refund{limiter: limiter, give: give})
}
