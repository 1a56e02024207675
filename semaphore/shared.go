package semaphore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// shared is the engine of a semaphore whose permits a Backend keeps. All that this process has to say to the backend goes
// through one goroutine, which lives while anybody waits or holds: at most one batch is under way, and what comes up
// meanwhile travels together in the next.
type shared struct {
	backend Backend
	name    string
	label   string
	process string
	lease   time.Duration
	margin  time.Duration // before the end of a lease its work must have stopped
	beat    time.Duration // while somebody waits the backend hears from this process so often
	timeout time.Duration
	own     int // permits as configured
	ids     atomic.Int64

	mu       sync.Mutex
	known    int                 // permits in force, as last heard
	queue    []*request          // to be sent
	again    []*request          // to be sent again: what became of them is unknown
	waiting  map[string]*request // sent, and not answered for good
	held     map[string]*Permit
	leaves   []*leave
	settings []*order
	running  bool
	kick     chan struct{}
	closed   bool
	renewAt  time.Duration // when the first of held wants to be renewed; 0: none. All times see mono
	beatAt   time.Duration // when the backend wants to hear from us again
	lookAt   time.Duration // when the first lease of all expires
	notUntil time.Duration // after an error, for what nobody waits for
	server   int64         // the backend's clock in its last report,
	asked    time.Duration // which was sent then
	answered time.Duration // and arrived then
	heard    int64         // grants through Listen
	missed   int64         // Told, if that was more than heard when last looked at
	expiry   *time.Timer   // ends permits that could not be renewed
	expiryAt time.Duration
	listener context.CancelFunc // not nil: somebody listens
	lingers  time.Duration      // until then it goes on though nobody waits
	stopped  sync.WaitGroup
}

// request is somebody who wants permits; 0: until nobody holds any.
type request struct {
	id     string
	n      int
	wait   bool
	ticket int64
	permit *Permit
	err    error
	flight *flight // the last it was sent with
	done   bool    // answered, or given up
	ready  chan struct{}
}

func (r *request) finish(p *Permit, err error) {
	r.permit, r.err, r.done = p, err, true
	close(r.ready)
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

// maxBatch bounds each part of a batch, and with it how long it occupies the backend.
const maxBatch = 512

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
	s.engine = &shared{
		backend: backend, name: name, label: o.label, process: strconv.FormatUint(rand.Uint64(), 36),
		lease: o.lease, margin: o.lease / 10, beat: min(o.lease/3, time.Second), timeout: o.timeout,
		own: permits, known: permits, kick: make(chan struct{}, 1),
		waiting: map[string]*request{}, held: map[string]*Permit{},
	}
	return s, nil
}

func (s *shared) acquire(ctx context.Context, n int, wait time.Duration) (*Permit, error) {
	r := &request{n: n, wait: wait != 0, ready: make(chan struct{}), id: s.process + "-" + strconv.FormatInt(s.ids.Add(1), 36)}
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
	case <-ctx.Done():
		err = ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.done { // answered in the same instant
		if err != nil && r.permit != nil {
			s.drop(r.permit, ErrReleased)
			return nil, err
		}
		return r.permit, r.err
	}
	r.done = true
	s.abandon(r)
	return nil, err
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
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("semaphore %.80q: %w", s.name, ErrClosed)
	}
	s.queue = append(s.queue, r)
	s.run()
	return nil
}

// abandon takes back what somebody wanted who has given up. mu is held.
func (s *shared) abandon(r *request) {
	if s.waiting[r.id] == r { // it was sent
		delete(s.waiting, r.id)
		s.leaves = append(s.leaves, &leave{id: r.id, until: mono() + s.lease})
		s.run()
	}
}

// drop ends a permit that nobody will use, or keep. mu is held.
func (s *shared) drop(p *Permit, why error) *leave {
	p.end(why)
	delete(s.held, p.more.id)
	l := &leave{id: p.more.id, until: mono() + s.lease, done: make(chan struct{})}
	s.leaves = append(s.leaves, l)
	s.run()
	return l
}

func (s *shared) release(ctx context.Context, p *Permit) error {
	s.mu.Lock()
	m := p.more
	if m.leaving == nil {
		if p.over {
			m.lost = m.ended
		}
		m.leaving = s.drop(p, ErrReleased)
	}
	s.mu.Unlock()
	err := m.lost
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
		l = &leave{id: id, until: mono() + s.timeout, done: make(chan struct{})}
		s.leaves = append(s.leaves, l)
		s.run()
	}
	s.mu.Unlock()
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
	s.run()
	s.mu.Unlock()
	select {
	case <-o.done:
		return o.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *shared) holders(ctx context.Context) ([]Holder, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	return patiently(ctx, s, s.backend.Holders)
}

func (s *shared) close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	err := fmt.Errorf("semaphore %.80q: %w", s.name, ErrClosed)
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
	s.run()
	s.mu.Unlock()
	for _, l := range last {
		if e := l.wait(ctx); e != nil {
			return e
		}
	}
	ended := make(chan struct{})
	go func() {
		s.stopped.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run makes sure that what there is to do is noticed. mu is held.
func (s *shared) run() {
	if !s.running {
		s.running = true
		s.stopped.Go(s.loop)
		return
	}
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// loop takes batches to the backend, one after another, as long as there is anybody to take care of.
func (s *shared) loop() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		s.mu.Lock()
		b, f, next := s.build(mono())
		if b == nil && next == 0 {
			s.running = false
			if s.listener != nil {
				s.listener()
				s.listener = nil
			}
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		if b == nil {
			timer.Reset(next - mono())
			select {
			case <-timer.C:
			case <-s.kick:
			}
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), s.timeout)
		f.sent = mono()
		report, err := patiently(ctx, s, func(ctx context.Context) (*Report, error) { return s.backend.Apply(ctx, b) })
		cancel()
		s.mu.Lock()
		s.settle(b, f, report, err, mono())
		s.mu.Unlock()
		for range 2 { // let those who were answered ask again, so that they share the next batch
			runtime.Gosched()
		}
	}
}

// patiently calls the backend, and returns when ctx ends, even if the backend's client does not heed that. What is still
// decided then is ended by the leave that follows, or changes nothing, for its deadline has passed.
func patiently[T any](ctx context.Context, s *shared, call func(ctx context.Context) (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	answered := make(chan answer, 1)
	s.stopped.Go(func() {
		value, err := call(ctx)
		answered <- answer{value, err}
	})
	select {
	case a := <-answered:
		return a.value, a.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}

// flight is what a batch was made of.
type flight struct {
	sent    time.Duration
	enter   []*request
	resent  int // the first so many were sent before
	leaves  []*leave
	renew   []*Permit
	setting *order
}

// build makes the next batch; nil: there is nothing to send until next. mu is held.
func (s *shared) build(now time.Duration) (b *Batch, f *flight, next time.Duration) {
	f = &flight{}
	if len(s.settings) > 0 {
		f.setting, s.settings = s.settings[0], s.settings[1:]
	}
	wanted := func(r *request) bool { return !r.done }
	if len(s.held) == 0 {
		s.renewAt = 0
	}
	calm := now >= s.notUntil
	if calm {
		f.leaves, s.leaves = cut(s.leaves, func(l *leave) bool { return l.done != nil || now < l.until })
		f.enter, s.again = cut(s.again, wanted)
		f.resent = len(f.enter)
	} else {
		f.leaves = slices.DeleteFunc(slices.Clone(s.leaves), func(l *leave) bool { return l.done == nil })
		s.leaves = slices.DeleteFunc(s.leaves, func(l *leave) bool { return l.done != nil })
	}
	fresh := s.queue
	fresh, s.queue = cut(fresh, wanted)
	f.enter = append(f.enter, fresh...)
	if calm && s.renewAt != 0 && now >= s.renewAt {
		s.renewAt = 0
		for _, p := range s.held {
			if due := p.more.renewed + s.lease/3; due > now {
				s.renewAt = earlier(s.renewAt, due)
			} else if f.renew = append(f.renew, p); len(f.renew) == maxBatch {
				s.renewAt = now
				break
			}
		}
	}
	beat := calm && len(s.waiting) > 0 && (now >= s.beatAt || s.lookAt != 0 && now >= s.lookAt)
	if len(f.enter)+len(f.leaves)+len(f.renew) == 0 && f.setting == nil && !beat {
		for _, at := range []time.Duration{s.renewAt, s.lingers} {
			if at > now {
				next = earlier(next, at)
			}
		}
		if len(s.waiting) > 0 {
			next = earlier(earlier(next, s.beatAt), s.lookAt)
		}
		if len(s.leaves) > 0 || len(s.again) > 0 || next != 0 && next < s.notUntil {
			next = max(next, s.notUntil)
		}
		return nil, nil, next
	}
	b = &Batch{
		Process: s.process, Label: s.label, LeaseMicros: s.lease.Microseconds(), Permits: s.own,
	}
	if s.answered != 0 {
		b.Deadline = s.server + (now + s.timeout - s.answered).Microseconds()
	}
	if f.setting != nil {
		b.SetPermits = f.setting.n
	}
	for _, l := range f.leaves {
		b.Leave = append(b.Leave, l.id)
	}
	for _, p := range f.renew {
		b.Renew = append(b.Renew, p.more.id)
	}
	for _, r := range f.enter {
		b.Enter = append(b.Enter, Entry{ID: r.id, Permits: r.n, Ticket: r.ticket, Wait: r.wait})
		s.waiting[r.id], r.flight = r, f
	}
	for _, r := range s.waiting {
		if r.wait {
			b.PatienceMicros = 3 * s.beat.Microseconds()
			break
		}
	}
	return b, f, 0
}

// cut takes up to a batch's worth of those that are wanted off the front.
func cut[T any](list []T, wanted func(T) bool) (head, rest []T) {
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

// earlier of two times, of which 0 is none.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// settle hands out the answers of a batch. mu is held.
func (s *shared) settle(b *Batch, f *flight, report *Report, err error, now time.Duration) {
	if err == nil && report.Late { // its clock has stepped; now that it is known, once more
		s.server, s.answered, s.asked = report.Now, now, f.sent
		s.again = append(f.enter[:f.resent:f.resent], s.again...)
		s.queue = append(f.enter[f.resent:], s.queue...)
		s.leaves = append(f.leaves, s.leaves...)
		if f.setting != nil {
			s.settings = append([]*order{f.setting}, s.settings...)
		}
		if len(f.renew) > 0 {
			s.renewAt = now
		}
		return
	}
	if err != nil {
		s.failed(f, fmt.Errorf("semaphore %.80q: %w", s.name, err), now)
		return
	}
	s.notUntil = 0
	s.server, s.asked, s.answered, s.known = report.Now, f.sent, now, report.Permits
	s.beatAt = now + s.beat
	s.lookAt = 0
	if report.Earliest != 0 {
		s.lookAt = now + time.Duration(report.Earliest-report.Now)*time.Microsecond + time.Millisecond + rand.N(10*time.Millisecond)
	}
	if f.setting != nil {
		close(f.setting.done)
	}
	for i, l := range f.leaves {
		if l.was = report.Left[i]; l.done != nil {
			close(l.done)
		}
	}
	for i, p := range f.renew {
		switch {
		case s.held[p.more.id] != p: // released meanwhile
		case report.Renewed[i]:
			p.more.renewed, p.more.deadline = f.sent, f.sent+s.lease-s.margin
			s.renewAt = earlier(s.renewAt, p.more.renewed+s.lease/3)
		default:
			delete(s.held, p.more.id)
			p.end(ErrLost)
		}
	}
	if report.Fresh {
		s.heard = 0
		for _, r := range s.waiting {
			if r.flight != f { // the backend has forgotten all who are not of this batch
				s.resend(f)
				break
			}
		}
	}
	for i, r := range f.enter {
		a := report.Entered[i]
		switch {
		case r.done && a.Outcome == Granted && s.held[r.id] == nil:
			s.leaves = append(s.leaves, &leave{id: r.id, until: now + s.lease}) // given up, and its leave may have come first
		case r.done:
		case a.Outcome == Granted:
			s.grant(r, a.Fence, f.sent+s.lease, now)
		case a.Outcome == Queued:
			r.ticket = a.Ticket
		default:
			delete(s.waiting, r.id)
			if a.Outcome == TooMany {
				r.finish(nil, tooMany(s.name, r.n, report.Permits))
			} else {
				r.finish(nil, nil)
			}
		}
	}
	for _, g := range report.Grants {
		s.admitted(g, f.sent+time.Duration(g.Expires-report.Now)*time.Microsecond, now)
	}
	switch { // a grant that was sent long enough ago for a whole beat, and has not arrived, is lost
	case report.Told <= s.heard:
		s.missed = 0
	case s.missed == 0 || s.missed > report.Told:
		s.missed = report.Told
	case s.heard < s.missed && f.resent == 0:
		s.heard, s.missed = report.Told, 0
		s.resend(nil)
		if s.listener != nil { // on another connection: this one may hang
			s.listener()
			s.listener = nil
		}
	}
	s.listen()
	if len(s.waiting) > 0 && !s.closed {
		s.lingers = now + linger
	}
}

// failed deals with a batch of which it is unknown whether it was decided. mu is held.
func (s *shared) failed(f *flight, err error, now time.Duration) {
	s.notUntil = now + min(s.beat/4, 50*time.Millisecond)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	if f.setting != nil {
		f.setting.err = err
		close(f.setting.done)
	}
	for _, l := range f.leaves {
		if l.done != nil {
			l.err = err
			close(l.done)
		}
		if now < l.until && !s.closed && !errors.Is(err, ErrCorrupt) { // once more, though nobody waits
			s.leaves = append(s.leaves, &leave{id: l.id, until: l.until})
		}
	}
	if len(f.renew) > 0 {
		s.renewAt = now
	}
	for i, r := range f.enter {
		switch {
		case r.done:
		case i < f.resent:
			s.again = append(s.again, r)
		default:
			s.abandon(r)
			r.finish(nil, err)
		}
	}
	s.beatAt = max(s.beatAt, s.notUntil)
	s.lookAt = max(s.lookAt, s.notUntil)
}

// grant gives a request its permit, whose lease ends then. mu is held.
func (s *shared) grant(r *request, fence int64, ends, now time.Duration) {
	delete(s.waiting, r.id)
	if r.n == 0 {
		r.finish(nil, nil)
		return
	}
	p := &Permit{engine: s, permits: r.n, fence: fence, more: &more{id: r.id, renewed: ends - s.lease, deadline: ends - s.margin}}
	if now >= p.more.deadline { // its lease is nearly over: this process was stopped. It has still its ticket
		s.waiting[r.id] = r
		s.again = append(s.again, r)
		return
	}
	s.held[r.id] = p
	s.renewAt = earlier(s.renewAt, p.more.renewed+s.lease/3)
	s.watch(p.more.deadline, now)
	r.finish(p, nil)
}

// admitted is what the backend tells of a waiter. mu is held.
func (s *shared) admitted(g Grant, ends, now time.Duration) {
	r := s.waiting[g.ID]
	switch {
	case r == nil || r.done:
		if s.held[g.ID] == nil && g.Outcome == Granted { // it has left, but too late
			s.leaves = append(s.leaves, &leave{id: g.ID, until: now + s.lease})
			s.run()
		}
	case g.Outcome == TooMany:
		delete(s.waiting, r.id)
		r.finish(nil, tooMany(s.name, r.n, s.known))
	default:
		s.grant(r, g.Fence, ends, now)
	}
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
	now := mono()
	first := time.Duration(0)
	for id, p := range s.held {
		if now >= p.more.deadline {
			delete(s.held, id)
			p.end(ErrExpired)
			s.leaves = append(s.leaves, &leave{id: id, until: now + s.margin})
		} else {
			first = earlier(first, p.more.deadline)
		}
	}
	if first != 0 {
		s.watch(first, now)
	}
	s.run()
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
		s.run()
	}
	wake := func(g Grant) {
		s.mu.Lock()
		defer s.mu.Unlock()
		now := mono()
		s.heard++
		// The backend's clock is at most what it was, and what has passed since that was asked for.
		latest := s.server + (now - s.asked).Microseconds()
		s.admitted(g, now+time.Duration(g.Expires-latest)*time.Microsecond, now)
		if len(s.leaves) > 0 || len(s.again) > 0 {
			s.run()
		}
	}
	s.stopped.Go(func() {
		for ctx.Err() == nil {
			_ = s.backend.Listen(ctx, s.process, ready, wake)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
}
