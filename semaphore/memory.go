package semaphore

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// memory is the engine of a semaphore in memory. Nothing expires, because all holders end with the process.
type memory struct {
	label, process string
	observer       *Observer

	mu      sync.Mutex
	permits int
	own     int // the number that the semaphore was made with
	used    int
	fence   int64
	first   waiter  // head of a ring; first.next is the oldest
	waiters int     // in the ring
	most    int     // of waiters and idlers together
	held    *Permit // head of a list, the newest first
	spare   []Permit
	idlers  []chan struct{}
}

// waiter is a call that waits for permits, an element of the ring.
type waiter struct {
	prev, next *waiter
	n          int
	label      string
	permit     *Permit // set when it is granted
	err        error
	ready      chan struct{}
}

// NewMemory returns a semaphore of this process. A waiting call costs no goroutine, and waiters are served first come, first served.
func NewMemory(permits int, opts ...Option) (*Semaphore, error) {
	s := &Semaphore{}
	o, err := s.options(permits, opts)
	if err != nil {
		return nil, err
	}
	if o.leased != "" {
		return nil, s.bad(o.leased, o.lease, "a semaphore of a fleet: in memory permits have no lease")
	}
	m := &memory{permits: permits, own: permits, most: o.waiters, label: o.label, process: strconv.FormatUint(rand.Uint64(), 36), held: new(Permit),
		observer: o.observer}
	m.first.prev, m.first.next = &m.first, &m.first
	s.engine = m
	return s, nil
}

func (m *memory) acquire(ctx context.Context, n int, wait time.Duration, label string) (*Permit, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	if n <= m.permits && m.used <= m.permits-n && m.first.next == &m.first {
		p := m.grant(n, label)
		m.mu.Unlock()
		return p, nil
	}
	w, err := m.enqueue(n, wait, label)
	m.mu.Unlock()
	if w == nil {
		return nil, err
	}
	var timeout <-chan time.Time
	if wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		timeout = timer.C
	}
	select {
	case <-w.ready:
		return w.permit, w.err
	case <-timeout:
	case <-ctx.Done():
		err = ctx.Err()
	}
	return m.giveUp(w, err)
}

// enqueue adds a waiter for n permits to the ring. It returns nil if the call need not wait: with an error, or with nil for a refusal. m.mu
// must be held.
func (m *memory) enqueue(n int, wait time.Duration, label string) (*waiter, error) {
	if n > m.permits {
		return nil, tooMany("", n, m.permits)
	}
	if wait == 0 {
		return nil, nil
	}
	if err := m.room(); err != nil {
		return nil, err
	}
	m.waiters++
	w := &waiter{n: n, label: label, ready: make(chan struct{}), prev: m.first.prev, next: &m.first}
	w.prev.next, w.next.prev = w, w
	return w, nil
}

// giveUp removes a waiter, unless it was granted in the same instant.
func (m *memory) giveUp(w *waiter, why error) (*Permit, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w.next != nil {
		m.unlink(w)
		m.admit() // waiters behind it may fit
		return nil, why
	}
	if why != nil && w.permit != nil {
		m.take(w.permit, ErrReleased)
		return nil, why
	}
	return w.permit, w.err
}

// room returns an error if no further call may wait. m.mu must be held.
func (m *memory) room() error {
	if m.waiters+len(m.idlers) >= m.most {
		return crowded("", m.most)
	}
	return nil
}

// unlink removes a waiter from the ring. m.mu must be held.
func (m *memory) unlink(w *waiter) {
	m.waiters--
	w.prev.next, w.next.prev = w.next, w.prev
	w.prev, w.next = nil, nil
}

// grant returns a permit. m.mu must be held.
func (m *memory) grant(n int, label string) *Permit {
	m.used += n
	m.fence++
	if len(m.spare) == 0 { // allocated in blocks of 16
		m.spare = make([]Permit, 16)
	}
	p := &m.spare[0]
	m.spare = m.spare[1:]
	p.engine, p.permits, p.fence, p.since = m, n, m.fence, clock.Mono()
	if label != "" {
		p.more = &more{label: label}
	}
	p.prev, p.next = m.held, m.held.next
	if p.next != nil {
		p.next.prev = p
	}
	m.held.next = p
	return p
}

// take ends a permit and admits waiters. m.mu must be held.
func (m *memory) take(p *Permit, why error) {
	p.end(why)
	m.observer.ended("", p, why)
	p.prev.next = p.next
	if p.next != nil {
		p.next.prev = p.prev
	}
	p.prev, p.next = nil, nil
	m.used -= p.permits
	m.admit()
}

// admit grants permits to the oldest waiters, as long as they fit. m.mu must be held.
func (m *memory) admit() {
	for w := m.first.next; w != &m.first; w = m.first.next {
		if m.used > m.permits-w.n {
			return
		}
		w.permit = m.grant(w.n, w.label)
		m.unlink(w)
		close(w.ready)
	}
	if m.used == 0 {
		for _, idler := range m.idlers {
			close(idler)
		}
		m.idlers = nil
	}
}

func (m *memory) release(_ context.Context, p *Permit) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !p.over {
		m.take(p, ErrReleased)
		return nil
	}
	if why := p.why(); why != ErrReleased {
		return fmt.Errorf("%w: permit %s", why, p.ID())
	}
	return nil
}

func (m *memory) check(p *Permit) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.over {
		return p.why()
	}
	return nil
}

func (m *memory) lock() *sync.Mutex { return &m.mu }

func (m *memory) releaseID(_ context.Context, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	text, _ := strings.CutPrefix(id, m.process+"-")
	fence, _ := strconv.ParseInt(text, 36, 64)
	for p := m.held.next; p != nil; p = p.next { // comparing fences first: making the id of each permit costs a hundred times as much
		if p.fence == fence && p.ID() == id {
			m.take(p, ErrLost)
			return nil
		}
	}
	return fmt.Errorf("%w: %.80q", ErrNotHeld, id)
}

func (m *memory) changePermits(_ context.Context, change change) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := int64(change.set)
	switch {
	case change.set == store.OwnPermits:
		n = int64(m.own)
	case change.add != 0:
		n = int64(m.permits) + int64(change.add)
	}
	if n < 1 || n > maxPermits {
		return outOfRange("", m.permits, change.add)
	}
	m.permits = int(n)
	for w := m.first.next; w != &m.first; {
		next := w.next
		if w.n > m.permits {
			m.unlink(w)
			w.err = tooMany("", w.n, m.permits)
			close(w.ready)
		}
		w = next
	}
	m.admit()
	return nil
}

func (m *memory) limitInForce() store.Limit {
	m.mu.Lock()
	defer m.mu.Unlock()
	return store.Limit{Permits: m.permits}
}

func (m *memory) stats(context.Context) (Stats, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return Stats{Permits: m.permits, Used: m.used, Waiting: m.waiters}, nil
}

func (m *memory) holders(context.Context) ([]Holder, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []Holder
	last := m.held
	for last.next != nil {
		last = last.next
	}
	for p := last; p != m.held; p = p.prev {
		h := Holder{ID: p.ID(), Permits: p.permits, Fence: p.fence, Since: clock.At(p.since), Label: m.label}
		if p.more != nil && p.more.label != "" {
			h.Label = p.more.label
		}
		all = append(all, h)
	}
	return all, nil
}

func (m *memory) idle(ctx context.Context) error {
	m.mu.Lock()
	if m.used == 0 {
		m.mu.Unlock()
		return ctx.Err()
	}
	if err := m.room(); err != nil {
		m.mu.Unlock()
		return err
	}
	idle := make(chan struct{})
	m.idlers = append(m.idlers, idle)
	m.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		m.mu.Lock()
		defer m.mu.Unlock()
		for i, c := range m.idlers {
			if c == idle {
				m.idlers = append(m.idlers[:i], m.idlers[i+1:]...)
				break
			}
		}
		return ctx.Err()
	}
}

// tooMany returns the error of a request for more permits than there are.
func tooMany(name string, n, permits int) error {
	if n <= permits { // according to the last reply
		return fmt.Errorf("%w: semaphore %.80q: %d wanted", ErrTooMany, name, n)
	}
	return fmt.Errorf("%w: semaphore %.80q: %d wanted of %d", ErrTooMany, name, n, permits)
}
