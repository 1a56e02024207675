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
)

// memory keeps permits in this process, where nobody dies alone: nothing expires.
type memory struct {
	label, process string
	observer       *Observer

	mu      sync.Mutex
	permits int
	own     int // as configured
	used    int
	fence   int64
	first   waiter  // a ring: first.next waits for longest
	waiters int     // in it
	most    int     // of them and idlers
	held    *Permit // held.next, and so on: newest first
	spare   []Permit
	idlers  []chan struct{}
}

// waiter is one who waits; a ring links them.
type waiter struct {
	prev, next *waiter
	n          int
	label      string
	permit     *Permit // when granted
	err        error
	ready      chan struct{}
}

// NewMemory returns a semaphore of this process. Waiting costs no goroutine, and whoever waits is served first come, first
// served.
func NewMemory(permits int, opts ...Option) (*Semaphore, error) {
	s := &Semaphore{}
	o, err := s.options(permits, opts)
	if err != nil {
		return nil, err
	}
	if o.fixed {
		return nil, s.bad("fixed lease", o.lease, "a semaphore of a fleet: in memory permits have no lease")
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

// enqueue lets a caller wait for n permits; nil: it need not, with the error or without a permit. mu is held.
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

// giveUp takes a waiter back, unless it was granted in the same instant.
func (m *memory) giveUp(w *waiter, why error) (*Permit, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w.next != nil {
		m.unlink(w)
		m.admit() // those behind it may fit
		return nil, why
	}
	if why != nil && w.permit != nil {
		m.take(w.permit, ErrReleased)
		return nil, why
	}
	return w.permit, w.err
}

// room is an error if as many wait as may. mu is held.
func (m *memory) room() error {
	if m.waiters+len(m.idlers) >= m.most {
		return crowded("", m.most)
	}
	return nil
}

func (m *memory) unlink(w *waiter) {
	m.waiters--
	w.prev.next, w.next.prev = w.next, w.prev
	w.prev, w.next = nil, nil
}

// grant lends n permits. mu is held.
func (m *memory) grant(n int, label string) *Permit {
	m.used += n
	m.fence++
	if len(m.spare) == 0 { // made by the dozen
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

// take takes permits back, and gives them to who waits. mu is held.
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

// admit lets in who waits for longest, as long as they fit. mu is held.
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
	for p := m.held.next; p != nil; p = p.next { // to make the id of each costs as much as a hundred looks
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
	case change.set == OwnPermits:
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

func (m *memory) known() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.permits
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

func tooMany(name string, n, permits int) error {
	if n <= permits { // as far as is known here
		return fmt.Errorf("%w: semaphore %.80q: %d wanted", ErrTooMany, name, n)
	}
	return fmt.Errorf("%w: semaphore %.80q: %d wanted of %d", ErrTooMany, name, n, permits)
}
