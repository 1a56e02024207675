package tokenbucket

import (
	"slices"
	"time"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// Land implements [transport.Source]. Callers are let go only after the lock is released. So they do not find it held when they ask
// again, and all see everything that the reply has brought. The observer is called without the lock, too: it may block, or panic.
func (c *coordinator) Land(b *permit.Batch, out *permit.Outcome, err error, late bool) {
	answered, observe := c.settled(b, out, err, late)
	defer func() {
		for _, ready := range answered {
			close(ready)
		}
		clear(answered)
	}()
	if observe != nil {
		observe()
	}
}

// settled settles a batch. It returns the callers to let go, and what to call for the observer, if anything.
func (c *coordinator) settled(b *permit.Batch, out *permit.Outcome, err error, late bool) (answered []chan struct{}, observe func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	answered = c.sending.buffer[:0]
	if late {
		answered = nil // another flight may land meanwhile
	}
	c.sending.answered = &answered
	at := c.moment()
	if f := c.landed(b, late); err == transport.ErrLate { // itself: a store's own error may wrap that of another trip
		c.expireFlight(f, at.mono)
	} else {
		c.deliver(f, out, err, at)
	}
	c.sending.answered = nil
	c.dispatch(at.local)
	if !late {
		c.sending.buffer = answered
	}
	observe, c.sending.observe = c.sending.observe, nil
	return answered, observe
}

// landed takes a flight out of those that are under way.
func (c *coordinator) landed(b *permit.Batch, late bool) *flight {
	t := &c.sending
	if !late {
		f := t.flight
		t.flight, t.flying = nil, false
		return f
	}
	i := slices.IndexFunc(t.overdue, func(f *flight) bool { return &f.batch == b })
	f := t.overdue[i]
	t.overdue = slices.Delete(t.overdue, i, i+1)
	f.batch.Release()
	return f
}

// deliver hands out the answers of a batch, which came at a moment.
func (c *coordinator) deliver(f *flight, out *permit.Outcome, err error, at moment) {
	now := at.local
	if c.sending.cached == nil || !f.late {
		c.sending.release() // of one that came back too late
		c.sending.cached = f.batch.Session
	}
	c.heard.at = now
	if err == nil && !f.late {
		c.heard.told = now
		c.sending.since = at.mono
	}
	if !c.inline() {
		if !f.late {
			c.report(f, out, err, at.mono-f.began)
		}
		c.expireCalls(f, at.mono) // nobody may have looked: this process was stopped
	}
	if err != nil {
		c.failFlight(f, err, now)
	} else {
		c.settle(f, out, at)
	}
	clear(f.calls)
	clear(f.refunds)
	f.calls, f.refunds = f.calls[:0], f.refunds[:0]
	c.sending.spare = f
}

// failFlight tells the callers of a flight that nothing was decided.
func (c *coordinator) failFlight(f *flight, err error, now int64) {
	for _, r := range f.refunds {
		r.settle(false, err, now)
	}
	for _, q := range f.calls {
		q.arrived(f)
		c.fail(q, err)
	}
}

// arrived notes that a call is not in flight any more.
func (q *call) arrived(f *flight) {
	if q.flight == f {
		q.flight = nil
	}
}

// settle hands out what the store has decided.
func (c *coordinator) settle(f *flight, out *permit.Outcome, at moment) {
	now, received := at.local, at.local
	if out.Local != 0 {
		received = out.Local
	}
	c.hear(f, out, received, at)
	requests := f.batch.Requests
	for i, r := range f.refunds {
		r.settle(requests[i].Grant.OK, nil, now)
	}
	requests = requests[f.given:]
	var first *call // of those who are to wait
	beyond := int64(0)
	for i, q := range f.calls {
		q.arrived(f)
		switch {
		case q.verb == read:
			q.bucket = *out.State.(*PermitBucket)
			c.end(q, done, nil)
		case !q.verb.takes():
			if requests[i].Grant.OK {
				c.end(q, done, nil)
			} else {
				c.end(q, refused, nil)
			}
		case requests[i].Grant.OK:
			c.grant(f, q, &requests[i].Grant, out, received, now)
		default:
			if c.refuseOrKeep(q, &requests[i], out, received, now) && first == nil {
				first, beyond = q, requests[i].Grant.WaitMicros-requests[i].MaxWaitMicros
			}
		}
	}
	if f.leased > 0 {
		if g := &requests[len(requests)-1].Grant; g.OK {
			c.leased(f, g, out)
		}
	}
	switch {
	case f.late:
	case first != nil:
		c.refusedFor(first, beyond, received, now)
	default:
		c.askSooner(out, now)
	}
	c.release(now)
	if !c.inline() && !f.late {
		c.see(f, out)
	}
}

// grant adds what the store has granted to what this process owns. If the caller has left, the permits go back, unless somebody else
// here wants it. At received, or earlier, the store's clock had reached the time of the decision.
//
// What comes late goes back if nothing was heard in time, for when it falls due by this process's clock is not known; and if a newer answer
// has told that the bucket was held back or begun anew, for it would fall due as if it had not been.
func (c *coordinator) grant(f *flight, q *call, g *permit.Grant, out *permit.Outcome, received, now int64) {
	if f.late && (c.heard.terms == nil || g.Place.Epoch != c.heard.epoch) {
		c.giveBack(f.limiter, g.Place.Refund(out.Bucket.Terms, 0, out.NowMicros))
		return
	}
	c.leases.asked += q.Permits
	line := c.waiters.line
	if q.decided == 0 {
		q.decided = received
	}
	reserved := q.verb == reserve && q.state == pending
	if reserved {
		q.note(&out.Bucket, out.NowMicros)
	}
	if g.WaitMicros == 0 && q.state == pending && (reserved && line.Idle() || !reserved && line.Serve(&q.Waiter)) {
		if q.due = received; reserved {
			back := g.Place.Refund(out.Bucket.Terms, 0, out.NowMicros)
			q.unused = &back
		}
		c.end(q, done, nil)
		return
	}
	// What the store has decided for a call was due at its time or later, though that time may lie before the call came by this
	// process's clock: a prediction's does.
	offset := c.heard.offset.Micros()
	asked := out.NowMicros + offset
	p := &g.Place
	grant := &schedule.Grant{Terms: c.heard.termsOf(f, &out.Bucket), Before: p.Before, Permits: q.Permits,
		Epoch: p.Epoch, Tag: p.Tag, Prev: p.Prev, Offset: offset}
	if !reserved {
		q.Came = min(q.Came, asked)
		line.Grant(&q.Waiter, grant, now)
		return
	}
	q.Value, q.Came, q.line, q.Until = q, min(f.local, asked), line, schedule.Forever
	line.GrantTo(&q.Waiter, grant, q.Came)
	c.confirm(q, q.decided)
}

// refuseOrKeep ends a call that was refused, or tells that it is to wait.
func (c *coordinator) refuseOrKeep(q *call, r *permit.Request, out *permit.Outcome, received, now int64) (waits bool) {
	switch {
	case q.state.over(), q.covered():
	case r.Grant.Overflow:
		c.fail(q, q.limiter.overflow(q.Permits))
	case q.line != nil && !q.bounded:
		if q.decided == 0 {
			q.decided = received
		}
		return true
	default:
		if q.note(&out.Bucket, out.NowMicros); q.line != nil {
			q.line.Leave(&q.Waiter, now)
		}
		wait := r.Grant.WaitMicros
		if q.decided != 0 { // its timeout counts from when it came
			wait += received - q.Came
		}
		q.decided = received
		c.refuse(q, wait)
	}
	return false
}

// note keeps for a Reservation how full the bucket was left.
func (q *call) note(b *permit.Bucket, now int64) {
	if q.verb == reserve {
		q.level = settingOf(b.Terms).level(b.Balance, now)
	}
}

// report notes what became of a batch within a time: for the health of the store, and for the observer. Without a reply there may be no
// outcome.
func (c *coordinator) report(f *flight, out *permit.Outcome, err error, elapsed time.Duration) {
	lockWait := time.Duration(0)
	if out != nil {
		lockWait = out.LockWait
	}
	if err == nil {
		c.health.Answered(elapsed - lockWait)
	} else if away(err) || notAsked(err) {
		c.health.failed(c)
	}
	if o := f.limiter.observer; o != nil && o.Trip != nil {
		trip := Trip{Bucket: c.label(), Requests: len(f.batch.Requests), Elapsed: elapsed, LockWait: lockWait, Err: err}
		c.sending.observe = func() { o.Trip(trip) }
	}
}

// hear notes what an answer says of the bucket, of its configuration, and of the store's clock.
func (c *coordinator) hear(f *flight, out *permit.Outcome, received int64, at moment) {
	h := &c.heard
	b := &out.Bucket
	if !c.inline() {
		if till := received + b.HeldUntilMicros - out.NowMicros; !f.late || till > h.heldTill {
			h.heldTill = till
		}
		c.fallback.served = true
	}
	if f.late {
		return // another may have told since what is newer, and this one says too little of the server's clock
	}
	h.free = received + b.Next - out.NowMicros
	h.stored = 0
	if settingOf(b.Terms).Kind == bursty {
		h.stored = int64(b.Stored)
	}
	h.offset.Observe(received-out.NowMicros, at.local-f.local)
	if !c.inline() {
		h.server.Heard(out.ClockMicros, f.began, at.mono)
	}
	before := h.terms
	if h.terms = h.termsOf(f, b); before != nil && h.terms.config != before.config {
		c.waiters.pace.Forget()
	}
	c.heldBack(b, out.NowMicros, at.local)
	if b.Epoch != h.epoch {
		c.begunAnew(f, b)
		h.epoch = b.Epoch
	}
	c.learn(f, out)
}

// heldBack moves what this process owns if a reply shows that the bucket was held back, or is no longer. serverNow is the time of the reply
// by the store's clock.
func (c *coordinator) heldBack(b *permit.Bucket, serverNow, now int64) {
	h := &c.heard
	shorter, longer, held := h.penalty.Observe(b.PausedMicros, b.HeldUntilMicros, serverNow)
	if shorter > 0 {
		c.waiters.resume(shorter, now)
	}
	if held {
		c.release(now) // what was due before it is not to fall due again in the penalty
		c.dropSnapshot()
		c.dropLeases()
		c.waiters.pause(longer, b.HeldUntilMicros+h.offset.Micros(), now)
		c.dropHopeless(h.terms.setting, now)
	}
}

// termsOf are those that an answer's grants were made under.
func (h *heard) termsOf(f *flight, b *permit.Bucket) *terms {
	if t := h.terms; t != nil && t.terms.Same(b.Terms) && t.limiter.agrees(f.limiter) {
		return t
	}
	return &terms{settingOf(b.Terms), f.limiter}
}

// begunAnew notes that the bucket has begun another epoch. If what it grants now falls due before what it granted until then, those who
// were granted that keep their times.
func (c *coordinator) begunAnew(f *flight, b *permit.Bucket) {
	begins := b.Next
	for i, q := range f.calls {
		if i += f.given; q.verb.takes() && f.batch.Requests[i].Grant.OK {
			begins = f.batch.Requests[i].Grant.Place.Before.Next
			break
		}
	}
	if begins+c.heard.offset.Micros() < c.waiters.line.Last()-schedule.Jitter {
		c.waiters.split()
	} else {
		c.waiters.line.Forget(b.Epoch)
	}
}

// learn notes the configuration in force and reports a disagreement once.
func (c *coordinator) learn(f *flight, out *permit.Outcome) {
	config, known := settingOf(out.Bucket.Terms).config, c.known.Load()
	switch {
	case config.Version == 0:
		if known != nil {
			c.known.Store(nil)
		}
	case known == nil || known.config != config:
		c.known.Store(c.heard.terms.setting)
	}
	if out.Conflict && c.heard.conflict != config.Version {
		c.heard.conflict = config.Version
		// A handler may block, or ask the limiter: not under the lock.
		log := &f.limiter.logger
		bucket, version, text := c.label(), config.Version, string(config.appendText(nil))
		go func() {
			defer log.Recovered()
			log.Get().Warn("tokenbucket: two configurations have the same version; the one with the larger hash is in force",
				"bucket", bucket, "version", version, "in force", text)
		}()
	}
	c.reportOverruled(f, config)
}

// reportOverruled logs once that another configuration than a limiter's own is in force, and that the limiter's has no version: SetRate, or a
// limiter with a version, has set the other. SetRate in this process is not reported.
func (c *coordinator) reportOverruled(f *flight, inForce config) {
	own := f.limiter.own.config
	own.Version = inForce.Version
	if c.heard.overruled || f.limiter.own.Version > 0 || inForce.Version == 0 || own == inForce {
		return
	}
	c.heard.overruled = true
	if slices.ContainsFunc(f.calls, func(q *call) bool { return q.verb == setRate || q.verb == setRateAndBurst }) {
		return
	}
	log := &f.limiter.logger
	bucket, ownText, text := c.label(), f.limiter.own.terms.Text, string(inForce.appendText(nil))
	go func() { // a handler may block, ask the limiter, or panic
		defer log.Recovered()
		log.Get().Warn("tokenbucket: the configuration of this limiter has no version, and another that has one is in force; "+
			"Reset puts the limiter's own in force, WithVersion a newer one", "bucket", bucket, "own", ownText, "in force", text)
	}()
}

// askSooner lets the first who is not covered ask at once if an answer shows that it could be granted by now: the bucket was begun anew,
// got a higher rate, or permits back.
func (c *coordinator) askSooner(out *permit.Outcome, now int64) {
	line := c.waiters.line
	w := line.Uncovered()
	if at, some := line.AskAt(); !some || at <= now {
		return
	}
	s := c.heard.terms
	if wait, ok := s.wait(out.Bucket.Balance, out.NowMicros, w.Permits); ok && wait <= s.reach(w.Permits, line.Ahead(now, 4*s.horizon())) {
		line.AskNow()
	}
}
