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
	permits       int // that somebody has set
	held          []lease
	queue         []waiter // by ticket
	idle          []waiter
	waiting       map[string]*process
	labels        map[string]string // of processes
}

type lease struct {
	id      string
	permits int
	fence   int64
	expires int64
	since   int64
	process string
}

type waiter struct {
	id, process string
	permits     int
	ticket      int64
}

type process struct{ until, told int64 }

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
		m.waiting, m.labels = map[string]*process{}, map[string]string{}
	}
	m.labels[b.Process] = b.Label
	if b.SetPermits != 0 {
		m.permits = b.SetPermits
	}
	total := m.permits
	if total == 0 {
		total = b.Permits
	}
	r := &semaphore.Report{Now: now, Permits: total}
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
	told := m.admit(b, now, total, r)
	for _, e := range b.Enter {
		r.Entered = append(r.Entered, m.enter(b, e, now, total))
	}
	delete(m.waiting, b.Process)
	if b.PatienceMicros != 0 {
		m.waiting[b.Process] = &process{now + b.PatienceMicros, r.Told}
	}
	for _, l := range m.held {
		if r.Earliest == 0 || l.expires < r.Earliest {
			r.Earliest = l.expires
		}
	}
	return r, told, nil
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

// admit lets in who waits, and returns whom to tell.
func (m *Model) admit(b *semaphore.Batch, now int64, total int, r *semaphore.Report) (told []Told) {
	listens := func(name string) bool {
		if name == b.Process {
			return b.PatienceMicros != 0
		}
		p := m.waiting[name]
		if p != nil && p.until < now {
			delete(m.waiting, name)
			return false
		}
		return p != nil
	}
	tell := func(w waiter, g semaphore.Grant) {
		if w.process == b.Process {
			r.Grants = append(r.Grants, g)
			return
		}
		m.waiting[w.process].told++
		told = append(told, Told{w.process, g})
	}
	for len(m.queue) > 0 {
		w := m.queue[0]
		alive := listens(w.process)
		if alive && w.permits <= total && m.used()+w.permits > total {
			break
		}
		m.queue = m.queue[1:]
		if alive && w.permits > total {
			tell(w, semaphore.Grant{ID: w.id, Outcome: semaphore.TooMany})
		} else if alive {
			l := m.grant(w.process, w.id, w.permits, now, b.LeaseMicros)
			tell(w, semaphore.Grant{ID: w.id, Outcome: semaphore.Granted, Fence: l.fence, Expires: l.expires})
		}
	}
	if len(m.held) == 0 {
		for _, w := range m.idle {
			if listens(w.process) {
				tell(w, semaphore.Grant{ID: w.id, Outcome: semaphore.Granted})
			}
		}
		m.idle = nil
	}
	return told
}

func (m *Model) grant(process, id string, permits int, now, lasts int64) lease {
	m.fence = max(m.fence+1, now)
	l := lease{id, permits, m.fence, now + lasts, now, process}
	m.held = append(m.held, l)
	return l
}

func (m *Model) enter(b *semaphore.Batch, e semaphore.Entry, now int64, total int) semaphore.Answer {
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
		return semaphore.Answer{Outcome: semaphore.Granted, Fence: m.grant(b.Process, e.ID, e.Permits, now, b.LeaseMicros).fence}
	case !e.Wait:
		return semaphore.Answer{Outcome: semaphore.Refused}
	}
	ticket := e.Ticket
	if ticket == 0 {
		ticket = max(m.ticket+1, now)
	}
	m.ticket = max(m.ticket, ticket)
	m.queue = append(m.queue, waiter{e.ID, b.Process, e.Permits, ticket})
	slices.SortFunc(m.queue, func(a, b waiter) int {
		return cmp.Or(cmp.Compare(a.ticket, b.ticket), cmp.Compare(a.id, b.id))
	})
	return semaphore.Answer{Outcome: semaphore.Queued, Ticket: ticket}
}

// Holders lists who holds permits at a time.
func (m *Model) Holders(now int64) (all []semaphore.Holder) {
	for _, l := range m.held {
		if l.expires > now {
			all = append(all, semaphore.Holder{ID: l.id, Permits: l.permits, Fence: l.fence, Label: m.labels[l.process],
				Since: time.UnixMicro(l.since), Expires: time.UnixMicro(l.expires)})
		}
	}
	return all
}

// Drop forgets what is held, as a place does that has lost it.
func (m *Model) Drop() { m.held = nil }

// Waiting is how many wait for permits.
func (m *Model) Waiting() int { return len(m.queue) }
