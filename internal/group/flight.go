package group

import (
	"slices"
	"sync/atomic"
	"time"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// own is a request of one member alone.
type own struct {
	refund *refund
	call   *Call // a settlement
}

// request returns what is sent to a member.
func (o own) request(member int) permit.Request {
	if o.refund != nil {
		return permit.Request{Op: permit.GiveBack, Back: o.refund.give}
	}
	return permit.Request{Op: permit.Settle, Permits: o.call.settles[member]}
}

// flight is a batch from its departure to its reply.
type flight struct {
	began time.Duration
	local int64
	until time.Duration
	late  bool
	heeds bool // grants wait for their due times, so a penalty of any member matters
	rows  []*Call
	ends  []uint64 // of each row: the members whose refusal is final
	own   [][]own
	batch []permit.Batch // of each member: its own requests, then the joint ones
	looks []look
	all   []int // the numbers of all rows
	parts []leg
	asked atomic.Int32 // the part that is asked
}

// newFlight returns an empty flight for the parts of a participant.
func newFlight(c *Config) *flight {
	n := len(c.Members)
	f := &flight{own: make([][]own, n), batch: make([]permit.Batch, n), looks: make([]look, n), parts: make([]leg, len(c.Parts))}
	for k := range f.parts {
		f.parts[k].members = c.Parts[k]
	}
	return f
}

// request returns a member's request of the j-th row that its leg was asked for.
func (f *flight) request(member, j int) *permit.Request {
	return &f.batch[member].Requests[len(f.own[member])+j]
}

// find returns the position of a row in a leg. It reports false if the leg has not decided the row.
func (f *flight) find(k, row int) (j int, ok bool) {
	leg := &f.parts[k]
	if !leg.decided || len(leg.rows) == len(f.rows) {
		return row, leg.decided
	}
	return slices.BinarySearch(leg.rows, row)
}

// reset empties a flight for reuse.
func (f *flight) reset() {
	clear(f.rows)
	f.rows, f.ends, f.all = f.rows[:0], f.ends[:0], f.all[:0]
	f.asked.Store(0)
	for m := range f.own {
		clear(f.own[m])
		f.own[m] = f.own[m][:0]
	}
	for k := range f.parts {
		f.parts[k].rows, f.parts[k].decided, f.parts[k].err = nil, false, nil
	}
}

// leg is the part of a flight that one store decides.
type leg struct {
	members []int
	group   permit.Group
	rows    []int // the joint requests, by their numbers
	decided bool
	err     error
}

// Depart implements [transport.Source].
func (p *Participant) Depart() (f *flight, deadline time.Time, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.local.Now()
	f = p.build(now)
	p.flight, p.busy = f, f != nil
	p.setAlarm(now)
	if f == nil {
		p.since = 0
		return nil, time.Time{}, false
	}
	return f, clock.At(f.began + p.Timeout), true
}

// build returns the next batch, or nil if there is nothing to send. mu must be held.
func (p *Participant) build(now int64) *flight {
	p.queue.release(now)
	p.failDown(now)
	if !p.sends(now) {
		return nil
	}
	n := len(p.members)
	f := p.spare
	if p.spare = nil; f == nil {
		f = newFlight(&p.Config)
	}
	f.local, f.began, f.heeds = now, 0, len(p.queue.owned) > 0
	if !p.Immediate {
		f.began = clock.Mono()
	}
	for i := range p.members {
		m := &p.members[i]
		f.own[i] = m.addRefunds(f.own[i])
		f.looks[i] = m.look(p.queue.ahead(i, now))
	}
	for _, q := range p.queue.asking {
		if q.settles == nil || len(f.own[0]) >= permit.MaxBatch/n/2 {
			continue
		}
		for m, more := range q.settles {
			if more != 0 {
				f.own[m] = append(f.own[m], own{call: q})
			}
		}
		q.flight, q.sent = f, max(q.sent, p.since)
	}
	p.prepare(f)
	rest := p.queue.asking[:0]
	more, budget := true, permit.MaxBatch/n/2
	for _, q := range p.queue.asking {
		waits := !q.reserves || q.promised
		switch {
		case q.flight == f: // a settlement
		case q.settles != nil || len(f.rows) >= budget || !p.queue.asks(q, now) || waits && !more:
			rest = append(rest, q)
		default:
			if ok := p.addRow(f, q, now); waits {
				more = ok
			}
			q.flight, q.sent = f, max(q.sent, p.since)
		}
	}
	clear(p.queue.asking[len(rest):])
	p.queue.asking = rest
	p.limit(f)
	return f
}

// ahead returns how much of a member's future time this process owns, in microseconds. mu must be held.
func (p *Participant) ahead(member int, now int64) (micros int64) {
	for _, q := range p.queue.owned {
		if part := &q.grant.parts[member]; part.taken {
			micros += max(0, min(part.spent, part.due-now))
		}
	}
	return micros
}

// addRow adds a joint request to a batch. It reports whether there is any use in asking for another waiter. mu must be held.
func (p *Participant) addRow(f *flight, q *Call, now int64) (more bool) {
	remaining := q.remaining(now)
	ends := uint64(0)
	more = true
	for i := range p.members {
		m, l := &p.members[i], &f.looks[i]
		r := permit.Request{Permits: q.permits * m.Weight, MaxWaitMicros: remaining}
		if !q.reserves || q.promised {
			most, room := l.bound(r.Permits)
			if remaining <= most && !q.promised {
				ends |= 1 << i
			}
			r.MaxWaitMicros = min(remaining, most)
			more = more && room
		} else {
			ends |= 1 << i
		}
		f.batch[i].Requests = append(f.batch[i].Requests, r)
	}
	f.all = append(f.all, len(f.rows))
	f.rows, f.ends = append(f.rows, q), append(f.ends, ends)
	return more
}

// limit sets when the last caller of a batch gives up. mu must be held.
func (p *Participant) limit(f *flight) {
	until := f.began
	for _, q := range f.rows {
		last := q.sent + p.Timeout
		if q.deadline != 0 {
			last = min(last, q.deadline)
		}
		until = max(until, last)
	}
	if len(f.rows) == 0 || slices.ContainsFunc(f.own, func(of []own) bool { return len(of) > 0 }) {
		until = f.began + p.Timeout
	}
	f.until = min(until, f.began+p.Timeout)
	for i := range f.batch {
		f.batch[i].Until = clock.At(f.until)
	}
}

// prepare begins the batches of the members with their own requests. mu must be held.
func (p *Participant) prepare(f *flight) {
	for i := range p.members {
		b := &f.batch[i]
		p.members[i].begin(b, &p.Config, p.micros)
		for _, o := range f.own[i] {
			b.Requests = append(b.Requests, o.request(i))
		}
	}
}

// send implements [transport.Trips].Send.
func (p *Participant) send(_ string, items []*transport.Item[*flight, struct{}]) {
	for _, i := range items {
		i.Batch.run(&p.Config)
		i.Answer(struct{}{}, nil)
	}
}

// run has the parts decide a batch, one after the other. It needs no lock: nobody else touches what it uses until the batch lands.
func (f *flight) run(c *Config) {
	rows := f.all
	for k := range f.parts {
		leg := &f.parts[k]
		if leg.rows = rows; k > 0 && len(rows) == 0 && !f.heeds && !f.needs(leg.members) {
			continue
		}
		leg.group.Choice, leg.group.Joint, leg.group.Members = c.Choice, len(rows), leg.group.Members[:0]
		for _, m := range leg.members {
			b := &f.batch[m]
			if own := len(f.own[m]); len(rows) < len(f.all) {
				for j, i := range rows {
					b.Requests[own+j] = b.Requests[own+i]
				}
				b.Requests = b.Requests[:own+len(rows)]
			}
			leg.group.Members = append(leg.group.Members, b)
		}
		f.asked.Store(int32(k))
		if leg.err = c.Decide(clock.At(f.until), k, &leg.group); leg.err != nil {
			if c.Choice == permit.All { // for permit.Any another part may grant it
				rows = f.all[:0] // the later parts decide the requests of their members alone
			}
			continue
		}
		leg.decided = true
		if k+1 < len(f.parts) {
			rows = f.after(k, c.Choice)
		}
	}
}

// needs reports whether members have requests of their own.
func (f *flight) needs(members []int) bool {
	return slices.ContainsFunc(members, func(m int) bool { return len(f.own[m]) > 0 })
}

// after returns the joint requests that the legs after k are asked for.
func (f *flight) after(k int, choice permit.Choice) (next []int) {
	for j, i := range f.parts[k].rows {
		granted, wait := false, int64(0)
		for _, m := range f.parts[k].members {
			if g := &f.request(m, j).Grant; g.OK {
				granted, wait = true, max(wait, g.WaitMicros)
			}
		}
		switch {
		case choice == permit.All && granted:
			next = append(next, i)
		case choice == permit.Any && (!granted || wait > 0):
			if next = append(next, i); granted { // only an earlier due time is of use
				f.bound(k+1, i, wait-1)
			}
		}
	}
	return next
}

// bound limits the wait of a row in the legs from k on, which have all rows as yet.
func (f *flight) bound(k, row int, wait int64) {
	for ; k < len(f.parts); k++ {
		for _, m := range f.parts[k].members {
			r := f.request(m, row)
			r.MaxWaitMicros = min(r.MaxWaitMicros, wait)
		}
	}
}
