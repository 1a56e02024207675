package tokenbucket

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"
)

// lease is a block of permits that this process holds. All were due when it was taken.
type lease struct {
	limiter *RateLimiter
	setting *setting
	place   Place
	granted int64 // store's time
	permits int64
	local   int64 // the limiter's clock when it was taken, or before
	until   int64 // the limiter's clock from which it is worthless
	half    int64 // when so many are used, the next block is asked for
	used    atomic.Int64
	counted int64 // used, when demand was measured last
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
func (l *line) fromLease(limiter *RateLimiter, n int64) bool {
	e := l.lease.Load()
	if e == nil || limiter.lease == 0 || l.occupied.Load() || e.limiter != limiter && e.limiter.own.Config != limiter.own.Config {
		return false
	}
	ok, low := e.take(n, l.now())
	if low {
		l.mu.Lock()
		l.refill = true
		l.pump()
		l.mu.Unlock()
	}
	return ok
}

// wanted is how many permits the next lease should be for, 0 for none: what demand of late would use in its time, no more
// than four times what was used to see that, so that it begins small and grows fast.
func (l *line) wanted(limiter *RateLimiter, now int64) int64 {
	s := limiter.effective()
	if limiter.lease == 0 || l.next != nil || limiter.closed.Load() || s.Kind != Bursty || s.Payment != PayNow || len(l.parked) > 0 ||
		l.sight.Load() != nil { // the bucket is empty
		return 0
	}
	used := l.asked
	current := l.lease.Load()
	if current != nil {
		used += min(current.used.Load(), current.permits) - current.counted
	}
	elapsed := max(1, now-l.since)
	expect := float64(used) * float64(limiter.lease) / float64(elapsed)
	if elapsed > 2*limiter.lease {
		l.measure(now)
	}
	most := min(float64(limiter.lease)*s.Rate/microsPerSecond, s.max) - float64(current.left(now)+l.next.left(now))
	n := int64(min(most, expect, 4*float64(used)))
	if n < 2 {
		return 0
	}
	return n
}

// measure begins to count demand anew.
func (l *line) measure(now int64) {
	l.asked, l.since = 0, now
	if e := l.lease.Load(); e != nil {
		e.counted = min(e.used.Load(), e.permits)
	}
}

// leased puts a block that was granted to use. It is as old as the question: how long the answer was under way is not known.
// If nobody waited for the answer any more, another block may have been asked for since, or the bucket held back.
func (l *line) leased(f *flight, g *Grant, out *Outcome) {
	setting := out.Bucket.setting()
	e := &lease{
		limiter: f.limiter, setting: &setting, place: g.Place, granted: out.NowMicros, permits: g.Permits,
		local: f.local, until: f.local + f.limiter.lease, half: (g.Permits + 1) / 2,
	}
	if f.late {
		l.giveUp(e)
		return
	}
	l.measure(l.now())
	if g.Permits < f.leased { // the bucket is empty: no use asking for more
		e.half = retired
	}
	if f.limiter.closed.Load() || l.next != nil {
		l.giveUp(e)
		return
	}
	if l.next = e; l.lease.Load().left(l.now()) == 0 {
		l.rotate()
	}
}

// rotate puts the next lease in the place of one that is used up or worthless.
func (l *line) rotate() {
	old := l.lease.Swap(l.next)
	l.next = nil
	l.giveUp(old)
}

// reviewLeases gives back what will not be used, and returns when to look again; 0: never.
func (l *line) reviewLeases(now int64) int64 {
	e := l.lease.Load()
	if e == nil {
		return 0
	}
	half := e.local + (e.until-e.local)/2
	if now >= e.until || now >= half && e.used.Load() < e.permits/4 {
		l.rotate()
		return l.reviewLeases(now)
	}
	if now < half {
		return half
	}
	return e.until
}

// giveUp ends a lease, and returns what is left of it to the store.
func (l *line) giveUp(e *lease) *back {
	if e == nil {
		return nil
	}
	used := e.used.Swap(retired)
	if o := e.limiter.observer; o != nil && o.Lease != nil {
		o.Lease(LeaseUse{Bucket: l.label(), Permits: int(e.permits), Used: int(min(used, e.permits))})
	}
	if used >= e.permits {
		return nil
	}
	p := e.place
	to, tail := p.before, p.Prev
	if used > 0 {
		to, _ = e.setting.after(e.setting.Kind, to, used)
		tail = p.Tag
	}
	b := &back{limiter: e.limiter, give: GiveBack{
		Epoch: p.Epoch, Tag: p.Tag, Tail: tail, Version: p.Version, ID: p.Tag, to: to, end: p.after.Next,
		spent: to.Stored - p.after.Stored, level: p.after.Stored, granted: e.granted,
	}}
	l.backs = append(l.backs, b)
	return b
}

// Close gives back what the limiter has leased (WithLease), and waits for the store's answer as long as ctx lets it. A
// limiter without leases has nothing to close. It may be used afterwards, and leases no more. Closing twice does nothing.
func (l *RateLimiter) Close(ctx context.Context) error {
	l.closed.Store(true)
	line := l.line
	line.mu.Lock()
	var last *back
	for line.lease.Load() != nil {
		if b := line.giveUp(line.lease.Swap(line.next)); b != nil {
			last = b
			b.done = make(chan struct{})
		}
		line.next = nil
	}
	coming := line.flight != nil && line.flight.leased > 0
	line.pump()
	line.mu.Unlock()
	if err := line.confirmed(ctx, last, "close"); err != nil || !coming {
		return err
	}
	if _, err := l.State(ctx); err != nil { // it is asked after the block has come, and gone back
		return fmt.Errorf("close: %w", err)
	}
	return nil
}
