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

// write fills in the batch of a flight.
func (f *flight) write(cfg *config, v *view) {
	b := &f.batch
	b.Process, b.Label, b.LeaseMicros, b.Permits, b.Limit = cfg.process, cfg.label, cfg.lease.Microseconds(), cfg.permits, v.limit
	if v.server.Known() {
		b.Deadline = v.server.Earliest(f.sent + cfg.timeout)
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
	}
}

// failCalls ends the overdue calls that wait for the reply to the batch, except requests for permits.
func (f *flight) failCalls(overdue overdue, err error) {
	for _, l := range f.releases {
		l.fail(overdue, err)
	}
	if f.change != nil {
		f.change.fail(overdue, err)
	}
}

// undecided returns the overdue requests for permits whose first reply is still to come.
func (f *flight) undecided(overdue overdue) (enter []*request) {
	for _, r := range f.enter {
		if !r.done && !r.queued && overdue(r.since) {
			enter = append(enter, r)
		}
	}
	return enter
}

// source is the batch.Source of a coordinator: it builds the batches and settles their reports. The coordinator's mu guards flight.
type source struct {
	batch.Place
	coordinator *coordinator
	flight      *flight // the batch in flight; nil if there is none, or if it has outlived its deadline
}

// Depart implements batch.Source.
func (s *source) Depart() (*flight, time.Time, bool) {
	c := s.coordinator
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	f := s.build(now)
	if f == nil {
		c.setAlarm(now)
		return nil, time.Time{}, false
	}
	s.flight = f
	return f, clock.At(now + c.timeout), true
}

// build returns the next batch, or nil if there is nothing to send or during an outage. The coordinator's mu must be held.
func (s *source) build(now time.Duration) *flight {
	c := s.coordinator
	if c.health.down() {
		return nil
	}
	f := &flight{sent: now}
	calm := c.health.calm(now) || c.waiters.apart // what was put off is sent with each batch: newer requests would overtake it
	f.change = c.limits.take()
	f.releases = c.releases.take(now, calm)
	if calm && c.view.check(now, c.heartbeat, len(c.waiters.sent)) {
		c.waiters.askAgain(nil)
	}
	f.enter, f.resent = c.waiters.take(calm)
	if calm {
		f.renew = c.held.due(now)
	}
	heartbeat := calm && len(c.waiters.sent) > 0 && c.view.due(now)
	if f.size() == 0 && !heartbeat {
		return nil
	}
	f.write(&c.config, &c.view)
	c.waiters.depart(f)
	if c.waiters.patient() {
		f.batch.PatienceMicros, f.batch.AliveMicros = 3*c.heartbeat.Microseconds(), c.heartbeat.Microseconds()
	}
	return f
}

// nextBatch returns when a batch is due although no call triggers it. 0 means never; a time up to now means now. c.mu must be held.
func (c *coordinator) nextBatch(now time.Duration) time.Duration {
	if c.health.down() { // changed looks again
		return 0
	}
	if len(c.waiters.fresh) > 0 || len(c.limits.list) > 0 {
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
	name    string // of the semaphore
	store   store.Store
	source  *source
	tasks   *tasks
	bounded func(context.Context, *store.Batch) (*store.Report, error) // Store.Apply that returns by the deadline; nil if there is none
	trips   batch.Trips[*flight, *store.Report]
	until   script.Until // the contexts of trips in callers' goroutines
	failing atomic.Bool  // the last batch got no report
}

// init prepares t for batches that take at most timeout. The first four fields must be set.
func (t *transport) init(timeout time.Duration) {
	t.trips.Send, t.trips.Max, t.trips.Parallel, t.trips.Go = t.send, 1, 1, t.tasks.run
	r, ok := t.store.(*redisStore)
	if !ok {
		return
	}
	if client := script.Bounded(r.client); client != nil {
		t.bounded = func(ctx context.Context, b *store.Batch) (*store.Report, error) { return r.applyBy(ctx, client, b) }
		t.trips.Direct, t.trips.Timeout = t.direct, timeout
	}
}

// ready makes sure that a batch departs after this call. The coordinator's mu may be held.
func (t *transport) ready() { t.trips.Ready("", t.source) }

// take is ready for a caller that may make the trip itself. It must not while trips fail: a caller on its own trip would not return when an
// outage is noticed. The coordinator's mu must not be held.
func (t *transport) take(ctx context.Context) {
	if t.failing.Load() {
		t.ready()
		return
	}
	t.tasks.begin()
	defer t.tasks.end()
	t.trips.Take(ctx, "", t.source)
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
