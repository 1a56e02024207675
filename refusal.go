package tokenbucket

import "time"

// sight is the bucket as the last answer showed it. While a bucket only moves forward, whoever comes later waits no less
// than this says: so a request that cannot fit is refused without asking the store. It is forgotten when this process
// gives something back or hears of another configuration, and asked anew after sightAge, so that another process'
// refund, a raised rate or an emptied store shows.
type sight struct {
	setting *setting // in force
	at      mark
	clock   int64 // the store's, which was read after sent
	sent    time.Duration
	local   int64 // the limiter's clock at sent
}

// sightAge is for how long a sight is believed.
const sightAge = 100 * time.Millisecond

// sighted notes what an answer showed of the bucket, if it is worth noting: if a request for one permit would have to wait.
func (l *line) sighted(f *flight, out *Outcome) {
	b := &out.Bucket
	r := l.lastRun()
	gap := r != nil && (r.cursor != r.limit || r.inBack)
	if l.dirty || gap || b.NextFreeTicketMicros <= out.NowMicros && b.StoredPermits >= 1 {
		l.forget()
		return
	}
	s := l.known.Load()
	if s == nil || s.Config != b.Config {
		if s = f.batch.own; s == nil || s.Config != b.Config {
			l.forget()
			return
		}
	}
	l.sight.Store(&sight{setting: s, at: b.mark(), clock: max(out.ClockMicros, out.NowMicros), sent: f.began, local: f.local})
}

// seen is how full the bucket was when it was last seen; nil: not known.
func (l *line) seen() *Level {
	s := l.sight.Load()
	if s == nil {
		return nil
	}
	return s.setting.level(s.at, s.clock)
}

// forget makes the next caller ask the store.
func (l *line) forget() {
	if l.sight.Load() != nil {
		l.sight.Store(nil)
	}
}

// refuses tells whether a request cannot be granted within maxWait, and what it would have to wait at least.
//
// The store's clock is now at most at clock + the time since the batch was sent. A later time only shortens the wait: of
// a bursty bucket it makes stored permits, and of any it pays off debt. (A warm-up bucket without debt becomes colder with
// time, and a PayNow caller waits longer: such a one is asked.) What others have taken since only lengthens it. One
// microsecond is for each rounding.
func (l *line) refuses(limiter *RateLimiter, n, maxWait int64) (wait int64, refused bool) {
	s := l.sight.Load()
	if s == nil {
		return 0, false
	}
	age := mono() - s.sent + time.Microsecond // rounded up
	if !l.real && l.traits.decides != bySystemTime {
		local := time.Duration(l.now()-s.local) * time.Microsecond
		if l.traits.decides == byLocalTime {
			age = local
		}
		age = max(age, local)
	}
	if age > sightAge || age < 0 {
		return 0, false
	}
	now := s.clock + age.Microseconds()
	e := limiter.effective()
	if e != s.setting && e.Config != s.setting.Config || e.Version == limiter.own.Version && e.Config != limiter.own.Config {
		return 0, false // the store must hear of it
	}
	if now > s.at.Next && s.setting.Kind == WarmingUp {
		return 0, false
	}
	wait, ok := s.setting.wait(s.at, now, n)
	return wait, ok && wait > maxWait+2
}

// wait is how long n permits of a bucket would take.
func (s *setting) wait(m mark, now, n int64) (wait int64, ok bool) {
	m = s.resync(m, now, s.max)
	after, ok := s.after(s.Kind, m, n)
	if s.Payment == PayLater {
		return m.Next - now, ok
	}
	return after.Next - now, ok
}
