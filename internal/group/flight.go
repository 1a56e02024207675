package group

import (
	"errors"
	"iter"
	"slices"
	"sync/atomic"
	"time"

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
	return permit.Request{Op: permit.Settle, Permits: o.call.settles[member], Origin: o.call.of.origin(member)}
}

// flight is a batch from its departure to its reply. It asks the stores of the participant one after the other.
//
// Invariants: a row is a joint request. Each member's batch has the member's own requests first, and then all rows, until run leaves those out that an
// earlier leg has refused. run is the only method that needs no lock.
type flight struct {
	began time.Duration // clock.Mono; 0 if all stores are Immediate
	local int64         // when it was built, in limiter microseconds
	until time.Duration // when its last caller gives up, clock.Mono
	late  bool          // its deadline has passed, so others may land before it
	heeds bool          // grants wait for their due times, so a penalty of any member matters
	rows  []*Call       // nil for a call that no longer waits for the flight
	ends  []uint64      // of each row: the members whose refusal is final
	most  []int64       // of each row: the longest wait of use when it was asked for
	all   []int         // the numbers of all rows
	own   [][]own       // of each member: its own requests
	batch []permit.Batch
	looks []look // of each member
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
func (f *flight) find(leg *leg, row int) (j int, ok bool) {
	if !leg.decided || len(leg.rows) == len(f.rows) {
		return row, leg.decided
	}
	return slices.BinarySearch(leg.rows, row)
}

// decided returns the members that have decided a row, and their requests.
func (f *flight) decided(row int) iter.Seq2[int, *permit.Request] {
	return func(yield func(int, *permit.Request) bool) {
		for k := range f.parts {
			j, ok := f.find(&f.parts[k], row)
			if !ok {
				continue
			}
			for _, m := range f.parts[k].members {
				if !yield(m, f.request(m, j)) {
					return
				}
			}
		}
	}
}

// reset empties a flight for reuse.
func (f *flight) reset() {
	clear(f.rows)
	f.rows, f.ends, f.most, f.all = f.rows[:0], f.ends[:0], f.most[:0], f.all[:0]
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
	members []int // by their indexes
	group   permit.Group
	rows    []int // the joint requests, by their numbers
	decided bool
	err     error
}

// blamed returns the member that is the reason for the leg's error: the first, unless it concerns one member alone.
func (l *leg) blamed() int {
	var fault *permit.Fault
	if errors.As(l.err, &fault) {
		return l.members[fault.Member]
	}
	return l.members[0]
}

// fill adds all that a batch has room for: the refunds and settlements of each member, then the joint requests of the queue in order. since is when
// callers began to wait for the stores.
func (f *flight) fill(l *queue, since time.Duration) {
	f.heeds = len(l.owned) > 0
	l.returnSpare(f.local)
	for i := range l.members {
		m := &l.members[i]
		f.own[i] = m.addRefunds(f.own[i])
		f.looks[i] = m.look(l.ahead(i, f.local))
	}
	f.addSettlements(l, since)
	for i := range l.members {
		b := &f.batch[i]
		l.members[i].begin(b, l.config)
		for _, o := range f.own[i] {
			b.Requests = append(b.Requests, o.request(i))
		}
	}
	f.addCalls(l, since)
	f.limit(l.config.Timeout)
}

// budget returns how many calls a batch asks for at most, and how many settlements besides: a store accepts no more requests.
func (f *flight) budget() int { return permit.MaxBatch / len(f.own) / 2 }

// addSettlements adds the settlements of the queue, which addCalls removes from it.
func (f *flight) addSettlements(l *queue, since time.Duration) {
	settled, most := 0, f.budget()
	for _, q := range l.asking {
		if q.state == left || q.settles == nil || settled >= most {
			continue
		}
		settled++
		for m, more := range q.settles {
			if more != 0 {
				f.own[m] = append(f.own[m], own{call: q})
			}
		}
		q.depart(f, since)
	}
}

// addCalls moves the calls that a batch asks for from the queue to its rows.
func (f *flight) addCalls(l *queue, since time.Duration) {
	more, budget := true, f.budget()
	l.keep(func(q *Call) bool {
		waits := q.settles != nil || q.bounded()
		switch {
		case q.flight == f: // a settlement
			return false
		case q.settles != nil || len(f.rows) >= budget || !l.asks(q, f.local) || waits && !more:
			return true
		}
		if ok := f.addRow(q, l.members, l.config.Choice); waits {
			more = ok
		}
		q.depart(f, since)
		return false
	})
}

// addRow adds a joint request. It reports whether there is any use in asking for another waiter.
func (f *flight) addRow(q *Call, members []member, choice permit.Choice) (more bool) {
	remaining := q.remaining(f.local)
	ends := uint64(0)
	more = choice == permit.All
	for i := range members {
		r := permit.Request{Permits: q.permits * members[i].Weight, MaxWaitMicros: remaining}
		if q.bounded() {
			most, room := f.looks[i].bound(r.Permits)
			if remaining <= most && !q.promised {
				ends |= 1 << i
			}
			r.MaxWaitMicros = min(remaining, most)
			if choice == permit.All {
				more = more && room
			} else {
				more = more || room // any member may grant it
			}
		} else {
			if q.timeout < permit.MaxExact { // one without a timeout asks for its place, whenever that is
				r.MaxWaitMicros = min(remaining, f.looks[i].reach(r.Permits))
			}
			ends |= 1 << i
		}
		f.batch[i].Requests = append(f.batch[i].Requests, r)
	}
	f.all = append(f.all, len(f.rows))
	f.rows, f.ends, f.most = append(f.rows, q), append(f.ends, ends), append(f.most, remaining)
	return more
}

// limit sets when the last caller of a batch gives up. A batch that is decided later must take nothing.
func (f *flight) limit(timeout time.Duration) {
	until := f.began
	for _, q := range f.rows {
		last := q.sent + timeout
		if q.deadline != 0 {
			last = min(last, q.deadline)
		}
		until = max(until, last)
	}
	if len(f.rows) == 0 || slices.ContainsFunc(f.own, func(of []own) bool { return len(of) > 0 }) {
		until = f.began + timeout
	}
	f.until = min(until, f.began+timeout)
	for i := range f.batch {
		f.batch[i].Until = clock.At(f.until)
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

// fail sets the error of the legs that have no result.
func (f *flight) fail(err error) {
	for k := range f.parts {
		if leg := &f.parts[k]; !leg.decided && leg.err == nil {
			leg.err = err
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

// inFlight has the batch on its way to the stores. The participant's mu must be held for all methods.
//
// Invariant: at most one batch is in flight, besides those whose deadline has passed.
type inFlight struct {
	busy   bool            // a batch is about to be built, or in flight
	since  time.Duration   // when callers began to wait for the stores, clock.Mono; 0 if none wait
	flight *flight         // nil while the batch is not built yet, or none is in flight
	spare  *flight         // for reuse
	buffer []chan struct{} // for callers.collect, never nil

	config *Config
}

// begin records that a batch is about to be built.
func (t *inFlight) begin() {
	if t.busy = true; t.since == 0 {
		t.since = clock.Mono()
	}
}

// next returns an empty flight.
func (t *inFlight) next(now int64) *flight {
	f := t.spare
	if t.spare = nil; f == nil {
		f = newFlight(t.config)
	}
	if f.local, f.began = now, 0; !t.config.Immediate {
		f.began = clock.Mono()
	}
	return f
}

// departed records the batch that was built, or nil if there was nothing to send.
func (t *inFlight) departed(f *flight) {
	if t.flight, t.busy = f, f != nil; f == nil {
		t.since = 0
	}
}

// landed records that the batch in flight has a result, or that its deadline has passed.
func (t *inFlight) landed() { t.flight, t.busy = nil, false }

// reuse takes back a flight that has landed.
func (t *inFlight) reuse(f *flight) {
	f.reset()
	t.spare = f
}
