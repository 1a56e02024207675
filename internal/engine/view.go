package engine

import (
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// View is what the last replies showed of the bucket, its configuration and the store's clock.
//
// known and snapshot are read without a lock, and written with the coordinator's mu held. It guards the other fields and must be held for
// all methods but the exported ones.
//
// Invariant: a late reply changes nothing but heldUntil, because a newer reply may have arrived before it.
type View struct {
	known    atomic.Pointer[permit.Terms] // the configuration in force if it has a version; nil otherwise
	snapshot atomic.Pointer[snapshot]     // the bucket, for refusals without a request; nil if it may grant one

	clock  clock.Local // of the limiter
	timing Timing      // of the store

	at        int64 // when the last batch had a reply or an error, in limiter microseconds
	inTime    int64 // when the last reply arrived that was not late, in limiter microseconds; 0 before the first
	epoch     int64
	penalty   schedule.Penalty
	heldUntil int64 // until when Penalize holds the bucket back, in limiter microseconds
	free      int64 // when the bucket's debt ends, in limiter microseconds
	stored    int64 // stored permits of a bursty bucket, which take no time; 0 for a bucket that warms up
	offset    clock.Offset
	server    clock.Remote
	terms     *granted // of the last grants; nil before the first reply

	differences differences
}

// snapshot is the bucket as a reply showed it. As long as a bucket only moves forward, a later request waits no less than the snapshot
// says. So a request that does not fit is refused without a round trip.
//
// Invariants: it is dropped when this process refunds permits, owns spare ones, or learns of another configuration (S1). It is used for
// SnapshotAge, so that a refund by another process, a higher rate or a lost state takes effect soon.
type snapshot struct {
	terms *permit.Terms // in force
	at    permit.Balance
	clock int64         // the store's clock, read after sent
	sent  time.Duration // clock.Mono
	local int64         // the limiter's clock at sent
}

// SnapshotAge is how long a snapshot is used.
const SnapshotAge = 100 * time.Millisecond

// init sets the clocks. Before the first reply the bucket may have any number of stored permits.
func (v *View) init(local clock.Local, timing Timing) {
	v.clock, v.timing, v.stored = local, timing, permit.MaxBatch
}

// HasSnapshot reports whether Refuses may refuse a request.
func (v *View) HasSnapshot() bool { return v.snapshot.Load() != nil }

// Refuses reports whether a request cannot be granted within maxWait by the last reply, and how long it would wait at least.
func (v *View) Refuses(l *Limiter, n, maxWait int64) (wait int64, refused bool) {
	s := v.snapshot.Load()
	if s == nil {
		return 0, false
	}
	return s.refuses(l, n, maxWait, v.age(s))
}

// Seen returns the bucket of the last reply that made Refuses refuse.
func (v *View) Seen() Seen {
	if s := v.snapshot.Load(); s != nil {
		return s.seen()
	}
	return Seen{}
}

// age returns the time since the batch of a snapshot was sent, rounded up. It uses the fastest clock by which the store may decide. It needs
// no lock.
func (v *View) age(s *snapshot) time.Duration {
	age := clock.Mono() - s.sent + time.Microsecond
	if !v.clock.System() && v.timing != SystemClock {
		local := time.Duration(v.clock.Now()-s.local) * time.Microsecond
		if v.timing == LimiterClock {
			age = local
		}
		age = max(age, local)
	}
	return age
}

// heardLately reports whether the last reply is younger than SnapshotAge.
func (v *View) heardLately(now int64) bool {
	return v.inTime != 0 && now-v.inTime < SnapshotAge.Microseconds()
}

// update takes over what a reply shows. started is when its flight departed.
func (v *View) update(f *flight, out *permit.Outcome, received int64, at moment) {
	b := &out.Bucket
	if till := received + b.HeldUntilMicros - out.NowMicros; !f.late || till > v.heldUntil {
		v.heldUntil = till
	}
	if f.late {
		return
	}
	v.stored = 0
	if !b.Terms.WarmsUp {
		v.stored = int64(b.Stored)
	}
	v.offset.Observe(received-out.NowMicros, at.local-f.local)
	v.free = b.Next + v.offset.Micros()
	if at.mono != 0 {
		v.server.Heard(out.ClockMicros, f.began, at.mono)
	}
	v.terms = v.grantedBy(f.limiter, b.Terms)
}

// grantedBy returns the terms of the grants in a reply. Equal terms are shared.
func (v *View) grantedBy(l *Limiter, t *permit.Terms) *granted {
	if g := v.terms; g != nil && g.Same(t) && g.limiter.agrees(l) {
		return g
	}
	return &granted{t, l}
}

// learn takes over the configuration in force.
func (v *View) learn(inForce *permit.Terms) {
	known := v.known.Load()
	switch {
	case inForce.Version == 0:
		if known != nil {
			v.known.Store(nil)
		}
	case known == nil || !known.Same(inForce):
		v.known.Store(v.terms.Terms)
	}
}

// show keeps a snapshot of a bucket in which a request for one permit would wait, and drops it otherwise. It is also dropped if the process
// owns spare permits, which serve the next caller.
func (v *View) show(f *flight, out *permit.Outcome, spare bool) {
	b := &out.Bucket
	if spare || b.Next <= out.NowMicros && b.Stored >= 1 {
		v.drop()
		return
	}
	t := v.known.Load()
	if t == nil || !t.Same(b.Terms) {
		if t = f.batch.Terms; !t.Same(b.Terms) {
			v.drop()
			return
		}
	}
	v.snapshot.Store(&snapshot{terms: t, at: b.Balance, clock: max(out.ClockMicros, out.NowMicros), sent: f.began, local: f.local})
}

// drop makes the next caller ask the store.
func (v *View) drop() {
	if v.snapshot.Load() != nil {
		v.snapshot.Store(nil)
	}
}

// seen returns the bucket of the snapshot.
func (s *snapshot) seen() Seen { return Seen{s.terms, s.at, s.clock} }

// refuses is Seen.Refuses for a limiter, unless the store must learn of its configuration.
func (s *snapshot) refuses(l *Limiter, n, maxWait int64, age time.Duration) (wait int64, refused bool) {
	e := l.Effective()
	if e != s.terms && !e.Same(s.terms) || e != l.Own && e.Version == l.Own.Version && !e.Same(l.Own) {
		return 0, false
	}
	return s.seen().Refuses(n, maxWait, age)
}

// Refuses reports whether a bucket that was seen age ago cannot grant n permits within maxWait, and how long they would take at least.
//
// The store's clock shows at most Now + age. A later time only shortens the wait: a bursty bucket gets stored permits, and any bucket pays
// its debt. (A bucket that warms up gets colder without a debt, so a PayNow caller waits longer. Then the store is asked.) Other processes'
// requests only lengthen the wait. One microsecond is for each rounding.
func (s Seen) Refuses(n, maxWait int64, age time.Duration) (wait int64, refused bool) {
	if age > SnapshotAge || age < 0 {
		return 0, false
	}
	now := s.Now + age.Microseconds()
	if now > s.Balance.Next && s.Terms.WarmsUp {
		return 0, false
	}
	wait, ok := Wait(s.Terms, s.Balance, now, n)
	return wait, ok && wait > maxWait+2
}
