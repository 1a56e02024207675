package engine

import (
	"math"
	"slices"
	"sync/atomic"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// lease is a block of permits that were due when the store granted them. Callers take them without a lock.
//
// Invariants: a permit is used at most once, and none after until. Exactly one take reports that half of the permits are used (L1).
type lease struct {
	limiter *Limiter
	place   permit.Place
	left    Seen  // the bucket after the grant
	permits int64 // number of them
	local   int64 // a time before the grant, in limiter microseconds
	until   int64 // when the lease ends, in limiter microseconds
	half    int64 // number of used permits at which the next lease is asked for
	used    atomic.Int64
	counted int64 // used, when the demand was last measured
}

// retired is the value of used of a lease that was given up. It exceeds the permits of any lease.
const retired = math.MaxInt64 / 2

// take uses n permits. low reports that it is time to ask for the next lease.
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

// putBack makes n permits of take usable again. If the lease was given up meanwhile, they lapse.
func (e *lease) putBack(n int64) {
	for {
		used := e.used.Load()
		if used >= retired || e.used.CompareAndSwap(used, used-n) {
			return
		}
	}
}

// unused returns how many permits can still be taken. A nil lease has none.
func (e *lease) unused(now int64) int64 {
	if e == nil || now >= e.until {
		return 0
	}
	return max(0, e.permits-e.used.Load())
}

// seen returns the bucket after the grant, as it is at a time if no other process takes permits.
func (e *lease) seen(now int64) Seen {
	s := e.left
	s.Now += now - e.local
	return s
}

// leases are the leases of this process. The coordinator's mu guards all fields but current, which is written with it held.
type leases struct {
	current atomic.Pointer[lease] // nil if there is none
	next    *lease                // granted while current still lasts
	refill  bool                  // it is time to ask for the next lease
	asked   int64                 // permits that the store granted to callers since the time since
	since   int64
	review  int64 // when to review the leases, in limiter microseconds; 0 if there are none

	queue  *queue
	view   *View
	outbox *outbox
}

// wanted returns the number of permits to ask for as the next lease; 0 for none. It is what the recent demand would use while the lease
// lasts, but at most four times what was used while the demand was measured. So the first leases are small, and they grow fast.
func (s *leases) wanted(l *Limiter, now int64) int64 {
	t := l.Effective()
	if l.Prefetch == 0 || s.next != nil || l.Closed.Load() || t.WarmsUp || t.PayLater || s.queue.beyond() ||
		s.view.snapshot.Load() != nil { // the bucket is empty
		return 0
	}
	used := s.asked
	current := s.current.Load()
	if current != nil {
		used += min(current.used.Load(), current.permits) - current.counted
	}
	elapsed := max(1, now-s.since)
	expect := float64(used) * float64(l.Prefetch) / float64(elapsed)
	if elapsed > 2*l.Prefetch {
		s.measure(now)
	}
	most := min(float64(l.Prefetch)/t.Interval, t.Max) - float64(current.unused(now)+s.next.unused(now))
	n := int64(min(most, expect, 4*float64(used)))
	if n < 2 {
		return 0
	}
	return n
}

// measure restarts the measurement of the demand.
func (s *leases) measure(now int64) {
	s.asked, s.since = 0, now
	if e := s.current.Load(); e != nil {
		e.counted = min(e.used.Load(), e.permits)
	}
}

// add puts a lease to use that the store has granted. It lasts from the departure of its flight, because it is not known when the store
// decided. A late lease is given up: another may have been asked for since, or the bucket may have been held back.
func (s *leases) add(f *flight, g *permit.Grant, out *permit.Outcome, now int64) {
	e := &lease{
		limiter: f.limiter, place: g.Place, left: Seen{out.Bucket.Terms, out.Bucket.Balance, out.NowMicros}, permits: g.Permits,
		local: f.local, until: f.local + f.limiter.Prefetch, half: (g.Permits + 1) / 2,
	}
	if f.late {
		s.giveUp(e)
		return
	}
	s.measure(now)
	if g.Permits < f.leased { // the bucket is empty, so there is no use in asking for more
		e.half = retired
	}
	if f.limiter.Closed.Load() || s.next != nil {
		s.giveUp(e)
		return
	}
	if s.next = e; s.current.Load().unused(now) == 0 {
		s.rotate()
	}
}

// rotate replaces the current lease by the next one.
func (s *leases) rotate() {
	old := s.current.Swap(s.next)
	s.next = nil
	s.giveUp(old)
}

// reviewNow gives up leases that will not be used, and sets when to look again.
func (s *leases) reviewNow(now int64) {
	for e := s.current.Load(); e != nil; e = s.current.Load() {
		half := e.local + (e.until-e.local)/2
		if now < e.until && (now < half || e.used.Load() >= e.permits/4) {
			if s.review = half; now >= half {
				s.review = e.until
			}
			return
		}
		s.rotate()
	}
	s.review = 0
	s.refill = false
}

// drop gives up all leases, because the bucket was held back.
func (s *leases) drop() {
	for s.current.Load() != nil {
		s.rotate()
	}
}

// close gives up the leases of a limiter. It returns the last refund of its leases that is not confirmed yet; nil if there is none.
func (s *leases) close(l *Limiter, sent []*refund) (last *refund) {
	for e := s.current.Load(); e != nil && e.limiter == l; e = s.current.Load() {
		s.rotate()
	}
	if e := s.next; e != nil && e.limiter == l {
		s.next = nil
		s.giveUp(e)
	}
	for _, r := range slices.Concat(sent, s.outbox.refunds) {
		if r.line == nil && r.limiter == l {
			last = r
		}
	}
	if last != nil && last.done == nil {
		last.done = make(chan struct{})
	}
	return last
}

// serve serves waiters from the leases, as long as they have neither a decision of the store nor other permits to wait for.
func (s *leases) serve(now int64) {
	line := s.queue.line
	for w := line.Head(); w != nil; w = line.Head() {
		q := w.Value
		e := s.current.Load()
		if e == nil || q.flight != nil || q.limiter.Prefetch == 0 || !e.limiter.Own.Same(q.limiter.Own) || line.Owns() || q.decided != 0 {
			return
		}
		ok, low := e.take(q.Permits, now)
		if !ok && s.next != nil {
			s.rotate()
			ok, low = s.current.Load().take(q.Permits, now)
		}
		s.refill = s.refill || low
		if !ok || !line.Serve(w) {
			return
		}
		q.due, q.decided = now, now
		s.queue.callers.end(q, done, nil)
	}
}

// giveUp ends a lease and refunds its unused permits. A nil lease has none.
func (s *leases) giveUp(e *lease) {
	if e == nil {
		return
	}
	used := e.used.Swap(retired)
	e.limiter.prefetched(e.permits, min(used, e.permits))
	if used < e.permits {
		s.outbox.giveBack(&refund{limiter: e.limiter, give: e.place.Refund(e.left.Terms, used)})
	}
}
