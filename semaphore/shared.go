package semaphore

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// shared is the engine of a semaphore whose permits a Backend keeps. It is a batch.Source: at most one batch is under way, and what
// comes up meanwhile travels together in the next.
type shared struct {
	batch.Place
	trips   batch.Trips[*flight, *Report]
	backend Backend
	name    string
	label   string
	process string
	lease   time.Duration
	margin  time.Duration // before the end of a lease its work must have stopped
	beat    time.Duration // while somebody waits the backend hears from this process so often
	timeout time.Duration
	most    int // waiters
	own     int // permits as configured
	ids     atomic.Int64

	mu       sync.Mutex
	known    int                 // permits in force, as last heard
	queue    []*request          // to be sent
	live     int                 // requests that were neither answered nor given up
	again    []*request          // to be sent again: what became of them is unknown
	waiting  map[string]*request // sent, and not answered for good
	held     map[string]*Permit
	leaves   []*leave
	settings []*order
	closed   bool
	alarm    *time.Timer   // calls onAlarm
	alarmAt  time.Duration // then; 0: it is not set
	renewAt  time.Duration // when the first of held wants to be renewed; 0: none. All times see clock.Mono
	beatAt   time.Duration // when the backend wants to hear from us again
	lookAt   time.Duration // when the first lease of all expires
	notUntil time.Duration // after an error, for what nobody waits for
	server   clock.Remote  // the backend's clock
	heard    int64         // grants through Listen
	missed   int64         // Told, if that was more than heard when last looked at
	expiry   *time.Timer   // ends permits that could not be renewed
	expiryAt time.Duration
	listener context.CancelFunc // not nil: somebody listens
	lingers  time.Duration      // until then it goes on though nobody waits
	tasks    tasks
}

// request is somebody who wants permits; 0: until nobody holds any.
type request struct {
	id     string
	n      int
	wait   bool
	ticket int64
	permit *Permit
	err    error
	since  time.Duration
	live   *int    // of its semaphore
	flight *flight // the last it was sent with
	done   bool    // answered, or given up
	ready  chan struct{}
}

func (r *request) finish(p *Permit, err error) {
	r.permit, r.err = p, err
	r.end()
	close(r.ready)
}

func (r *request) end() {
	r.done = true
	*r.live--
}

// leave is an id to be ended.
type leave struct {
	id    string
	until time.Duration // when it would have expired anyway
	was   Standing
	err   error
	done  chan struct{} // nil: nobody waits
}

// order is a SetPermits.
type order struct {
	n    int
	err  error
	done chan struct{}
}

// linger is for how long a process goes on listening when nobody waits any more: to begin costs two round trips.
const linger = 5 * time.Second

const (
	// maxBatch bounds each part of a batch, and with it how long it occupies the backend.
	maxBatch = 512
	// maxLeaves bounds what is to be ended once the backend is back. What is beyond ends by itself, within a lease.
	maxLeaves = 16 * maxBatch
)

// New returns a semaphore whose permits a backend keeps: for backends outside of this package. label and limits: see the
// options; those of Redis are ignored.
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
	c := &shared{
		backend: backend, name: name, label: o.label, process: strconv.FormatUint(rand.Uint64(), 36),
		lease: o.lease, margin: o.lease / 10, beat: min(o.lease/3, time.Second), timeout: o.timeout,
		most: o.waiters, own: permits, known: permits, waiting: map[string]*request{}, held: map[string]*Permit{},
	}
	c.trips = batch.Trips[*flight, *Report]{Send: c.send, Max: 1, Parallel: 1, Go: c.tasks.run}
	if r, ok := backend.(*redisBackend); ok && script.HeedsDeadline(r.client) {
		c.trips.Direct, c.trips.Timeout = c.send, o.timeout
	}
	s.engine = c
	return s, nil
}

func (s *shared) acquire(ctx context.Context, n int, wait time.Duration) (*Permit, error) {
	r := &request{
		n: n, wait: wait != 0, ready: make(chan struct{}), id: s.process + "-" + strconv.FormatInt(s.ids.Add(1), 36),
		since: clock.Mono(), live: &s.live,
	}
	var timeout <-chan time.Time
	if wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		timeout = timer.C
	}
	if err := s.submit(ctx, r); err != nil {
		return nil, err
	}
	var err error
	select {
	case <-r.ready:
		return r.permit, r.err
	case <-timeout:
		if s.unanswered(r) {
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
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.done { // answered in the same instant
		if err != nil && r.permit != nil {
			s.drop(r.permit, ErrReleased)
			s.trips.Ready("", s)
			return nil, err
		}
		return r.permit, r.err
	}
	r.end()
	s.abandon(r)
	return nil, err
}

// unanswered tells that the backend has not said yet whether there is a place for a request. It will wait no longer than that.
func (s *shared) unanswered(r *request) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.done || r.ticket != 0 {
		return false
	}
	r.wait = false
	return true
}

func (s *shared) idle(ctx context.Context) error {
	_, err := s.acquire(ctx, 0, -1)
	return err
}

// submit queues a request, if there is any point.
func (s *shared) submit(ctx context.Context, r *request) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := s.enqueue(r); err != nil {
		return err
	}
	s.trips.Take(ctx, "", s)
	return nil
}

func (s *shared) enqueue(r *request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("%w: semaphore %.80q", ErrClosed, s.name)
	}
	if s.live >= s.most {
		return crowded(s.name, s.most)
	}
	if len(s.queue) >= 2*s.most { // most of them have given up
		s.queue = slices.DeleteFunc(s.queue, func(r *request) bool { return r.done })
	}
	s.live++
	s.queue = append(s.queue, r)
	return nil
}

// abandon takes back what somebody wanted who has given up. mu is held.
func (s *shared) abandon(r *request) {
	if s.waiting[r.id] == r { // it was sent
		delete(s.waiting, r.id)
		s.leave(r.id, clock.Mono()+s.lease)
		s.trips.Ready("", s)
	}
}

// leave has an id ended that nobody waits for, unless too many are to be already. mu is held.
func (s *shared) leave(id string, until time.Duration) {
	if len(s.leaves) >= maxLeaves {
		now := clock.Mono()
		s.leaves = slices.DeleteFunc(s.leaves, func(l *leave) bool { return l.done == nil && now >= l.until })
	}
	if len(s.leaves) < maxLeaves {
		s.leaves = append(s.leaves, &leave{id: id, until: until})
	}
}

// drop ends a permit that nobody will use, or keep; it is to be sent. mu is held.
func (s *shared) drop(p *Permit, why error) *leave {
	p.end(why)
	delete(s.held, p.more.id)
	l := &leave{id: p.more.id, until: clock.Mono() + s.lease, done: make(chan struct{})}
	s.leaves = append(s.leaves, l)
	return l
}

func (s *shared) release(ctx context.Context, p *Permit) error {
	s.mu.Lock()
	m := p.more
	first := m.leaving == nil
	if first {
		if p.over {
			m.lost = m.ended
		}
		m.leaving = s.drop(p, ErrReleased)
	}
	s.mu.Unlock()
	err := m.lost
	switch {
	case !first:
	case err == nil:
		s.trips.Take(ctx, "", s)
	default:
		s.trips.Ready("", s)
	}
	if err == nil {
		if err = m.leaving.wait(ctx); err == nil && m.leaving.was != Holding {
			err = ErrLost
		}
	}
	if err != nil {
		err = fmt.Errorf("semaphore %.80q: permit %s: %w", s.name, m.id, err)
	}
	return err
}

func (s *shared) lock() *sync.Mutex { return &s.mu }

func (l *leave) wait(ctx context.Context) error {
	select {
	case <-l.done:
		return l.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *shared) releaseID(ctx context.Context, id string) error {
	s.mu.Lock()
	var l *leave
	if p := s.held[id]; p != nil {
		l = s.drop(p, ErrReleased)
	} else {
		l = &leave{id: id, until: clock.Mono() + s.timeout, done: make(chan struct{})}
		s.leaves = append(s.leaves, l)
	}
	s.mu.Unlock()
	s.trips.Take(ctx, "", s)
	err := l.wait(ctx)
	if err == nil && l.was != Holding {
		err = fmt.Errorf("%w: semaphore %.80q: id %.80q", ErrNotHeld, s.name, id)
	}
	return err
}

func (s *shared) setPermits(ctx context.Context, n int) error {
	o := &order{n: n, done: make(chan struct{})}
	s.mu.Lock()
	s.settings = append(s.settings, o)
	s.mu.Unlock()
	s.trips.Take(ctx, "", s)
	select {
	case <-o.done:
		return o.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// holders returns when ctx ends, even if the backend's client does not heed that.
func (s *shared) holders(ctx context.Context) ([]Holder, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	var all []Holder
	var err error
	answered := make(chan struct{})
	s.tasks.run(func() {
		defer close(answered)
		all, err = s.backend.Holders(ctx)
	})
	select {
	case <-answered:
		return all, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *shared) close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	err := fmt.Errorf("%w: semaphore %.80q", ErrClosed, s.name)
	for _, r := range append(slices.Collect(maps.Values(s.waiting)), s.queue...) {
		if !r.done {
			s.abandon(r)
			r.finish(nil, err)
		}
	}
	s.queue, s.again, s.lingers = nil, nil, 0
	var last []*leave
	for _, p := range s.held {
		last = append(last, s.drop(p, ErrClosed))
	}
	if s.expiry != nil {
		s.expiry.Stop()
	}
	s.mu.Unlock()
	s.trips.Ready("", s)
	for _, l := range last {
		if e := l.wait(ctx); e != nil {
			return e
		}
	}
	select {
	case <-s.tasks.ended():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Depart implements batch.Source.
func (s *shared) Depart() (*flight, time.Time, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := clock.Mono()
	f := s.build(now)
	if f == nil {
		s.setAlarm(now)
		return nil, time.Time{}, false
	}
	return f, clock.At(now + s.timeout), true
}

// send takes a batch to the backend.
func (s *shared) send(_ string, items []*batch.Item[*flight, *Report]) {
	for _, i := range items {
		ctx, cancel := context.WithDeadline(context.Background(), i.Deadline)
		report, err := s.backend.Apply(ctx, i.Batch.batch)
		cancel()
		i.Answer(report, err)
	}
}

// Land implements batch.Source.
func (s *shared) Land(f *flight, report *Report, err error, late bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := clock.Mono()
	if late {
		s.settleLate(f, report, err, now)
	} else {
		s.settle(f, report, err, now)
	}
	s.setAlarm(now)
}

// setAlarm makes sure that what there is to do by itself is done in time: now, or later. mu is held.
func (s *shared) setAlarm(now time.Duration) {
	switch next := s.next(now); {
	case next == 0:
		if s.listener != nil {
			s.listener()
			s.listener = nil
		}
		if s.closed && s.alarmAt != 0 { // else it may ring for nothing: to stop it each time costs more
			s.alarm.Stop()
			s.alarmAt = 0
		}
	case next <= now:
		s.trips.Ready("", s)
	case s.alarmAt != 0 && s.alarmAt <= next:
	case s.alarm == nil:
		s.alarm, s.alarmAt = time.AfterFunc(next-now, s.onAlarm), next
	default:
		s.alarm.Reset(next - now)
		s.alarmAt = next
	}
}

func (s *shared) onAlarm() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alarmAt = 0
	s.trips.Ready("", s)
}

// resend asks anew what became of all who wait, but for those of a batch, in their order. mu is held.
func (s *shared) resend(but *flight) {
	s.again = s.again[:0]
	for _, r := range s.waiting {
		if !r.done && (but == nil || r.flight != but) {
			s.again = append(s.again, r)
		}
	}
	slices.SortFunc(s.again, func(a, b *request) int {
		if a.ticket == 0 || b.ticket == 0 { // not heard of yet: behind all others
			return cmp.Compare(b.ticket, a.ticket)
		}
		return cmp.Compare(a.ticket, b.ticket)
	})
}

// watch makes sure that permits end in time though the backend is away. mu is held.
func (s *shared) watch(deadline, now time.Duration) {
	if s.expiryAt != 0 && s.expiryAt <= deadline {
		return
	}
	s.expiryAt = deadline
	if s.expiry == nil {
		s.expiry = time.AfterFunc(deadline-now, s.expire)
	} else {
		s.expiry.Reset(deadline - now)
	}
}

// expire ends the permits that could not be renewed in time.
func (s *shared) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expiryAt = 0
	now := clock.Mono()
	first := time.Duration(0)
	for id, p := range s.held {
		if now >= p.more.deadline {
			delete(s.held, id)
			p.end(ErrExpired)
			s.leave(id, now+s.margin)
		} else {
			first = earlier(first, p.more.deadline)
		}
	}
	if first != 0 {
		s.watch(first, now)
	}
	s.trips.Ready("", s)
}

// listen hears of grants as long as anybody waits, and a while longer. mu is held.
func (s *shared) listen() {
	if s.listener != nil || s.closed || len(s.waiting) == 0 {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.listener = cancel
	ready := func() { // what was told before this is lost
		s.mu.Lock()
		defer s.mu.Unlock()
		s.resend(nil)
		s.trips.Ready("", s)
	}
	wake := func(g Grant) {
		s.mu.Lock()
		defer s.mu.Unlock()
		now := clock.Mono()
		s.heard++
		latest := s.server.Latest(now)
		if r := s.waiting[g.ID]; r != nil && !r.done && g.Outcome == Granted && g.Expires-s.lease.Microseconds() > latest {
			if !slices.Contains(s.again, r) { // it has leapt: how long the lease will last is not known, until it is renewed
				s.again = append(s.again, r)
			}
			s.trips.Ready("", s)
			return
		}
		s.admitted(g, now+time.Duration(g.Expires-latest)*time.Microsecond, now)
		s.setAlarm(now)
	}
	s.tasks.run(func() {
		for ctx.Err() == nil {
			_ = s.backend.Listen(ctx, s.process, ready, wake)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
}
