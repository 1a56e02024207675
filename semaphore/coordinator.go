package semaphore

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// coordinator is the engine of a semaphore whose permits a Backend keeps: this process's end of it. It is a batch.Source: at most one
// batch is under way, and what comes up meanwhile travels together in the next.
//
// The naive way is a round trip for each call, and polling by those who wait. Here calls share batches (flight.go), those who wait are
// told through Listen (listener.go), and what was told to nobody is found missing (heard.go).
type coordinator struct {
	batch.Place
	config
	transport transport
	tasks     tasks
	ids       atomic.Int64 // of requests, so far

	mu       sync.Mutex // guards what follows
	closed   bool
	waiters  waiters        // who wants permits
	held     holdings       // permits of this process
	releases releases       // ids to be ended
	changes  []*limitChange // to be sent
	heard    heard          // what the backend has said
	health   health
	listener listener
	alarm    alarm         // the next thing that is to be done by itself
	flight   *flight       // the batch under way; nil: there is none, or it has outlived its deadline
	answerBy time.Duration // the first who waits for an answer must have one by then, or later; 0: nobody waits
}

// config does not change. All times see clock.Mono.
type config struct {
	name, label, process string
	lease                time.Duration
	margin               time.Duration // before the end of a lease its work must have stopped
	heartbeat            time.Duration // while somebody waits the backend has a sign of life that is not older
	timeout              time.Duration
	maxWaiters           int
	permits              int
	version              int64 // of permits
	fixed                bool  // leases are not renewed
	observer             *Observer
}

// New returns a semaphore whose permits a backend keeps: for backends outside of this package. name is 1 to 512 bytes of UTF-8, permits 1
// to 2^31. Options that are for Redis ([WithKeyPrefix]) do nothing.
func New(backend Backend, name string, permits int, opts ...Option) (*Semaphore, error) {
	s := &Semaphore{name: name}
	o, err := s.options(permits, opts)
	if err != nil {
		return nil, err
	}
	if err := s.checkName(); err != nil {
		return nil, err
	}
	if backend == nil {
		return nil, s.bad("backend", "nil", "a backend")
	}
	c := &coordinator{
		config: config{
			name: name, label: o.label, process: strconv.FormatUint(rand.Uint64(), 36), permits: permits, version: o.version,
			fixed: o.fixed, observer: o.observer, lease: o.lease, margin: o.lease / 10, heartbeat: min(o.lease/3, time.Second), timeout: o.timeout, maxWaiters: o.waiters,
		},
		waiters: newWaiters(), held: holdings{permits: map[string]*Permit{}, fixed: o.fixed}, heard: heard{permits: permits},
	}
	if o.version > 0 {
		c.heard.limit = Limit{permits, o.version}
	}
	c.alarm.ring = c.onAlarm
	c.transport.init(backend, o.timeout, c.tasks.run)
	s.engine = c
	return s, nil
}

func (c *coordinator) lock() *sync.Mutex { return &c.mu }

func (c *coordinator) acquire(ctx context.Context, n int, wait time.Duration, label string) (*Permit, error) {
	r := &request{
		n: n, label: label, wait: wait != 0, ready: make(chan struct{}), id: c.process + "-" + strconv.FormatInt(c.ids.Add(1), 36),
		since: clock.Mono(),
	}
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
		if c.unanswered(r) {
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

// giveUp takes a request back, unless it was answered in the same instant.
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
		c.transport.ready(c)
		return nil, why
	}
	return r.permit, r.err
}

// unanswered tells that the backend has not said yet whether there is a place for a request. It will wait no longer than that.
func (c *coordinator) unanswered(r *request) bool {
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

// submit queues a request, if there is any point.
func (c *coordinator) submit(ctx context.Context, r *request) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := c.enqueue(r); err != nil {
		return err
	}
	c.transport.take(ctx, c)
	return nil
}

func (c *coordinator) enqueue(r *request) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("%w: semaphore %.80q", ErrClosed, c.name)
	}
	if !c.waiters.add(r, c.maxWaiters) {
		return crowded(c.name, c.maxWaiters)
	}
	c.expectAnswer(r.since)
	return nil
}

// abandon takes back what somebody wanted who has given up. mu is held.
func (c *coordinator) abandon(r *request) {
	if c.waiters.forget(r) {
		c.releases.add(r.id, clock.Mono(), c.lease)
		c.transport.ready(c)
	}
}

// drop ends a permit that nobody will use, or keep; it is to be sent. mu is held.
func (c *coordinator) drop(p *Permit, why error) *release {
	c.end(p, why)
	now := clock.Mono()
	c.expectAnswer(now)
	return c.releases.await(p.more.id, now, c.lease)
}

// end takes a permit from those that are held. mu is held.
func (c *coordinator) end(p *Permit, why error) {
	delete(c.held.permits, p.more.id)
	if p.end(why) {
		c.observer.ended(c.name, p, why)
	}
}

// check ends a permit whose time has come.
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
		c.transport.take(ctx, c)
	default:
		c.transport.ready(c)
	}
	if err == nil {
		if err = m.leaving.wait(ctx); err == nil && m.leaving.was != Holding {
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
		now := clock.Mono()
		c.expectAnswer(now)
		l = c.releases.await(id, now, c.timeout)
	}
	c.mu.Unlock()
	c.transport.take(ctx, c)
	err := l.wait(ctx)
	if err == nil && l.was != Holding {
		err = fmt.Errorf("%w: semaphore %.80q: id %.80q", ErrNotHeld, c.name, id)
	}
	return err
}

// submitChange queues a change of how many permits there are.
func (c *coordinator) submitChange(change change) *limitChange {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	l := &limitChange{newAnswer(now), change}
	c.changes = append(c.changes, l)
	c.expectAnswer(now)
	return l
}

func (c *coordinator) holders(ctx context.Context) ([]Holder, error) {
	return ask(ctx, c, c.transport.backend.Holders)
}

// ask asks the backend beside the batches. It returns in time, even if the backend's client does not heed its context.
func ask[T any](ctx context.Context, c *coordinator, question func(context.Context) (T, error)) (T, error) {
	asking, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	var answer, none T
	var err error
	answered := make(chan struct{})
	c.tasks.run(func() {
		defer close(answered)
		answer, err = question(asking)
	})
	select {
	case <-answered:
		if err == nil || asking.Err() == nil {
			return answer, err
		}
	case <-asking.Done():
	}
	if err := ctx.Err(); err != nil {
		return none, err
	}
	return none, fmt.Errorf("semaphore %.80q: %w", c.name, ErrTimeout)
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

// endAll ends all waits and permits, and returns the releases to wait for.
func (c *coordinator) endAll() (last []*release) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	err := fmt.Errorf("%w: semaphore %.80q", ErrClosed, c.name)
	for _, r := range c.waiters.all() {
		c.abandon(r)
		c.waiters.finish(r, nil, err)
	}
	for _, p := range c.held.permits {
		last = append(last, c.drop(p, ErrClosed))
	}
	c.listener.until = 0
	c.transport.ready(c)
	return last
}

// setAlarm makes sure that what there is to do by itself is done in time: now, or later. mu is held.
func (c *coordinator) setAlarm(now time.Duration) {
	next := c.nextBatch(now)
	if next != 0 && next <= now {
		c.transport.ready(c)
		next = 0
	}
	if len(c.waiters.sent) == 0 {
		if now >= c.listener.until {
			c.listener.stop()
		} else {
			next = earlier(next, c.listener.until)
		}
	}
	switch next = earlier(earlier(next, c.answerBy), c.held.ends()); {
	case next != 0:
		c.alarm.set(next, now)
	case c.closed: // else it may ring for nothing: to stop it each time costs more
		c.alarm.stop()
	}
}

func (c *coordinator) onAlarm() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.alarm.at = 0
	now := clock.Mono()
	c.expire(now)
	c.failOverdue(now)
	c.setAlarm(now)
}

// expire ends the permits that could not be renewed in time. mu is held.
func (c *coordinator) expire(now time.Duration) {
	for _, p := range c.held.expired(now) {
		c.end(p, ErrExpired)
		c.releases.add(p.more.id, now, c.margin)
	}
}
