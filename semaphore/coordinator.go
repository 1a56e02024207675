package semaphore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// coordinator is the engine of a semaphore whose permits are kept in a store: the part that runs in each process. At most one batch is in
// flight (see source), and requests that arrive meanwhile travel together in the next.
//
// A simpler engine would make a round trip for each call, and its waiters would poll. Here calls share batches (batch.go), waiters are
// woken through Listen (listener.go), and lost notifications are detected (view.go).
type coordinator struct {
	config
	ids       ids
	tasks     tasks
	transport transport

	mu        sync.Mutex // guards the fields below
	closed    bool
	waiters   waiters  // requests for permits
	held      holdings // permits that this process holds
	releases  releases // ids to be removed from the store
	limits    limits   // changes of the number of permits
	source    source   // the batch in flight
	view      view     // what the last reports showed
	health    health   // whether the store replies
	listener  listener // receives grants
	deadlines deadlines
	alarm     alarm // rings when the next thing is due that no call triggers
}

// config does not change after New. All times are those of clock.Mono.
type config struct {
	name, label, process string
	lease                time.Duration
	heartbeat            time.Duration // while requests wait, the last sign of life in the store is at most this old
	timeout              time.Duration
	maxWaiters           int
	permits              int
	version              int64 // of permits
	fixed                bool  // leases are not renewed
	policy               FailurePolicy
	observer             *Observer
}

// New returns a semaphore whose permits are kept in a store; it is meant for stores outside of this package. name is 1 to 512 bytes of
// UTF-8, permits 1 to 2^31. Options for Redis ([WithKeyPrefix]) have no effect.
func New(st store.Store, name string, permits int, opts ...Option) (*Semaphore, error) {
	s := &Semaphore{name: name}
	o, err := s.options(permits, opts)
	if err != nil {
		return nil, err
	}
	if err := s.checkName(); err != nil {
		return nil, err
	}
	if st == nil {
		return nil, s.bad("store", "nil", "a store")
	}
	c := &coordinator{
		config: config{
			name: name, label: o.label, process: strconv.FormatUint(rand.Uint64(), 36), permits: permits, version: o.version,
			fixed: o.fixed, policy: o.policy, observer: o.observer, lease: o.lease, heartbeat: min(o.lease/3, time.Second), timeout: o.timeout,
			maxWaiters: o.waiters,
		},
		waiters: newWaiters(), view: view{permits: permits},
		held: holdings{
			lease: o.lease, margin: o.lease / 10, fixed: o.fixed, name: name, observer: o.observer, permits: map[string]*Permit{},
		},
	}
	c.ids.process = c.process
	c.source.coordinator = c
	c.transport = transport{name: name, store: st, source: &c.source, tasks: &c.tasks}
	c.transport.init(o.timeout)
	c.health = health{name: name, observer: o.observer, monitor: newMonitor(c), pause: min(c.heartbeat/4, 50*time.Millisecond)}
	c.listener = listener{store: st, process: c.process, tasks: &c.tasks, ready: c.onReady, grant: c.onGrant}
	c.deadlines = deadlines{timeout: o.timeout, alarm: &c.alarm}
	if o.version > 0 {
		c.view.limit = store.Limit{Permits: permits, Version: o.version}
	}
	c.alarm.ring = c.onAlarm
	s.engine = c
	return s, nil
}

func (c *coordinator) lock() *sync.Mutex { return &c.mu }

func (c *coordinator) acquire(ctx context.Context, n int, wait time.Duration, label string) (*Permit, error) {
	p, err := c.request(ctx, n, wait, label)
	if err != nil && c.policy == FailOpen && n > 0 && errors.Is(err, ErrStoreUnavailable) {
		return c.pass(n)
	}
	return p, err
}

// ids makes the ids of requests. It is safe for concurrent use.
type ids struct {
	process string
	made    atomic.Int64
}

// next returns an id that no other request of the fleet has.
func (i *ids) next() string { return i.process + "-" + strconv.FormatInt(i.made.Add(1), 36) }

// request asks the store for permits and waits for them.
func (c *coordinator) request(ctx context.Context, n int, wait time.Duration, label string) (*Permit, error) {
	r := &request{n: n, label: label, wait: wait != 0, ready: make(chan struct{}), id: c.ids.next(), since: clock.Mono()}
	var timeout <-chan time.Time
	if wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		timeout = timer.C
	}
	if err := c.submit(ctx, r); err != nil {
		return nil, err
	}
	var err error
	select {
	case <-r.ready:
		return r.permit, r.err
	case <-timeout:
		if c.awaitsReply(r) {
			select {
			case <-r.ready:
				return r.permit, r.err
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
	case <-ctx.Done():
		err = ctx.Err()
	}
	return c.giveUp(r, err)
}

// giveUp withdraws a request, unless it has got its result in the same instant.
func (c *coordinator) giveUp(r *request, why error) (*Permit, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !r.done {
		c.abandon(r)
		c.waiters.end(r)
		return nil, why
	}
	if why != nil && r.permit != nil {
		c.drop(r.permit, ErrReleased)
		c.transport.ready()
		return nil, why
	}
	return r.permit, r.err
}

// awaitsReply reports whether the store has not yet decided a request. From then on the request does not wait for a place.
func (c *coordinator) awaitsReply(r *request) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.done || r.queued {
		return false
	}
	r.wait = false
	return true
}

func (c *coordinator) idle(ctx context.Context) error {
	_, err := c.acquire(ctx, 0, -1, "")
	return err
}

// submit queues a request and has it sent.
func (c *coordinator) submit(ctx context.Context, r *request) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := c.enqueue(r); err != nil {
		return err
	}
	c.transport.take(ctx)
	return nil
}

// enqueue queues a request, unless the semaphore is closed, there is an outage or too many requests wait.
func (c *coordinator) enqueue(r *request) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errClosed(c.name)
	}
	if err := c.health.away(); err != nil {
		return err
	}
	if !c.waiters.add(r, c.maxWaiters) {
		return crowded(c.name, c.maxWaiters)
	}
	c.deadlines.expect(r.since)
	return nil
}

// errClosed returns the error of a call after Close.
func errClosed(name string) error { return fmt.Errorf("%w: semaphore %.80q", ErrClosed, name) }

// abandon withdraws a request whose caller has given up: if it was sent, its id is removed from the store. c.mu must be held.
func (c *coordinator) abandon(r *request) {
	if c.waiters.forget(r) {
		c.releases.add(r.id, clock.Mono(), c.lease)
		c.transport.ready()
	}
}

// fail withdraws a request and wakes its caller with an error; nil means a refusal. c.mu must be held.
func (c *coordinator) fail(r *request, err error) {
	c.abandon(r)
	c.waiters.finish(r, nil, err)
}

// drop ends a permit and returns its release, which is queued. c.mu must be held.
func (c *coordinator) drop(p *Permit, why error) *release {
	c.held.end(p, why)
	now := clock.Mono()
	if p.more.passed { // the store does not have it
		r := &release{pending: newPending(now), id: p.more.id, was: store.Holding}
		r.finish(nil)
		return r
	}
	return c.leave(p.more.id, now, c.lease)
}

// leave queues the release of an id that lasts for the given time. The caller waits for it, except during an outage; then the id is removed
// when the outage ends. c.mu must be held.
func (c *coordinator) leave(id string, now, lasts time.Duration) *release {
	r := c.releases.await(id, now, lasts)
	if err := c.health.away(); err != nil {
		r.finish(err)
	} else {
		c.deadlines.expect(now)
	}
	return r
}

// check ends a permit whose deadline has passed, and returns why the permit is over.
func (c *coordinator) check(p *Permit) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := clock.Mono(); !p.over && now >= p.more.deadline {
		c.expire(now)
		c.setAlarm(now)
	}
	if p.over {
		return p.why()
	}
	return nil
}

func (c *coordinator) release(ctx context.Context, p *Permit) error {
	c.mu.Lock()
	m := p.more
	first := m.leaving == nil
	if first {
		if p.over {
			m.lost = m.ended
		}
		m.leaving = c.drop(p, ErrReleased)
	}
	c.mu.Unlock()
	err := m.lost
	switch {
	case !first:
	case err == nil:
		c.transport.take(ctx)
	default:
		c.transport.ready()
	}
	if err == nil {
		if err = m.leaving.wait(ctx); err == nil && m.leaving.was != store.Holding {
			err = ErrLost
		}
	}
	if err != nil {
		err = fmt.Errorf("semaphore %.80q: permit %s: %w", c.name, m.id, err)
	}
	return err
}

func (c *coordinator) releaseID(ctx context.Context, id string) error {
	c.mu.Lock()
	var l *release
	if p := c.held.permits[id]; p != nil {
		l = c.drop(p, ErrLost)
	} else {
		l = c.leave(id, clock.Mono(), c.timeout)
	}
	c.mu.Unlock()
	c.transport.take(ctx)
	err := l.wait(ctx)
	if err == nil && l.was != store.Holding {
		err = fmt.Errorf("%w: semaphore %.80q: id %.80q", ErrNotHeld, c.name, id)
	}
	return err
}

func (c *coordinator) holders(ctx context.Context) ([]Holder, error) {
	held, err := ask(ctx, c, c.transport.store.Holders)
	var all []Holder
	for _, h := range held {
		all = append(all, Holder(h))
	}
	return all, err
}

// ask sends a question to the store, outside of the batches. It returns in time even if the store's client ignores its context.
func ask[T any](ctx context.Context, c *coordinator, question func(context.Context) (T, error)) (T, error) {
	var none T
	if err := c.health.away(); err != nil {
		return none, err
	}
	asking, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	type reply struct {
		what T
		err  error
	}
	replies := make(chan reply, 1)
	c.tasks.run(func() {
		what, err := question(asking)
		replies <- reply{what, err}
	})
	var err error
	select {
	case a := <-replies:
		if a.err == nil {
			return a.what, nil
		}
		err = a.err
	case <-asking.Done():
		err = asking.Err()
	}
	if ended := ctx.Err(); ended != nil {
		return none, ended
	}
	if err = wrap(c.name, err); errors.Is(err, ErrStoreUnavailable) {
		c.health.monitor.Failed()
	}
	return none, err
}

func (c *coordinator) close(ctx context.Context) error {
	for _, l := range c.endAll() {
		if err := l.wait(ctx); err != nil {
			return err
		}
	}
	select {
	case <-c.tasks.ended():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// endAll ends all requests and permits, and returns the releases to wait for.
func (c *coordinator) endAll() (last []*release) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, r := range c.waiters.all() {
		c.fail(r, errClosed(c.name))
	}
	for _, p := range c.held.permits {
		last = append(last, c.drop(p, ErrClosed))
	}
	c.listener.until = 0
	c.transport.ready()
	return last
}

// setAlarm sends a batch if one is due, and sets the alarm for whatever is due next. c.mu must be held.
func (c *coordinator) setAlarm(now time.Duration) {
	next := c.nextBatch(now)
	if next != 0 && next <= now {
		c.transport.ready()
		next = 0
	}
	if len(c.waiters.sent) == 0 {
		next = earlier(next, c.listener.rest(now))
	}
	switch next = earlier(earlier(next, c.deadlines.first), c.held.ends()); {
	case next != 0:
		c.alarm.set(next, now)
	case c.closed: // otherwise it may ring in vain: stopping it each time costs more
		c.alarm.stop()
	}
}

func (c *coordinator) onAlarm() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.alarm.at = 0
	now := clock.Mono()
	c.expire(now)
	if overdue := c.deadlines.due(now); overdue != nil {
		c.failPending(overdue, fmt.Errorf("%w: semaphore %.80q: %w", ErrStoreUnavailable, c.name, ErrStoreTimeout))
	}
	c.setAlarm(now)
}

// expire ends the permits that were not renewed in time. c.mu must be held.
func (c *coordinator) expire(now time.Duration) {
	for _, p := range c.held.expire(now) {
		if !p.more.passed {
			c.releases.add(p.more.id, now, c.held.margin)
		}
	}
}
