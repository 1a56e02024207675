package tokenbucket

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// snapshot is the bucket as the last answer showed it. While a bucket only moves forward, whoever comes later waits no less
// than this says: so a request that cannot fit is refused without asking the store. It is forgotten when this process
// gives something back or hears of another configuration, and asked anew after snapshotAge, so that another process'
// refund, a raised rate or an emptied store shows.
type snapshot struct {
	setting *setting // in force
	at      permit.Balance
	clock   int64 // the store's, which was read after sent
	sent    time.Duration
	local   int64 // the limiter's clock at sent
}

// snapshotAge is for how long a snapshot is used.
const snapshotAge = 100 * time.Millisecond

// see notes what an answer showed of the bucket, if it is worth noting: if a request for one permit would have to wait. If this process
// owns permits that nobody here wants, they serve the next caller, so it must not be refused.
func (c *coordinator) see(f *flight, out *permit.Outcome) {
	b := &out.Bucket
	if c.waiters.line.Spare() || b.Next <= out.NowMicros && b.Stored >= 1 {
		c.dropSnapshot()
		return
	}
	s := c.known.Load()
	if s == nil || !s.terms.Same(b.Terms) {
		if s = settingOf(f.batch.Terms); !s.terms.Same(b.Terms) {
			c.dropSnapshot()
			return
		}
	}
	c.snapshot.Store(&snapshot{setting: s, at: b.Balance, clock: max(out.ClockMicros, out.NowMicros), sent: f.began, local: f.local})
}

// seen is how full the bucket was when it was last seen; nil: not known.
func (c *coordinator) seen() *Level {
	s := c.snapshot.Load()
	if s == nil {
		return nil
	}
	return s.setting.level(s.at, s.clock)
}

// dropSnapshot makes the next caller ask the store.
func (c *coordinator) dropSnapshot() {
	if c.snapshot.Load() != nil {
		c.snapshot.Store(nil)
	}
}

// refuses tells whether a request cannot be granted within maxWait, and what it would have to wait at least.
func (c *coordinator) refuses(limiter *limiter, n, maxWait int64) (wait int64, refused bool) {
	s := c.snapshot.Load()
	if s == nil {
		return 0, false
	}
	return s.refuses(limiter, n, maxWait, c.age(s))
}

// age is the time since a snapshot's batch was sent, by the clock that runs fastest of those that the store may decide by; rounded up.
func (c *coordinator) age(s *snapshot) time.Duration {
	age := mono() - s.sent + time.Microsecond
	if !c.time.System() && c.traits.decides != bySystemTime {
		local := time.Duration(c.now()-s.local) * time.Microsecond
		if c.traits.decides == byLocalTime {
			age = local
		}
		age = max(age, local)
	}
	return age
}

// refuses tells that of a snapshot of an age.
//
// The store's clock is now at most at clock + age. A later time only shortens the wait: of
// a bursty bucket it makes stored permits, and of any it pays off debt. (A warm-up bucket without debt becomes colder with
// time, and a PayNow caller waits longer: such a one is asked.) What others have taken since only lengthens it. One
// microsecond is for each rounding.
func (s *snapshot) refuses(limiter *limiter, n, maxWait int64, age time.Duration) (wait int64, refused bool) {
	if age > snapshotAge || age < 0 {
		return 0, false
	}
	now := s.clock + age.Microseconds()
	e := limiter.effective()
	if e != s.setting && e.config != s.setting.config || e != limiter.own && e.Version == limiter.own.Version && e.config != limiter.own.config {
		return 0, false // the store must hear of it
	}
	if now > s.at.Next && s.setting.Kind == warmingUp {
		return 0, false
	}
	wait, ok := s.setting.wait(s.at, now, n)
	return wait, ok && wait > maxWait+2
}

// wait is how long n permits of a bucket would take.
func (s *setting) wait(m permit.Balance, now, n int64) (wait int64, ok bool) {
	m = s.resync(m, now, s.max)
	after, ok := s.after(s.Kind, m, n)
	if s.Payment == PayLater {
		return m.Next - now, ok
	}
	return after.Next - now, ok
}

// occupancy is what a new caller would find: free, queued or spare.
func (c *coordinator) occupancy() uint32 {
	w := &c.waiters
	switch {
	case len(c.aside) > 0 || len(c.refunds) > 0 || len(w.old) > 0 || w.line.Spare():
		return lineSpare
	case w.line.Idle():
		return lineFree
	}
	return lineBusy
}

// takeNow decides on a request to a bucket in memory that need not wait, or must wait for too long, under a configuration
// that is in force: without an allocation, a timer or a goroutine, with one lock and one look at the clock. While somebody waits already
// it grants nothing.
func (c *coordinator) takeNow(l *limiter, n, maxWait int64) (granted, decided bool) {
	inForce := l.inForce()
	found := c.occupied.Load()
	if found == lineSpare {
		return false, false
	}
	now := c.time.Micros()
	b := c.slot.Load()
	if b == nil {
		b = c.traits.memory.bucket(c.key, now)
		c.slot.Store(b)
	}
	b.mu.Lock()
	if b.swept {
		b.mu.Unlock()
		c.slot.Store(nil)
		return false, false
	}
	defer b.mu.Unlock()
	if found == lineBusy {
		seen := b.state
		granted, decided = seen.takeNow(now, inForce, n, maxWait)
		return false, decided && !granted
	}
	if granted, decided = b.state.takeNow(now, inForce, n, maxWait); granted {
		b.touched = now
		b.renewed = b.state.forgettable(l.initial, l.transient) && (inForce == l.own || inForce.sameContent(&l.own.config))
	}
	return granted, decided
}
