// Package semaphoremodel is what a semaphore.Backend must do, written down plainly: the conformance suite compares backends with
// it, and tests of what is above a backend have it as one that lives in the process, with time as they like.
package semaphoremodel

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// Model is what semaphore.Backend says, in its plainest form: with the times of the reports as the clock. The zero value is a
// semaphore of which nothing is there yet.
type Model struct {
	Seen          int64 // the latest time
	fence, ticket int64
	limit         semaphore.Limit
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
	own         int   // what its process is configured with
	lease       int64 // of its process
	label       string
}

type process struct{ until, alive, told int64 }

// Told is a grant for another process.
type Told struct {
	Process string
	Grant   semaphore.Grant
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

// Shift moves what is stored as if the clock had been set back by d µs.
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

// Apply decides a batch at a time that a report gives; the error is what is wrong with that.
func (m *Model) Apply(b *semaphore.Batch, now int64) (*semaphore.Report, []Told, error) {
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
	r := &semaphore.Report{Now: now, Unchanged: m.change(b)}
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
		r.Told = own.told
	}
	told := &told{process: b.Process, report: r, model: m}
	if m.limit != before {
		m.dismiss(b, now, told)
	}
	m.admit(b, now, told)
	for _, e := range b.Enter {
		r.Entered = append(r.Entered, m.enter(b, e, now))
	}
	delete(m.waiting, b.Process)
	if b.PatienceMicros != 0 {
		m.waiting[b.Process] = &process{now + b.PatienceMicros, now + b.AliveMicros, r.Told}
	}
	for _, l := range m.held {
		if r.Earliest == 0 || l.expires < r.Earliest {
			r.Earliest = l.expires
		}
	}
	return r, told.others, nil
}

// total is how many permits there are for a process that is configured with so many.
func (m *Model) total(own int) int {
	if m.limit.Permits > 0 {
		return m.limit.Permits
	}
	return own
}

// change brings the limit up to date, and tells whether a change was not possible.
func (m *Model) change(b *semaphore.Batch) (unchanged bool) {
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
		m.limit = semaphore.Limit{Permits: n, Version: m.limit.Version + 1}
	}
	return false
}

func (m *Model) leave(id string) semaphore.Standing {
	before := len(m.held) + len(m.queue) + len(m.idle)
	held := len(m.held)
	m.held = slices.DeleteFunc(m.held, func(l lease) bool { return l.id == id })
	m.queue = slices.DeleteFunc(m.queue, func(w waiter) bool { return w.id == id })
	m.idle = slices.DeleteFunc(m.idle, func(w waiter) bool { return w.id == id })
	switch {
	case len(m.held) < held:
		return semaphore.Holding
	case len(m.held)+len(m.queue)+len(m.idle) < before:
		return semaphore.Waiting
	}
	return semaphore.Gone
}

type condition int

const (
	dead condition = iota
	silent
	alive
)

// heard is how a process is that waits.
func (m *Model) heard(b *semaphore.Batch, name string, now int64) condition {
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

// told gathers who is to be told what in a batch of a process.
type told struct {
	process string
	report  *semaphore.Report
	model   *Model
	others  []Told
}

func (t *told) tell(w waiter, g semaphore.Grant) {
	if w.process == t.process {
		t.report.Grants = append(t.report.Grants, g)
		return
	}
	t.model.waiting[w.process].told++
	t.others = append(t.others, Told{w.process, g})
}

// dismiss tells those who want more than there are now.
func (m *Model) dismiss(b *semaphore.Batch, now int64, told *told) {
	m.queue = slices.DeleteFunc(m.queue, func(w waiter) bool {
		if w.permits <= m.total(w.own) {
			return false
		}
		if m.heard(b, w.process, now) != dead {
			told.tell(w, semaphore.Grant{ID: w.id, Outcome: semaphore.TooMany})
		}
		return true
	})
}

// admit lets in who waits.
func (m *Model) admit(b *semaphore.Batch, now int64, told *told) {
	for len(m.queue) > 0 {
		w := m.queue[0]
		is := m.heard(b, w.process, now)
		if is == silent || is == alive && m.used()+w.permits > m.total(w.own) {
			break
		}
		m.queue = m.queue[1:]
		if is == alive {
			l := m.grant(w.id, w.permits, now, w.lease, w.label)
			told.tell(w, semaphore.Grant{ID: w.id, Outcome: semaphore.Granted, Fence: l.fence, Expires: l.expires})
		}
	}
	if len(m.held) == 0 {
		for _, w := range m.idle {
			if m.heard(b, w.process, now) != dead {
				told.tell(w, semaphore.Grant{ID: w.id, Outcome: semaphore.Granted})
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

func (m *Model) enter(b *semaphore.Batch, e semaphore.Entry, now int64) semaphore.Answer {
	total, label := m.total(b.Permits), cmp.Or(e.Label, b.Label)
	waits := slices.IndexFunc(m.queue, func(w waiter) bool { return w.id == e.ID })
	l := m.holder(e.ID)
	switch {
	case e.Permits == 0 && len(m.held) == 0:
		return semaphore.Answer{Outcome: semaphore.Granted}
	case e.Permits == 0:
		if !slices.ContainsFunc(m.idle, func(w waiter) bool { return w.id == e.ID }) {
			m.idle = append(m.idle, waiter{id: e.ID, process: b.Process})
		}
		return semaphore.Answer{Outcome: semaphore.Queued}
	case l != nil:
		l.expires = max(l.expires, now+b.LeaseMicros)
		return semaphore.Answer{Outcome: semaphore.Granted, Fence: l.fence}
	case e.Permits > total:
		return semaphore.Answer{Outcome: semaphore.TooMany}
	case waits >= 0:
		return semaphore.Answer{Outcome: semaphore.Queued, Ticket: m.queue[waits].ticket}
	case m.used()+e.Permits <= total && (len(m.queue) == 0 || e.Ticket != 0 && e.Ticket < m.queue[0].ticket):
		return semaphore.Answer{Outcome: semaphore.Granted, Fence: m.grant(e.ID, e.Permits, now, b.LeaseMicros, label).fence}
	case !e.Wait:
		return semaphore.Answer{Outcome: semaphore.Refused}
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
	return semaphore.Answer{Outcome: semaphore.Queued, Ticket: ticket}
}

// Holders lists who holds permits at a time.
func (m *Model) Holders(now int64) (all []semaphore.Holder) {
	for _, l := range m.held {
		if l.expires > now {
			all = append(all, semaphore.Holder{ID: l.id, Permits: l.permits, Fence: l.fence, Label: l.label,
				Since: time.UnixMicro(l.since), Expires: time.UnixMicro(l.expires)})
		}
	}
	return all
}

// Drop forgets what is held, as a place does that has lost it.
func (m *Model) Drop() { m.held = nil }

// Waiting is how many wait for permits.
func (m *Model) Waiting() int { return len(m.queue) }

// Stats is what semaphore.Backend says.
func (m *Model) Stats(now int64) semaphore.Stats {
	s := semaphore.Stats{Permits: m.limit.Permits, Version: m.limit.Version, Waiting: len(m.queue)}
	for _, h := range m.Holders(now) {
		s.Used += h.Permits
	}
	return s
}

// Lose forgets everything, as a place does that has lost it; but time does not go back.
func (m *Model) Lose() { *m = Model{Seen: m.Seen} }
