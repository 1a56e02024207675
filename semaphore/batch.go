package semaphore

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// flight is a batch with the requests that it was built from.
type flight struct {
	batch    store.Batch
	sent     time.Duration // by clock.Mono
	enter    []*request
	resent   int // the number of requests at the head of enter that were sent before
	releases []*release
	renew    []*Permit
	change   *limitChange
}

// size returns the number of requests in the batch.
func (f *flight) size() int {
	n := len(f.enter) + len(f.releases) + len(f.renew)
	if f.change != nil {
		n++
	}
	return n
}

// Depart implements batch.Source.
func (c *coordinator) Depart() (*flight, time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	f := c.build(now)
	if f == nil {
		c.setAlarm(now)
		return nil, time.Time{}, false
	}
	c.flight = f
	return f, clock.At(now + c.timeout), true
}

// build returns the next batch, or nil if there is nothing to send or the store is away. c.mu must be held.
func (c *coordinator) build(now time.Duration) *flight {
	if c.monitor.Down() != nil {
		return nil
	}
	f := &flight{sent: now}
	calm := c.health.calm(now)
	if len(c.changes) > 0 {
		f.change, c.changes = c.changes[0], c.changes[1:]
	}
	f.releases = c.releases.take(now, calm)
	if calm && c.view.check(now, c.heartbeat, len(c.waiters.sent)) {
		c.waiters.askAgain(nil)
	}
	f.enter, f.resent = c.waiters.take(calm)
	if calm {
		f.renew = c.held.due(now, c.lease)
	}
	heartbeat := calm && len(c.waiters.sent) > 0 && c.view.due(now)
	if f.size() == 0 && !heartbeat {
		return nil
	}
	c.write(f)
	return f
}

// write fills in the batch of a flight. c.mu must be held.
func (c *coordinator) write(f *flight) {
	b := &f.batch
	b.Process, b.Label, b.LeaseMicros, b.Permits, b.Limit = c.process, c.label, c.lease.Microseconds(), c.permits, c.view.limit
	if c.view.server.Known() {
		b.Deadline = c.view.server.Earliest(f.sent + c.timeout)
	}
	if f.change != nil {
		b.SetPermits, b.AddPermits = f.change.set, f.change.add
	}
	for _, l := range f.releases {
		b.Leave = append(b.Leave, l.id)
	}
	for _, p := range f.renew {
		b.Renew = append(b.Renew, p.more.id)
	}
	if len(f.enter) > 0 {
		b.Enter = make([]store.Entry, 0, len(f.enter))
	}
	for _, r := range f.enter {
		b.Enter = append(b.Enter, store.Entry{ID: r.id, Permits: r.n, Ticket: r.ticket, Wait: r.wait, Label: r.label})
		c.waiters.depart(r, f)
	}
	if c.waiters.patient() {
		b.PatienceMicros, b.AliveMicros = 3*c.heartbeat.Microseconds(), c.heartbeat.Microseconds()
	}
}

// nextBatch returns when a batch is due although no call triggers it. 0 means never; a time up to now means now. c.mu must be held.
func (c *coordinator) nextBatch(now time.Duration) time.Duration {
	if c.monitor.Down() != nil { // changed looks again
		return 0
	}
	if len(c.waiters.fresh) > 0 || len(c.changes) > 0 {
		return now
	}
	var next time.Duration
	if len(c.releases.list) > 0 || len(c.waiters.resend) > 0 {
		next = now
	}
	next = earlier(next, c.held.nextRenewal())
	if len(c.waiters.sent) > 0 {
		next = earlier(next, c.view.next())
	}
	if next != 0 {
		next = max(next, c.health.notUntil)
	}
	return next
}

// transport sends the batches of one coordinator to the store, one at a time, and returns their reports. A caller makes a trip in its own
// goroutine only if the client's calls return at their context's deadline (see script.Bounded). With any other client, a server that hangs
// would block the caller.
type transport struct {
	store   store.Store
	bounded func(context.Context, *store.Batch) (*store.Report, error) // Store.Apply that returns by the deadline; nil if there is none
	trips   batch.Trips[*flight, *store.Report]
	until   script.Until // the contexts of trips in callers' goroutines
	failing atomic.Bool  // the last batch got no report
}

// init prepares t for batches that take at most timeout. run starts goroutines.
func (t *transport) init(st store.Store, timeout time.Duration, run func(func())) {
	t.store = st
	t.trips.Send, t.trips.Max, t.trips.Parallel, t.trips.Go = t.send, 1, 1, run
	r, ok := st.(*redisStore)
	if !ok {
		return
	}
	if client := script.Bounded(r.client); client != nil {
		t.bounded = func(ctx context.Context, b *store.Batch) (*store.Report, error) { return r.applyBy(ctx, client, b) }
		t.trips.Direct, t.trips.Timeout = t.direct, timeout
	}
}

// ready makes sure that a batch departs after this call. c.mu may be held.
func (t *transport) ready(c *coordinator) { t.trips.Ready("", c) }

// take is ready for a caller that may make the trip itself. It must not while trips fail: a caller on its own trip would not return when an
// outage is noticed. c.mu must not be held.
func (t *transport) take(ctx context.Context, c *coordinator) {
	if t.failing.Load() {
		t.ready(c)
		return
	}
	c.tasks.begin()
	defer c.tasks.end()
	t.trips.Take(ctx, "", c)
}

// note records the result of a batch.
func (t *transport) note(err error) {
	if failing := err != nil; t.failing.Load() != failing {
		t.failing.Store(failing)
	}
}

// send applies batches in a goroutine of the transport.
func (t *transport) send(_ string, items []*batch.Item[*flight, *store.Report]) {
	for _, i := range items {
		ctx, cancel := context.WithDeadline(context.Background(), i.Deadline)
		report, err := t.store.Apply(ctx, &i.Batch.batch)
		cancel()
		i.Answer(report, err)
	}
}

// direct applies batches in the goroutine of a caller. Its context ends before the deadline, and the batch must not be decided after that,
// since its requests are then being released.
func (t *transport) direct(_ string, items []*batch.Item[*flight, *store.Report]) {
	for _, i := range items {
		ctx, b := t.until.Context(i.Deadline), &i.Batch.batch
		if end, _ := ctx.Deadline(); b.Deadline != 0 {
			b.Deadline -= i.Deadline.Sub(end).Microseconds()
		}
		i.Answer(t.bounded(ctx, b))
	}
}

// maxBatch is the most requests of each kind in a batch. It bounds how long a batch occupies the store.
const maxBatch = 512

// cut returns the wanted items at the front of a list, at most maxBatch of them, and the rest. The list must not be used afterwards.
func cut[T any](list []T, wanted func(T) bool) (head, rest []T) {
	if len(list) == 1 && wanted(list[0]) {
		return list, nil
	}
	for i, x := range list {
		if len(head) == maxBatch {
			return head, list[i:]
		}
		if wanted(x) {
			head = append(head, x)
		}
	}
	return head, nil
}
