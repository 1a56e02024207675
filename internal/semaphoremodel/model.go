// Package semaphoremodel implements the contract of store.Store in its plainest form. The conformance suite compares stores with it. Tests
// of the code above a store use it as a store in memory, with a clock that they control.
package semaphoremodel

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// Model is the state of one semaphore. Its clock is the time of the reports. The zero value is a semaphore that was never used.
type Model struct {
	Seen          int64 // the latest time
	fence, ticket int64
	limit         store.Limit
	held          []lease
	queue         []waiter // by ticket
	idle          []waiter
	waiting       map[string]*process
}

type lease struct {
	id      string
	permits int
	fence   int64
	expires int64
	since   int64
	label   string
}

type waiter struct {
	id, process string
	permits     int
	ticket      int64
	own         int   // the number that its process is configured with
	lease       int64 // of its process
	label       string
}

type process struct{ until, alive, notified int64 }

// Notice is a grant for another process.
type Notice struct {
	Process string
	Grant   store.Grant
}

func (m *Model) used() (n int) {
	for _, l := range m.held {
		n += l.permits
	}
	return n
}

func (m *Model) holder(id string) *lease {
	i := slices.IndexFunc(m.held, func(l lease) bool { return l.id == id })
	if i < 0 {
		return nil
	}
	return &m.held[i]
}

// Shift changes the state as if the clock had been set back by d µs.
func (m *Model) Shift(d int64) {
	m.Seen += d
	for i := range m.held {
		m.held[i].expires += d
	}
	for _, p := range m.waiting {
		p.until += d
		p.alive += d
	}
}

// Apply decides a batch at the time that a report gives. It returns an error if that time is invalid.
func (m *Model) Apply(b *store.Batch, now int64) (*store.Report, []Notice, error) {
	if back := m.Seen - now; back > 2_000_000 {
		m.Shift(-back)
	} else if back > 0 {
		return nil, nil, fmt.Errorf("time went back by %d µs, where it should stand still", back)
	}
	m.Seen = now
	if m.waiting == nil {
		m.waiting = map[string]*process{}
	}
	before := m.limit
	r := &store.Report{Now: now, Unchanged: m.change(b)}
	r.Limit, r.Permits = m.limit, m.total(b.Permits)
	m.held = slices.DeleteFunc(m.held, func(l lease) bool { return l.expires <= now })
	for _, id := range b.Leave {
		r.Left = append(r.Left, m.leave(id))
	}
	for _, id := range b.Renew {
		l := m.holder(id)
		if l != nil {
			l.expires = max(l.expires, now+b.LeaseMicros)
		}
		r.Renewed = append(r.Renewed, l != nil)
	}
	own := m.waiting[b.Process]
	r.Fresh = own == nil
	if own != nil {
		r.Notified = own.notified
	}
	to := &notices{process: b.Process, report: r, model: m}
	if m.limit != before {
		m.dismiss(b, now, to)
	}
	m.admit(b, now, to)
	for _, e := range b.Enter {
		r.Entered = append(r.Entered, m.enter(b, e, now))
	}
	delete(m.waiting, b.Process)
	if b.PatienceMicros != 0 {
		m.waiting[b.Process] = &process{now + b.PatienceMicros, now + b.AliveMicros, r.Notified}
	}
	for _, l := range m.held {
		if r.Earliest == 0 || l.expires < r.Earliest {
			r.Earliest = l.expires
		}
	}
	return r, to.others, nil
}

// total returns the number of permits for a process that is configured with own.
func (m *Model) total(own int) int {
	if m.limit.Permits > 0 {
		return m.limit.Permits
	}
	return own
}

// change updates the limit, and reports whether a change was out of range.
func (m *Model) change(b *store.Batch) (unchanged bool) {
	if b.Limit.Version > m.limit.Version {
		m.limit = b.Limit
	}
	n := max(0, b.SetPermits)
	if b.AddPermits != 0 {
		n = m.total(b.Permits) + b.AddPermits
		if n < 1 || int64(n) > 1<<31 {
			return true
		}
	}
	if b.SetPermits != 0 || b.AddPermits != 0 {
		m.limit = store.Limit{Permits: n, Version: m.limit.Version + 1}
	}
	return false
}

func (m *Model) leave(id string) store.Standing {
	before := len(m.held) + len(m.queue) + len(m.idle)
	held := len(m.held)
	m.held = slices.DeleteFunc(m.held, func(l lease) bool { return l.id == id })
	m.queue = slices.DeleteFunc(m.queue, func(w waiter) bool { return w.id == id })
	m.idle = slices.DeleteFunc(m.idle, func(w waiter) bool { return w.id == id })
	switch {
	case len(m.held) < held:
		return store.Holding
	case len(m.held)+len(m.queue)+len(m.idle) < before:
		return store.Waiting
	}
	return store.Gone
}

// condition is whether the waiters of a process may be admitted.
type condition int

const (
	dead condition = iota
	silent
	alive
)

// condition returns the condition of a process with waiters.
func (m *Model) condition(b *store.Batch, name string, now int64) condition {
	p := m.waiting[name]
	switch {
	case name == b.Process && b.PatienceMicros != 0:
		return alive
	case name == b.Process || p == nil:
		return dead
	case p.until < now:
		delete(m.waiting, name)
		return dead
	case p.alive < now:
		return silent
	}
	return alive
}

// notices collects the grants that a batch sends.
type notices struct {
	process string
	report  *store.Report
	model   *Model
	others  []Notice
}

func (t *notices) send(w waiter, g store.Grant) {
	if w.process == t.process {
		t.report.Grants = append(t.report.Grants, g)
		return
	}
	t.model.waiting[w.process].notified++
	t.others = append(t.others, Notice{w.process, g})
}

// dismiss ends the waits of requests that want more permits than there are now.
func (m *Model) dismiss(b *store.Batch, now int64, to *notices) {
	m.queue = slices.DeleteFunc(m.queue, func(w waiter) bool {
		if w.permits <= m.total(w.own) {
			return false
		}
		if m.condition(b, w.process, now) != dead {
			to.send(w, store.Grant{ID: w.id, Outcome: store.TooMany})
		}
		return true
	})
}

// admit grants permits to waiters.
func (m *Model) admit(b *store.Batch, now int64, to *notices) {
	for len(m.queue) > 0 {
		w := m.queue[0]
		is := m.condition(b, w.process, now)
		if is == silent || is == alive && m.used()+w.permits > m.total(w.own) {
			break
		}
		m.queue = m.queue[1:]
		if is == alive {
			l := m.grant(w.id, w.permits, now, w.lease, w.label)
			to.send(w, store.Grant{ID: w.id, Outcome: store.Granted, Fence: l.fence, Expires: l.expires})
		}
	}
	if len(m.held) == 0 {
		for _, w := range m.idle {
			if m.condition(b, w.process, now) != dead {
				to.send(w, store.Grant{ID: w.id, Outcome: store.Granted})
			}
		}
		m.idle = nil
	}
}

func (m *Model) grant(id string, permits int, now, lasts int64, label string) lease {
	m.fence = max(m.fence+1, now)
	l := lease{id, permits, m.fence, now + lasts, now, label}
	m.held = append(m.held, l)
	return l
}

func (m *Model) enter(b *store.Batch, e store.Entry, now int64) store.Result {
	total, label := m.total(b.Permits), cmp.Or(e.Label, b.Label)
	waits := slices.IndexFunc(m.queue, func(w waiter) bool { return w.id == e.ID })
	l := m.holder(e.ID)
	switch {
	case e.Permits == 0 && len(m.held) == 0:
		return store.Result{Outcome: store.Granted}
	case e.Permits == 0:
		if !slices.ContainsFunc(m.idle, func(w waiter) bool { return w.id == e.ID }) {
			m.idle = append(m.idle, waiter{id: e.ID, process: b.Process})
		}
		return store.Result{Outcome: store.Queued}
	case l != nil:
		l.expires = max(l.expires, now+b.LeaseMicros)
		return store.Result{Outcome: store.Granted, Fence: l.fence}
	case e.Permits > total:
		return store.Result{Outcome: store.TooMany}
	case waits >= 0:
		return store.Result{Outcome: store.Queued, Ticket: m.queue[waits].ticket}
	case m.used()+e.Permits <= total && (len(m.queue) == 0 || e.Ticket != 0 && e.Ticket < m.queue[0].ticket):
		return store.Result{Outcome: store.Granted, Fence: m.grant(e.ID, e.Permits, now, b.LeaseMicros, label).fence}
	case !e.Wait:
		return store.Result{Outcome: store.Refused}
	}
	ticket := e.Ticket
	if ticket == 0 {
		ticket = max(m.ticket+1, now)
	}
	m.ticket = max(m.ticket, ticket)
	m.queue = append(m.queue, waiter{e.ID, b.Process, e.Permits, ticket, b.Permits, b.LeaseMicros, label})
	slices.SortFunc(m.queue, func(a, b waiter) int {
		return cmp.Or(cmp.Compare(a.ticket, b.ticket), cmp.Compare(a.id, b.id))
	})
	return store.Result{Outcome: store.Queued, Ticket: ticket}
}

// Holders returns the holders of permits at a time.
func (m *Model) Holders(now int64) (all []store.Holder) {
	for _, l := range m.held {
		if l.expires > now {
			all = append(all, store.Holder{ID: l.id, Permits: l.permits, Fence: l.fence, Label: l.label,
				Since: time.UnixMicro(l.since), Expires: time.UnixMicro(l.expires)})
		}
	}
	return all
}

// Drop loses all permits that are held.
func (m *Model) Drop() { m.held = nil }

// Waiting returns the number of requests that wait for permits.
func (m *Model) Waiting() int { return len(m.queue) }

// Stats returns the use of the semaphore at a time.
func (m *Model) Stats(now int64) store.Stats {
	s := store.Stats{Permits: m.limit.Permits, Version: m.limit.Version, Waiting: len(m.queue)}
	for _, h := range m.Holders(now) {
		s.Used += h.Permits
	}
	return s
}

// Lose loses the whole state. Time does not go back.
func (m *Model) Lose() { *m = Model{Seen: m.Seen} }
