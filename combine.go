package tokenbucket

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// back is a giveBack on its way.
type back struct {
	limiter *RateLimiter
	run     *run // whose end it is; nil: a single place
	limit   mark // the run's before
	freed   freed
	give    GiveBack
	done    chan struct{}
	err     error
}

// flight is one batch on its way.
type flight struct {
	batch   Batch
	calls   []*call // by request; the ones behind are reads
	backs   []*back // the first requests
	limiter *RateLimiter
	leased  int64         // so many permits are asked for a lease, by the last request; 0: none
	began   time.Duration // see mono
	local   int64         // the limiter's clock then
	until   time.Time     // when its last caller gives up
	late    bool          // given up: another may have come back before it
}

// submit queues a call. Its channels tell when it is answered. One that cannot be called back may take its line's batch
// to the store by itself.
func (l *line) submit(ctx context.Context, c *call) {
	l.mu.Lock()
	if l.waiting >= c.limiter.maxWaiters && c.op == OpTake && !c.read { // an upstream's Retry-After comes when many wait
		c.done, c.err = true, c.limiter.crowded()
		c.answered()
		close(c.ready)
		l.mu.Unlock()
		return
	}
	l.waiting++
	if !l.inline {
		c.sent = mono()
	}
	l.queue = append(l.queue, c)
	if l.carrier != nil && !l.flying && ctx.Done() == nil && len(l.queue) == 1 && len(l.parked) == 0 && l.tidy(l.now()) {
		l.flying = true
		l.startWatch()
		l.mu.Unlock()
		if l.carrier.swim(l) {
			return
		}
		l.mu.Lock()
		l.flying = false
	}
	l.pump()
	l.mu.Unlock()
}

// pump sends what there is to send, unless somebody is about to, and sets the timer for what comes next.
func (l *line) pump() {
	l.abandonStalled()
	if l.inline {
		for f := l.build(); f != nil; f = l.build() {
			out, err := l.store.Apply(context.Background(), &f.batch)
			l.settle(f, &out, err)
		}
	} else if o := l.down(); l.flying && o != nil {
		l.ground(o) // whoever has come since need not wait for what is under way
	} else if !l.flying && l.tidy(l.now()) {
		l.flying = true
		l.startWatch()
		if l.carrier != nil {
			l.carrier.board(l)
		} else {
			go l.fly()
		}
	}
	l.arm()
}

// fly takes batches to the store, one after another, until there are no more.
func (l *line) fly() {
	var woken []chan struct{}
	for f := l.depart(); f != nil; f = l.depart() {
		ctx, cancel := context.WithDeadline(context.Background(), f.until)
		f.batch.keep = true
		out, err := l.store.Apply(ctx, &f.batch)
		cancel()
		l.mu.Lock()
		mine := l.flight == f
		if mine {
			l.flight = nil
		} else {
			f.late = true
			f.batch.memo.letGo()
		}
		woken = woken[:0]
		l.woken = &woken
		l.settle(f, &out, err)
		l.woken = nil
		if mine {
			l.arm()
		} else {
			l.pump()
		}
		l.mu.Unlock()
		wake(woken)
		if !mine {
			return
		}
		letAsk()
	}
}

// letAsk lets those who were just answered ask again, so that they share the next batch. Else the first of them would
// leave alone, and the others wait for it.
func letAsk() {
	for range 2 { // the first lets them run, the second those whom the others woke
		runtime.Gosched()
	}
}

// depart begins the flight of the next batch, if there is one.
func (l *line) depart() *flight {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.build()
	if l.flight, l.flying = f, f != nil; f == nil {
		l.memo.letGo()
	}
	l.arm()
	return f
}

// land ends a flight that left by depart. It lends the buffer.
func (l *line) land(f *flight, out *Outcome, err error, woken *[]chan struct{}) {
	*woken = (*woken)[:0]
	l.mu.Lock()
	if l.flight == f {
		l.flight, l.flying = nil, false
	} else {
		f.late = true
	}
	l.woken = woken
	l.settle(f, out, err)
	l.woken = nil
	l.pump()
	l.mu.Unlock()
	wake(*woken)
}

// maxBatch bounds the requests of a batch, and with it how long a script may occupy Redis.
const maxBatch = 1024

// build makes the next batch: places given back first, then those whose turn it is. All of a batch come from one
// configuration. It returns nil when there is nothing to send.
func (l *line) build() *flight {
	now := l.now()
	if !l.tidy(now) {
		return nil
	}
	limiter := l.first()
	f := l.spare
	if f == nil {
		f = &flight{}
	}
	l.spare = nil
	f.batch = Batch{
		Name: l.name, Config: limiter.own.Config, Known: limiter.effective().Config, Initial: limiter.initial,
		Epoch: newEpoch(), Requests: f.batch.Requests[:0],
		LocalMicros: l.micros,
		own:         &limiter.own, memo: l.memo,
	}
	if l.server.Known() {
		micros, received := l.server.Last()
		f.batch.ServerMicros, f.batch.ServerRead = micros, clock.At(received)
	}
	if l.memo = nil; f.batch.memo == nil {
		f.batch.memo = new(memo)
	}
	var reads []*call
	n := 0
	for ; n < len(l.backs) && len(f.batch.Requests) < maxBatch && l.backs[n].limiter.agrees(limiter); n++ {
		f.backs = append(f.backs, l.backs[n])
		f.batch.Requests = append(f.batch.Requests, Request{Op: OpGiveBack, Back: l.backs[n].give})
	}
	rest := len(l.backs) - n
	l.backs = slices.Delete(l.backs, 0, n)
	n = 0
	for ; rest == 0 && n < len(l.queue) && len(f.batch.Requests) < maxBatch && l.queue[n].limiter.agrees(limiter); n++ {
		c := l.queue[n]
		if c.op == OpHold && len(f.calls) > 0 || c.op == OpReset && len(f.batch.Requests) > 0 {
			break // a hold begins a batch, so that what an answer says of places is the whole of it; a reset, for the rest may not fit
		}
		switch {
		case c.acquire && len(l.parked) > 0 && c.parked0 == 0:
			l.park(c, now) // nobody overtakes those who are parked
			continue
		case c.read:
			reads = append(reads, c)
			continue
		}
		f.calls = append(f.calls, c)
		f.batch.Requests = append(f.batch.Requests, Request{Op: c.op, Permits: c.permits, MaxWaitMicros: c.within(), Rate: c.rate, MaxPermits: c.most, HoldMicros: c.hold})
	}
	clear(l.queue[:n])
	if l.queue = l.queue[n:]; len(l.queue) == 0 {
		l.queue = nil
	}
	f.leased, f.late = 0, false
	if rest == 0 && len(l.queue) == 0 && (len(f.batch.Requests) > 0 || l.refill) {
		if f.leased = l.wanted(limiter, now); f.leased > 0 {
			f.batch.Requests = append(f.batch.Requests, Request{Op: OpTakeStored, Permits: f.leased})
		}
		l.refill = false
	}
	if len(f.batch.Requests) == 0 && len(reads) == 0 {
		l.spare, l.memo = f, f.batch.memo
		return l.build() // all of them were parked, or no lease is wanted any more
	}
	f.limiter = limiter
	f.calls = append(f.calls, reads...)
	if !l.inline {
		f.local = now
		f.deadline(l.timeout)
	}
	return f
}

// tidy moves everybody on who can be without the store, and reports whether there is anything left to send.
func (l *line) tidy(now int64) bool {
	l.advance(now)
	l.unpark(now)
	l.queue = slices.DeleteFunc(l.queue, func(c *call) bool { return c.done })
	if o := l.down(); o != nil {
		l.ground(o)
		return false
	}
	for len(l.queue) > 0 && l.queue[0].op == OpTake && !l.queue[0].read {
		c := l.queue[0]
		if l.queueLease(c, now) {
			l.queue = l.queue[1:]
			c.finish(nil)
		} else if len(l.backs) == 0 && l.fromGap(c, now) {
			l.queue = l.queue[1:]
			c.answered()
			l.release(now)
		} else {
			break
		}
	}
	l.refill = l.refill && l.lease.Load() != nil
	if len(l.queue) == 0 && now-l.listened >= listenMicros {
		if limiter := l.holding(); limiter != nil {
			l.waiting++
			l.queue = append(l.queue, &call{limiter: limiter, read: true, sent: mono(), ready: make(chan struct{})})
		}
	}
	return len(l.queue) > 0 || len(l.backs) > 0 || l.refill
}

// listenMicros is how long a process that holds permits of a later time, or waits for them, goes without an answer, before it
// looks whether the bucket is held back, or was begun anew.
const listenMicros = 500_000

// holding is the limiter for which permits of a later time are held, or waited for; nil: none, or the store is no other
// process's.
func (l *line) holding() *RateLimiter {
	if l.inline {
		return nil
	}
	for _, r := range l.runs {
		if r.waiting > 0 {
			return r.limiter
		}
	}
	if e := l.lease.Load(); e != nil {
		return e.limiter
	}
	if len(l.parked) > 0 {
		return l.parked[0].limiter
	}
	return nil
}

// queueLease serves a call that has queued up from a lease, if nobody waits.
func (l *line) queueLease(c *call, now int64) bool {
	e := l.lease.Load()
	if e == nil || c.reserved || c.limiter.lease == 0 || e.limiter.own.Config != c.limiter.own.Config || l.occupied.Load() {
		return false
	}
	ok, low := e.take(c.permits, now)
	if !ok && l.next != nil {
		l.rotate()
		ok, low = l.lease.Load().take(c.permits, now)
	}
	l.refill = l.refill || low
	return ok
}

// first is the limiter whose batch comes next.
func (l *line) first() *RateLimiter {
	switch {
	case len(l.backs) > 0:
		return l.backs[0].limiter
	case len(l.queue) > 0:
		return l.queue[0].limiter
	}
	return l.lease.Load().limiter // for the next one
}

// deadline is when the last of the batch's callers gives up: run later, the batch must take nothing.
func (f *flight) deadline(timeout time.Duration) {
	f.began = mono()
	until := f.began // not 0: in a bubble of testing/synctest the time since origin is negative
	if len(f.backs) > 0 || f.leased > 0 {
		until = f.began + timeout
	}
	for _, c := range f.calls {
		last := c.sent + timeout
		if !c.deadline.IsZero() {
			last = min(last, clock.Of(c.deadline))
		}
		until = max(until, last)
	}
	f.until = clock.At(until)
}

// newEpoch is a random name. What refers to an older epoch is at most seconds old, so 40 bits are plenty, and short.
func newEpoch() int64 { return rand.Int64N(1<<40) + 1 }

// settle hands out the answers of a batch.
func (l *line) settle(f *flight, out *Outcome, err error) {
	now := l.now()
	received := now
	if out.local != 0 {
		received = out.local
	}
	if l.memo == nil || !f.late {
		l.memo.letGo() // of one that came back too late
		l.memo = f.batch.memo
	}
	l.listened = now
	if !l.inline {
		if !f.late {
			l.returnedFrom(f, out, err)
		}
		l.lapse(f, mono()) // nobody may have looked: this process was stopped
	}
	if err == nil {
		l.learn(f, out)
		if !l.inline {
			if till := received + out.Bucket.HeldUntilMicros - out.NowMicros; !f.late || till > l.heldTill {
				l.heldTill = till
			}
			l.served = true
			if !f.late {
				l.server.Heard(out.ClockMicros, f.began, mono())
			}
		}
	}
	for i, b := range f.backs {
		l.returned(b, err == nil && f.batch.Requests[i].Grant.OK, err)
		b.err = err
		if b.done != nil {
			close(b.done)
		}
	}
	var refused, promised []*call
	for i, c := range f.calls {
		switch i += len(f.backs); {
		case err != nil:
			if c.fail(err) {
				promised = append(promised, c)
			}
		case c.read:
			b := out.Bucket
			c.bucket = &b
			l.answer(c)
		case c.op != OpTake:
			c.refused = !f.batch.Requests[i].Grant.OK
			l.answer(c)
		default:
			if g := &f.batch.Requests[i].Grant; !g.OK && c.promised() {
				promised = append(promised, c)
			} else if l.settleTake(c, g, out, received, now) {
				refused = append(refused, c)
			}
		}
	}
	if f.leased > 0 && err == nil {
		if g := &f.batch.Requests[len(f.batch.Requests)-1].Grant; g.OK {
			l.leased(f, g, out)
		}
	}
	if err == nil && !l.inline {
		l.sighted(f, out)
	}
	if len(refused) > 0 { // they keep their order, ahead of those who came later
		c := refused[0]
		l.retryAt = received + c.wait - c.maxWait + c.limiter.horizon/10
		for _, c := range refused {
			c.waits = true
			l.ahead += c.permits
		}
		l.parked = append(refused, l.parked...)
	}
	l.retry(promised)
	if err == nil && !f.late {
		l.hasten(out, received)
	}
	clear(f.calls)
	clear(f.backs)
	f.calls, f.backs = f.calls[:0], f.backs[:0]
	l.spare = f
}

// settleTake reports whether the call must park. At received, or earlier, the store's clock had reached the time of the
// decision.
func (l *line) settleTake(c *call, g *Grant, out *Outcome, received, now int64) (park bool) {
	if c.again == 0 || c.acquire {
		c.decided = received
	}
	c.wait = g.WaitMicros
	switch {
	case g.Overflow:
		c.finish(c.limiter.overflow(c.permits))
	case g.OK:
		l.asked += c.permits
		c.note(&out.Bucket, out.NowMicros)
		c.place, c.id, c.granted, c.due = g.Place, g.Place.Tag, out.NowMicros, received+g.WaitMicros
		if g.WaitMicros == 0 && !c.gone && !c.reserved && l.lastDue <= now {
			c.used = true
			l.answer(c)
			return false
		}
		l.join(c, g, out, received, now)
		l.dirty = l.dirty || c.gone
		c.answered()
		if c.used {
			c.finish(nil)
		}
	case c.gone:
	case c.acquire && (c.deadline.IsZero() || time.Until(c.deadline).Microseconds() >= g.WaitMicros):
		if c.parked0 == 0 {
			c.parked0 = received
		}
		return true
	default:
		c.refused = true
		c.note(&out.Bucket, out.NowMicros)
		l.answer(c)
	}
	return false
}

// note keeps for a Reservation how full the bucket was left.
func (c *call) note(b *PermitBucket, now int64) {
	if c.reserved {
		s := b.setting()
		c.level = s.level(b.mark(), now)
	}
}

// answer lets a caller go when the lock is released: it shall neither find it held when it asks again, nor see less than
// its own answer has brought.
func (l *line) answer(c *call) {
	if l.woken == nil {
		c.finish(nil)
	} else if !c.done {
		c.kept = c.run != nil
		c.end()
		c.answered()
		*l.woken = append(*l.woken, c.ready)
	}
}

// wake lets those go who were answered, after the lock was released.
func wake(woken []chan struct{}) {
	for _, ready := range woken {
		close(ready)
	}
}

// returnedFrom tells what became of a batch.
func (l *line) returnedFrom(f *flight, out *Outcome, err error) {
	if err == nil {
		l.health.took(min(mono()-f.began-out.lockWait, time.Second)) // longer may have been an outage
	} else if away(err) || errors.Is(err, ErrLockNotObtained) {
		l.health.suspect(l)
	}
	if o := f.limiter.observer; o != nil && o.Trip != nil {
		o.Trip(Trip{Bucket: l.label(), Requests: len(f.batch.Requests), Elapsed: mono() - f.began, LockWait: out.lockWait, Err: err})
	}
}

// learn notes the configuration in force and reports a disagreement once.
func (l *line) learn(f *flight, out *Outcome) {
	if f.late {
		return // what another answer has brought since is newer
	}
	l.epoch = out.Bucket.Epoch
	if paused := out.Bucket.PausedMicros; paused != l.paused {
		l.hold(paused - l.paused)
		l.paused = paused
	}
	c, known := out.Bucket.Config, l.known.Load()
	switch {
	case c.Version == 0:
		if known != nil {
			l.known.Store(nil)
		}
	case known == nil || known.Config != c:
		l.known.Store(&setting{c, out.Bucket.derived, out.Bucket.text})
	}
	if out.Conflict && l.conflict != c.Version {
		l.conflict = c.Version
		f.limiter.logger.get().Warn("tokenbucket: two configurations have the same version; the one with the larger hash is in force",
			"bucket", l.label(), "version", c.Version, "in force", string(c.appendText(nil)))
	}
}
