package tokenbucket

import (
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/weakmap"
)

// A line is where the callers of one bucket in this process queue up: first come, first served. At most one batch is
// in flight; what arrives meanwhile forms the next one. Idle, a request leaves at once. Each batch is one atomic
// decision of the store, so combining is exact, and a hot bucket costs one round trip for all who wait for it.
//
// No goroutine lives longer than there is something in flight. Callers wait on a channel of their own, all under one
// timer for the first of them, so many thousands may wait at no cost.
type line struct {
	store   Store
	traits  traits // of the store
	name    string
	clock   clockwork.Clock
	time    clock.Local   // the same, in microseconds
	timeout time.Duration // how long the store may take to answer
	inline  bool          // the store is a *MemoryStore
	memory  *MemoryStore  // it is this one; nil: another store
	carrier carrier       // the store, if it is one
	real    bool          // clock is the system's
	paces   bool          // who is let go late asks again, see overslept
	health  *health       // of the store; nil: it never fails
	parts   *MemoryStore  // of processes' parts of buckets, while the store is away

	// known is the newest versioned configuration that an answer brought; nil: none.
	known atomic.Pointer[setting]
	// sight is the bucket as last seen, for refusing without asking; nil: not known.
	sight atomic.Pointer[sight]
	// slot is the bucket in a MemoryStore, and occupied tells that not even there a request may pass by the line.
	slot     atomic.Pointer[memoryBucket]
	occupied atomic.Bool
	// lease is the block of permits in use; nil: none.
	lease atomic.Pointer[lease]

	mu       sync.Mutex
	queue    []*call          // to be sent; who has left stays until its turn, and is passed over
	waiting  int              // calls that were made and not answered, or granted and not due
	parked   []*call          // Acquires beyond the horizon, to be sent when their time comes near; likewise
	ahead    int64            // permits that the parked want
	retryAt  int64            // when the first of parked asks again
	backs    []*back          // places to be given back
	flight   *flight          // under way
	flying   bool             // somebody is about to build the next batch, or waits for an answer
	woken    *[]chan struct{} // during settle: who is let go after it
	memo     *memo            // what the store remembers; it flies with the batch
	spare    *flight          // for reuse
	runs     []*run
	dirty    bool         // some entries are gone and those behind have not moved up yet
	lastDue  int64        // the latest due time of those who wait
	epoch    int64        // the bucket's, as last seen
	paused   int64        // how long it was held back for altogether, as last seen
	listened int64        // when the store answered last, or was to; by the limiter's clock
	server   clock.Remote // the store's clock
	local    *line        // this process's part; nil: not needed yet
	served   bool         // the store has served the bucket since local was asked last
	outage   *outage      // in which that was
	heldTill int64        // until when the bucket is held back, as last seen; by the limiter's clock
	conflict int64        // the version whose disagreement was reported

	next   *lease // granted while lease still lasts
	refill bool   // it is time to ask for the next
	asked  int64  // permits that the store granted to callers
	since  int64  // that is counted from here
	review int64  // when to look after the leases; 0: never

	timer   clockwork.Timer // wakes the first who waits
	timerAt int64           // 0: not armed
	watch   *time.Timer     // notices that the store does not answer
	watched bool
	micros  func() int64 // time.Micros
}

// call is one caller's request on its way.
type call struct {
	limiter  *RateLimiter
	op       Op
	read     bool // only the state is wanted
	permits  int64
	maxWait  int64     // microseconds
	deadline time.Time // of the caller's context; zero: none
	rate     float64   // of OpSetRate and OpSetRateAndBurst
	most     float64   // max permits of OpSetRateAndBurst
	hold     int64     // of OpHold
	acquire  bool      // waits in the line when refused
	reserved bool      // held by a Reservation, which may cancel it even after its time

	sent    time.Duration // when it was queued, see mono
	parked0 int64         // when it was first parked; 0: never
	waits   bool          // it is parked
	again   int64         // when a granted call asked again, see startOver; 0: never

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
	bucket  *PermitBucket // of a read
	level   *Level        // reserved: how full the bucket was left
	kept    bool          // a run still knows it, though it is done
	answer  chan struct{} // reserved: closed when granted, refused or failed
	ready   chan struct{} // closed when the permits are due, or refused or failed
}

// calls are reused. Their channels are not: one that was made in a bubble of testing/synctest must not leave it.
var calls = sync.Pool{New: func() any { return new(call) }}

// free ends a call that was answered, and whose answer was received.
func (c *call) free() {
	if c.err == nil && !c.kept {
		*c = call{}
		calls.Put(c)
	}
}

// finish lets the caller go.
func (c *call) finish(err error) {
	if c.done {
		return
	}
	c.end()
	c.err, c.kept = err, c.run != nil
	c.answered()
	close(c.ready)
}

// end notes that nobody waits for the call any more.
func (c *call) end() {
	c.done = true
	c.limiter.line.waiting--
}

func (c *call) answered() {
	if c.answer != nil {
		close(c.answer)
		c.answer = nil
	}
}

// lines holds the lines of this process by what they share: a line lives as long as a limiter uses it.
var lines weakmap.Map[lineKey, line]

type lineKey struct {
	store   Store
	name    string
	clock   clockwork.Clock
	timeout time.Duration
}

// lineOf returns the line that all limiters of a store, a name and a clock share.
func lineOf(store Store, name string, clock clockwork.Clock, timeout time.Duration) *line {
	fresh := func() *line { return newLine(store, name, clock, timeout) }
	if !reflect.TypeOf(store).Comparable() || !reflect.TypeOf(clock).Comparable() {
		return fresh() // it cannot be recognised again
	}
	return lines.Get(lineKey{store, name, clock, timeout}, fresh)
}

func newLine(store Store, name string, by clockwork.Clock, timeout time.Duration) *line {
	l := &line{store: store, traits: traitsOf(store), name: name, clock: by, time: clock.New(by), timeout: timeout}
	l.memory, l.carrier, l.health, l.parts = l.traits.memory, l.traits.carrier, l.traits.health, l.traits.parts
	l.inline = l.memory != nil
	l.real = l.time.System()
	l.paces = l.real
	l.micros = l.time.Micros
	if l.inline {
		return l
	}
	outages := l.traits.outages
	if outages == nil {
		outages = new(atomic.Int64)
	}
	if l.parts == nil {
		l.parts = partsOf(store)
	}
	if l.health == nil {
		l.health = newHealth(outages)
		runtime.AddCleanup(l, (*health).end, l.health)
	}
	return l
}

// parts holds the stores of processes' parts of buckets, for stores that bring none: one lives as long as a line uses it.
var parts weakmap.Map[Store, MemoryStore]

// partsOf returns the one that all lines of a store share, whatever their timeouts.
func partsOf(store Store) *MemoryStore {
	if !reflect.TypeOf(store).Comparable() {
		return NewMemoryStore()
	}
	return parts.Get(store, NewMemoryStore)
}

// mono is the system's monotonic clock.
func mono() time.Duration { return clock.Mono() }

// now is the limiter's clock in microseconds, and never 0. Stores are told micros, which are others.
func (l *line) now() int64 { return l.time.Now() }

// advance moves up those behind the gone and lets go who is due.
func (l *line) advance(now int64) {
	if l.dirty {
		l.compact(now)
	}
	l.release(now)
	l.review = l.reviewLeases(now)
}

// within is the longest wait that the call can use: none that ends after its context does.
func (c *call) within() int64 {
	if c.deadline.IsZero() {
		return c.maxWait
	}
	return max(0, min(c.maxWait, time.Until(c.deadline).Microseconds()))
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
	if len(l.parked) > 0 && l.parked[0] == c { // nobody need wait behind those who have left
		for len(l.parked) > 0 && l.parked[0].done {
			l.parked[0] = nil
			l.parked = l.parked[1:]
		}
		l.arm()
	}
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
	if c.gone = true; !c.done {
		c.end() // and ready stays open: a cancelled reservation never falls due
	}
	if c.run != nil {
		return l.vacate(c)
	}
	if c.again != 0 && !c.used { // it asks again: what it gets is given back
		l.unwait(c)
		return nil
	}
	p := c.place
	b := &back{limiter: c.limiter, done: make(chan struct{}), give: GiveBack{
		Epoch: p.Epoch, Tag: p.Tag, Tail: p.Prev, Version: p.Version, ID: c.id,
		to: p.before, end: p.after.Next,
		spent: max(0, p.before.Stored-p.after.Stored), level: p.after.Stored, granted: c.granted,
	}}
	l.backs = append(l.backs, b)
	l.forget()
	l.pump()
	return b
}

// vacate moves up those behind a call that is gone.
func (l *line) vacate(c *call) *back {
	if c.run == nil {
		return nil
	}
	l.dirty = true
	l.forget()
	if l.flight != nil && !l.inline {
		return nil // many may leave while a batch is in flight: they are dealt with together when it is back
	}
	l.advance(l.now())
	var b *back
	if n := len(l.backs); n > 0 {
		if b = l.backs[n-1]; b.done == nil {
			b.done = make(chan struct{})
		}
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
	l.occupy()
	next := int64(0)
	for _, r := range l.runs {
		if r.waiting > 0 && (next == 0 || r.head().due < next) {
			next = r.head().due
		}
	}
	if len(l.parked) > 0 && !l.flying && (next == 0 || l.retryAt < next) {
		next = l.retryAt
	}
	if at := l.listened + listenMicros; !l.flying && l.holding() != nil && (next == 0 || at < next) {
		next = at
	}
	if review := l.review; review != 0 && (next == 0 || review < next) {
		next = review
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
	if !l.real && next != 0 && l.now() >= next {
		l.timer.Reset(0) // a clock that jumps, as a test's does, may have passed by the timer before it was set
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

// promised tells that a call is a reservation which asks again: whoever waits for it goes when its permits are due, and no
// sooner for having got none.
func (c *call) promised() bool { return c.reserved && c.again != 0 && !c.gone }

// fail ends a call that the store has failed, unless it must ask once more.
func (c *call) fail(err error) (promised bool) {
	if promised = c.promised(); !promised {
		c.finish(err)
	}
	return promised
}

// lapse fails those of a flight's callers to whom the store has not answered in time. Should its answer still come, what they
// took is given back.
func (l *line) lapse(f *flight, now time.Duration) {
	var promised []*call
	for i, c := range f.calls {
		if now-c.sent < l.timeout || c.done || c.gone {
			continue
		}
		stub := *c // takes the answer in its place
		stub.gone, stub.done, stub.answer = true, true, nil
		f.calls[i] = &stub
		if c.fail(l.lateness(f)) {
			promised = append(promised, c)
		}
	}
	l.retry(promised)
}

// lateness is why callers were not answered in time, while a flight is under way: that is waiting for a lock, or for an answer.
func (l *line) lateness(f *flight) error {
	if f != nil && f.batch.memo != nil && f.batch.memo.held.Load() {
		return fmt.Errorf("%w: bucket %q: within %v", ErrLockNotObtained, l.label(), l.timeout)
	}
	return fmt.Errorf("%w: bucket %q: no answer within %v", ErrStoreTimeout, l.label(), l.timeout)
}

// look fails the callers to whom the store has not answered in time. The batch in flight is given up: another may leave.
func (l *line) look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watched = false
	if !l.flying {
		return
	}
	now := mono()
	var flying []*call
	if l.flight != nil {
		l.lapse(l.flight, now)
		flying = l.flight.calls
	}
	var promised []*call
	l.queue = slices.DeleteFunc(l.queue, func(c *call) bool {
		late := !c.done && now-c.sent >= l.timeout
		if late && c.fail(l.lateness(l.flight)) {
			promised = append(promised, c)
		}
		return late || c.done
	})
	l.retry(promised)
	l.pump()
	if l.carrier != nil {
		l.carrier.hurry()
	}
	if l.flying {
		oldest := now
		if l.flight != nil {
			oldest = l.flight.began
		}
		if len(l.queue) > 0 {
			oldest = min(oldest, l.queue[0].sent)
		}
		for _, c := range flying {
			if !c.done {
				oldest = min(oldest, c.sent)
			}
		}
		l.watch.Reset(l.timeout - (now - oldest))
		l.watched = true
	}
}

// abandonStalled stops waiting for a batch that the store has not answered in time.
func (l *line) abandonStalled() {
	if l.flight != nil && mono()-l.flight.began >= l.timeout {
		l.lapse(l.flight, mono())
		l.flight.late = true
		l.returnedFrom(l.flight, &Outcome{}, l.lateness(l.flight))
		l.flight, l.flying = nil, false
	}
}
