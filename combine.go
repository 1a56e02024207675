package tokenbucket

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/jonboulle/clockwork"
)

// A line is where the callers of one bucket in this process queue up: first come, first served. At most one batch is
// in flight; what arrives meanwhile forms the next one. Idle, a request leaves at once. Each batch is one atomic
// decision of the store, so combining is exact, and a hot bucket costs one round trip for all who wait for it.
//
// No goroutine lives longer than there is something in flight. Callers wait on a channel of their own, all under one
// timer for the first of them, so many thousands may wait at no cost.
type line struct {
	store   Store
	name    string
	clock   clockwork.Clock
	timeout time.Duration // how long the store may take to answer
	inline  bool

	// known is the newest versioned configuration that an answer brought; nil: none.
	known atomic.Pointer[setting]

	mu       sync.Mutex
	queue    []*call // to be sent; who has left stays until its turn, and is passed over
	parked   []*call // Acquires beyond the horizon, to be sent when their time comes near; likewise
	ahead    int64   // permits that the parked want
	retryAt  int64   // when the first of parked asks again
	backs    []*back // places to be given back
	flight   *flight
	spare    *flight // for reuse
	runs     []*run
	dirty    bool      // some entries are gone and those behind have not moved up yet
	lastDue  int64     // the latest due time of those who wait
	epoch    int64     // the bucket's, as last seen
	server   int64     // the store's clock in its last answer
	heard    time.Time // when that arrived
	conflict int64     // the version whose disagreement was reported

	timer   clockwork.Timer // wakes the first who waits
	timerAt int64           // 0: not armed
	watch   *time.Timer     // notices that the store does not answer
	watched bool
	local   func() int64
}

// call is one caller's request on its way.
type call struct {
	limiter  *RateLimiter
	op       Op
	read     bool // only the state is wanted
	permits  int64
	maxWait  int64     // microseconds
	deadline time.Time // of the caller's context; zero: none
	rate     float64   // of OpSetRate
	acquire  bool      // waits in the line when refused
	reserved bool      // held by a Reservation, which may cancel it even after its time

	sent    time.Time // when it was queued
	parked0 int64     // when it was first parked; 0: never
	waits   bool      // it is parked

	run     *run
	place   Place
	id      int64 // the place's first tag
	granted int64 // store's time of the grant
	arrived int64 // store's time at which it counts as come, see compact
	decided int64 // local time of the answer
	due     int64 // local time at which the permits are due
	used    bool  // let go
	gone    bool  // cancelled

	done    bool
	refused bool
	wait    int64 // of a refusal: what it would have taken
	err     error
	bucket  PermitBucket  // of a read
	answer  chan struct{} // reserved: closed when granted, refused or failed
	ready   chan struct{} // closed when the permits are due, or refused or failed
}

// finish lets the caller go.
func (c *call) finish(err error) {
	if c.done {
		return
	}
	c.done, c.err = true, err
	c.answered()
	close(c.ready)
}

func (c *call) answered() {
	if c.answer != nil {
		close(c.answer)
		c.answer = nil
	}
}

// back is a giveBack on its way.
type back struct {
	limiter *RateLimiter
	run     *run // whose end it is; nil: a single place
	limit   mark // the run's before
	give    GiveBack
	done    chan struct{}
	err     error
}

// flight is one batch on its way.
type flight struct {
	batch Batch
	calls []*call // by request; the ones behind are reads
	backs []*back // the first requests
	began time.Time
	until time.Time
}

// lines holds the lines of this process by what they share, weakly: a line lives as long as a limiter uses it.
var lines sync.Map // lineKey → weak.Pointer[line]

type lineKey struct {
	store   Store
	name    string
	clock   clockwork.Clock
	timeout time.Duration
}

// newLine returns the line that all limiters of a store, a name and a clock share.
func newLine(store Store, name string, clock clockwork.Clock, timeout time.Duration) *line {
	l := &line{store: store, name: name, clock: clock, timeout: timeout}
	_, l.inline = store.(inline)
	l.local = l.now
	if !reflect.TypeOf(store).Comparable() || !reflect.TypeOf(clock).Comparable() {
		return l // cannot be recognised again
	}
	key := lineKey{store, name, clock, timeout}
	fresh := weak.Make(l)
	for {
		old, loaded := lines.LoadOrStore(key, fresh)
		if !loaded {
			runtime.AddCleanup(l, func(key lineKey) { lines.CompareAndDelete(key, fresh) }, key)
			return l
		}
		if shared := old.(weak.Pointer[line]).Value(); shared != nil {
			return shared
		}
		lines.CompareAndDelete(key, old)
	}
}

// origin ties clocks to microseconds: differences from it are monotonic, whatever happens to the wall clock.
var origin = func() time.Time {
	now := time.Now()
	return now.Add(-time.Duration(now.Nanosecond() % 1000))
}()

// now is the limiter's clock in microseconds.
func (l *line) now() int64 {
	return origin.UnixMicro() + l.clock.Since(origin).Microseconds()
}

// submit queues a call. Its channels tell when it is answered.
func (l *line) submit(c *call) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.inline {
		c.sent = time.Now()
	}
	l.queue = append(l.queue, c)
	l.pump()
}

// pump sends what there is to send, unless something is in flight, and sets the timer for what comes next.
func (l *line) pump() {
	l.abandonStalled()
	for l.flight == nil {
		f := l.build()
		if f == nil {
			break
		}
		if l.inline {
			out, err := l.store.Apply(context.Background(), &f.batch)
			l.settle(f, &out, err)
			continue
		}
		l.flight = f
		l.startWatch()
		go l.fly(f)
	}
	l.arm()
}

// fly takes batches to the store, one after another, until there are no more.
func (l *line) fly(f *flight) {
	for f != nil {
		ctx, cancel := context.WithDeadline(context.Background(), f.until)
		out, err := l.store.Apply(ctx, &f.batch)
		cancel()
		l.mu.Lock()
		mine := l.flight == f
		if mine {
			l.flight = nil
		}
		l.settle(f, &out, err)
		f = nil
		if !mine {
			l.pump()
		} else if f = l.build(); f != nil {
			l.flight = f
			l.startWatch()
		}
		l.arm()
		l.mu.Unlock()
	}
}

// maxBatch bounds the requests of a batch, and with it how long a script may occupy Redis.
const maxBatch = 1024

// build makes the next batch: places given back first, then those whose turn it is. All of a batch come from one
// configuration. It returns nil when there is nothing to send.
func (l *line) build() *flight {
	now := l.now()
	l.advance(now)
	l.unpark(now)
	l.queue = slices.DeleteFunc(l.queue, func(c *call) bool { return c.done })
	for len(l.queue) > 0 && len(l.backs) == 0 && l.queue[0].op == OpTake && !l.queue[0].read && l.fromGap(l.queue[0], now) {
		c := l.queue[0]
		l.queue = l.queue[1:]
		c.answered()
		l.release(now)
	}

	limiter := l.first()
	if limiter == nil {
		l.queue = nil
		return nil
	}
	f := l.spare
	if f == nil {
		f = &flight{}
	}
	l.spare = nil
	f.batch = Batch{
		Name: l.name, Config: limiter.own.Config, Known: limiter.effective().Config, Initial: limiter.initial,
		Epoch: rand.Int64N(maxExact) + 1, Requests: f.batch.Requests[:0],
		LocalMicros: l.local, ServerMicros: l.server, ServerRead: l.heard,
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
		switch {
		case c.acquire && len(l.parked) > 0 && c.parked0 == 0:
			l.park(c, now) // nobody overtakes those who are parked
			continue
		case c.read:
			reads = append(reads, c)
			continue
		}
		f.calls = append(f.calls, c)
		f.batch.Requests = append(f.batch.Requests, Request{Op: c.op, Permits: c.permits, MaxWaitMicros: c.within(), Rate: c.rate})
	}
	clear(l.queue[:n])
	if l.queue = l.queue[n:]; len(l.queue) == 0 {
		l.queue = nil
	}
	if len(f.batch.Requests) == 0 && len(reads) == 0 {
		l.spare = f
		return l.build() // all of them were parked
	}
	f.calls = append(f.calls, reads...)
	if !l.inline {
		f.deadline(l.timeout)
	}
	return f
}

// advance moves up those behind the gone and lets go who is due.
func (l *line) advance(now int64) {
	if l.dirty {
		l.compact(now)
	}
	l.release(now)
}

// within is the longest wait that the call can use: none that ends after its context does.
func (c *call) within() int64 {
	if c.deadline.IsZero() {
		return c.maxWait
	}
	return max(0, min(c.maxWait, time.Until(c.deadline).Microseconds()))
}

// first is the limiter whose batch comes next.
func (l *line) first() *RateLimiter {
	switch {
	case len(l.backs) > 0:
		return l.backs[0].limiter
	case len(l.queue) > 0:
		return l.queue[0].limiter
	}
	return nil
}

// deadline is when the last of the batch's callers gives up: run later, the batch must take nothing.
func (f *flight) deadline(timeout time.Duration) {
	f.began = time.Now()
	f.until = time.Time{}
	if len(f.backs) > 0 {
		f.until = f.began.Add(timeout)
	}
	for _, c := range f.calls {
		until := c.sent.Add(timeout)
		if !c.deadline.IsZero() && c.deadline.Before(until) {
			until = c.deadline
		}
		if until.After(f.until) {
			f.until = until
		}
	}
}

// settle hands out the answers of a batch.
func (l *line) settle(f *flight, out *Outcome, err error) {
	received := l.now()
	if err == nil {
		l.learn(out)
		if !l.inline {
			l.server, l.heard = out.ClockMicros, time.Now()
		}
	}
	for i, b := range f.backs {
		l.returned(b, err == nil && f.batch.Requests[i].Grant.OK, err)
		b.err = err
		if b.done != nil {
			close(b.done)
		}
	}
	var refused []*call
	for i, c := range f.calls {
		switch i += len(f.backs); {
		case err != nil:
			c.finish(err)
		case i >= len(f.batch.Requests):
			c.bucket = out.Bucket
			c.finish(nil)
		case c.op != OpTake:
			c.refused = !f.batch.Requests[i].Grant.OK
			c.finish(nil)
		default:
			if l.settleTake(c, &f.batch.Requests[i].Grant, out, received) {
				refused = append(refused, c)
			}
		}
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
	clear(f.calls)
	clear(f.backs)
	f.calls, f.backs = f.calls[:0], f.backs[:0]
	l.spare = f
}

// settleTake reports whether the call must park.
func (l *line) settleTake(c *call, g *Grant, out *Outcome, received int64) (park bool) {
	c.decided = received
	c.wait = g.WaitMicros
	switch {
	case g.Overflow:
		c.finish(c.limiter.overflow(c.permits))
	case g.OK:
		c.place, c.id, c.granted, c.due = g.Place, g.Place.Tag, out.NowMicros, received+g.WaitMicros
		if g.WaitMicros == 0 && !c.gone && !c.reserved && l.lastDue <= received {
			c.used = true
			c.finish(nil)
			return false
		}
		l.join(c, g, out, received)
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
		c.finish(nil)
	}
	return false
}

// learn notes the configuration in force and reports a disagreement once.
func (l *line) learn(out *Outcome) {
	l.epoch = out.Bucket.Epoch
	c, known := out.Bucket.Config, l.known.Load()
	switch {
	case c.Version == 0:
		if known != nil {
			l.known.Store(nil)
		}
	case known == nil || known.Config != c:
		l.known.Store(&setting{c, out.Bucket.derived})
	}
	if out.Conflict && l.conflict != c.Version {
		l.conflict = c.Version
		slog.Warn("tokenbucket: two configurations have the same version; the one with the larger hash is in force",
			"bucket", l.name, "version", c.Version, "in force", string(c.appendText(nil)))
	}
}

// park lets an Acquire wait in this process, if its context lets it.
func (l *line) park(c *call, now int64) {
	first := l.parked[0]
	wait := first.decided + first.wait - now + int64(float64(l.ahead+c.permits-first.permits)*c.limiter.effective().interval)
	if !c.deadline.IsZero() && time.Until(c.deadline).Microseconds() < wait {
		c.refused, c.wait = true, wait
		c.finish(nil)
		return
	}
	c.parked0, c.waits = now, true
	l.ahead += c.permits
	l.parked = append(l.parked, c)
}

// unpark queues the parked again, ahead of all others, when the time of the first comes near.
func (l *line) unpark(now int64) {
	if len(l.parked) == 0 || now < l.retryAt {
		return
	}
	var again []*call
	n := 0
	for ; n < len(l.parked) && len(again) < maxBatch; n++ {
		if c := l.parked[n]; !c.done {
			l.unwait(c)
			c.sent = time.Now() // the store's time to answer begins anew
			again = append(again, c)
		}
	}
	l.queue = append(again, l.queue...)
	l.parked = slices.Delete(l.parked, 0, n)
}

func (l *line) unwait(c *call) {
	if c.waits {
		c.waits = false
		l.ahead -= c.permits
	}
}

// leave takes a caller that gives up out of the line, wherever it is. Its permits, if it has any, go to those behind
// it, or back. A call that is in flight is given back when its answer comes.
//
// It reports false if the call was answered before.
func (l *line) leave(c *call, err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.done {
		return false
	}
	c.gone = true
	c.finish(err)
	l.unwait(c)
	l.vacate(c)
	return true
}

// cancel gives back what a reservation holds, and returns the giveBack under way, if the caller is to wait for it.
func (l *line) cancel(c *call) *back {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.gone {
		return nil
	}
	c.gone, c.done = true, true // and ready stays open: a cancelled reservation never falls due
	if c.run != nil {
		return l.vacate(c)
	}
	p := c.place
	b := &back{limiter: c.limiter, done: make(chan struct{}), give: GiveBack{
		Epoch: p.Epoch, Tag: p.Tag, Tail: p.Prev, Version: p.Version, ID: c.id,
		to: p.before, end: p.after.Next,
		spent: max(0, p.before.Stored-p.after.Stored), level: p.after.Stored, granted: c.granted,
	}}
	l.backs = append(l.backs, b)
	l.pump()
	return b
}

// vacate moves up those behind a call that is gone.
func (l *line) vacate(c *call) *back {
	if c.run == nil {
		return nil
	}
	l.dirty = true
	if l.flight != nil && !l.inline {
		return nil // many may leave while a batch is in flight: they are dealt with together when it is back
	}
	n := len(l.backs)
	l.advance(l.now())
	var b *back
	if len(l.backs) > n {
		b = l.backs[len(l.backs)-1]
		b.done = make(chan struct{})
	}
	l.pump()
	return b
}

// tick is the timer's: it lets go who is due and sends who was parked.
func (l *line) tick() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timerAt = 0
	l.advance(l.now())
	l.pump()
}

// arm sets the timer for the next event.
func (l *line) arm() {
	next := int64(0)
	for _, r := range l.runs {
		if r.waiting > 0 && (next == 0 || r.head().due < next) {
			next = r.head().due
		}
	}
	if len(l.parked) > 0 && l.flight == nil && (next == 0 || l.retryAt < next) {
		next = l.retryAt
	}
	if next == l.timerAt {
		return
	}
	l.timerAt = next
	switch wait := time.Duration(next-l.now()) * time.Microsecond; {
	case next == 0:
		l.timer.Stop()
	case l.timer == nil:
		l.timer = l.clock.AfterFunc(wait, l.tick)
	default:
		l.timer.Reset(wait)
	}
}

// startWatch makes sure that somebody notices when the store does not answer.
func (l *line) startWatch() {
	switch {
	case l.watched:
		return
	case l.watch == nil:
		l.watch = time.AfterFunc(l.timeout, l.look)
	default:
		l.watch.Reset(l.timeout)
	}
	l.watched = true
}

// look fails the callers to whom the store has not answered in time. The batch in flight is given up: another may
// leave. Should its answer still come, what it took is given back.
func (l *line) look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watched = false
	if l.flight == nil {
		return
	}
	now := time.Now()
	late := func(c *call) bool { return now.Sub(c.sent) >= l.timeout }
	err := fmt.Errorf("%w: bucket %q: no answer within %v", ErrStoreTimeout, l.name, l.timeout)
	for _, c := range l.flight.calls {
		if late(c) {
			c.gone = true
			c.finish(err)
		}
	}
	l.queue = slices.DeleteFunc(l.queue, func(c *call) bool {
		if late(c) {
			c.finish(err)
		}
		return c.done
	})
	l.pump()
	if l.flight != nil {
		oldest := l.flight.began
		if len(l.queue) > 0 && l.queue[0].sent.Before(oldest) {
			oldest = l.queue[0].sent
		}
		for _, c := range l.flight.calls {
			if !c.done && c.sent.Before(oldest) {
				oldest = c.sent
			}
		}
		l.watch.Reset(max(time.Millisecond, l.timeout-now.Sub(oldest)))
		l.watched = true
	}
}

// abandonStalled stops waiting for a batch that the store has not answered in time.
func (l *line) abandonStalled() {
	if l.flight != nil && time.Since(l.flight.began) >= l.timeout {
		l.flight = nil
	}
}
