package group

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Land implements [transport.Source].
func (p *Participant) Land(f *flight, _ struct{}, err error, late bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	mono := clock.Mono()
	now := p.local.NowAt(mono)
	if !late {
		p.flight, p.busy = nil, false
	}
	switch {
	case err == transport.ErrLate:
		p.expireFlight(f, now)
	case err != nil: // a panic of a client
		for k := range f.parts {
			if leg := &f.parts[k]; !leg.decided && leg.err == nil {
				leg.err = err
			}
		}
		p.deliver(f, now, mono)
	default:
		p.deliver(f, now, mono)
		if !f.late {
			f.reset()
			p.spare = f
		}
	}
	p.dispatch(now)
}

// deliver hands out the reply to a batch. mu must be held.
func (p *Participant) deliver(f *flight, now int64, mono time.Duration) {
	p.queue.at = now
	if !f.late {
		p.since = mono
	}
	for k := range f.parts {
		leg := &f.parts[k]
		for _, m := range p.Parts[k] {
			p.members[m].keepSession(&f.batch[m], f.late)
			switch {
			case leg.decided:
				out := &f.batch[m].Outcome
				if !f.late {
					if !p.Immediate {
						p.members[m].heard(out, f.began, mono)
					}
					p.queue.shift(m, p.members[m].observe(out, receivedAt(out, now), now-f.local), now)
				}
				p.settleOwn(f, m, f.batch[m].Requests, nil)
			case leg.err != nil:
				p.members[m].report(leg.err)
				p.settleOwn(f, m, nil, p.Failure(m, leg.err))
			default: // it was not asked, because an earlier part has failed
				p.requeueOwn(f, m)
			}
		}
	}
	var again []*Call
	first := -1
	for i, q := range f.rows {
		if q != nil {
			q.flight = nil
		}
		live := q != nil && q.state == asking
		if live && !q.reserves && !f.late && p.dueAtOnce(f, i, q) {
			q.decided = cmp.Or(q.decided, now)
			q.due = q.decided
			for m := range p.members {
				if p.Choice == permit.All || m == q.member {
					p.members[m].floor.Spend(q.permits * p.members[m].Weight)
				}
			}
			p.queue.end(q, done, nil)
			continue
		}
		g := p.granted(f, i, now)
		switch failed := p.legError(f, i); {
		case g != nil && live && !f.late:
			p.noteOutcome(f, q, i)
			q.decided = cmp.Or(q.decided, receivedAt(&f.batch[p.Parts[0][0]].Outcome, now))
			p.queue.give(q, g, now)
		case g != nil && f.late:
			p.queue.giveBack(g, nil)
		case g != nil:
			p.queue.free(g, nil, now)
		case !live:
		case failed != nil:
			p.queue.failOrRetry(q, failed, now)
		default:
			if p.noteOutcome(f, q, i); p.refuseOrKeep(f, q, i, now) {
				if again = append(again, q); first < 0 {
					first = i
				}
			}
		}
	}
	if len(again) > 0 {
		p.queue.askAgain(again)
		p.refused(f, first, now)
	} else if !f.late {
		p.askSooner(f)
	}
	p.view.show(f, p.members)
	p.queue.release(now)
}

// receivedAt returns the time of a decision by the limiter's clock, or later.
func receivedAt(out *permit.Outcome, now int64) int64 {
	if out.Local != 0 {
		return out.Local
	}
	return now
}

// dueAtOnce reports whether a joint request was granted by one part, and is due. For permit.Any it sets the member.
func (p *Participant) dueAtOnce(f *flight, i int, q *Call) bool {
	if len(p.Parts) > 1 || !f.parts[0].decided {
		return false
	}
	granted := 0
	for m := range p.members {
		if g := &f.request(m, i).Grant; g.OK {
			if g.WaitMicros > 0 {
				return false
			}
			if granted++; p.Choice == permit.Any {
				q.member = m
			}
		}
	}
	return granted > 0
}

// settleOwn ends the requests of a member alone. err is nil if there is a reply. mu must be held.
func (p *Participant) settleOwn(f *flight, m int, requests []permit.Request, err error) {
	for i, o := range f.own[m] {
		ok := err == nil && requests[i].Grant.OK
		switch {
		case o.refund != nil:
			p.members[m].settle(o.refund, ok, err)
		case o.call == nil:
		case err != nil:
			p.queue.fail(o.call, err)
		case !ok:
			p.queue.fail(o.call, p.Members[m].Limiter.Overflow(o.call.settles[m]))
		default:
			if o.call.settles[m] = 0; !slices.ContainsFunc(o.call.settles, func(n int64) bool { return n != 0 }) {
				p.queue.end(o.call, done, nil)
			}
		}
	}
}

// requeueOwn keeps the requests of a member alone for the next batch. mu must be held.
func (p *Participant) requeueOwn(f *flight, m int) {
	for _, o := range f.own[m] {
		if o.refund != nil {
			p.members[m].giveBack(o.refund)
		} else if o.call != nil && o.call.state == asking && !slices.Contains(p.queue.asking, o.call) {
			p.queue.asking = append(p.queue.asking, o.call)
		}
	}
}

// legError returns the error because of which a joint request was not decided; nil if there is none. mu must be held.
func (p *Participant) legError(f *flight, i int) (err error) {
	for k := range f.parts {
		switch leg := &f.parts[k]; {
		case leg.decided && p.Choice == permit.Any:
			return nil // the others count
		case leg.err != nil && err == nil && (leg.rows == nil || len(p.Parts) == 1 || slices.Contains(leg.rows, i)):
			err = p.Failure(p.Parts[k][0], leg.err)
		}
	}
	return err
}

// noteOutcome keeps what was decided about the members' parts of a reservation. mu must be held.
func (p *Participant) noteOutcome(f *flight, q *Call, i int) {
	if q.promised || !q.reserves {
		return
	}
	q.members = make([]Outcome, len(p.members))
	for k := range f.parts {
		if !f.parts[k].decided {
			continue
		}
		j, asked := f.find(k, i)
		for _, m := range p.Parts[k] {
			out, o := &f.batch[m].Outcome, &q.members[m]
			if o.Seen = (engine.Seen{Terms: out.Bucket.Terms, Balance: out.Bucket.Balance, Now: out.NowMicros}); asked {
				r := f.request(m, j)
				o.Wait, o.Taken, o.Refused = r.Grant.WaitMicros, r.Grant.OK, refuses(r)
			}
		}
	}
}

// refuses reports whether a member could not grant its part of a joint request in time.
func refuses(r *permit.Request) bool {
	return !r.Grant.OK && (r.Grant.Overflow || r.Grant.WaitMicros > r.MaxWaitMicros)
}

// refuseOrKeep ends a call that was refused. It reports whether the call waits instead, because its permits lie beyond the look-ahead. mu must be
// held.
func (p *Participant) refuseOrKeep(f *flight, q *Call, i int, now int64) (waits bool) {
	final, some, wait, by := false, true, int64(-1), -1
	for k := range f.parts {
		j, ok := f.find(k, i)
		if !ok {
			continue
		}
		for _, m := range p.Parts[k] {
			r := f.request(m, j)
			if !refuses(r) {
				continue
			}
			if r.Grant.Overflow && p.Choice == permit.All {
				p.queue.fail(q, p.Members[m].Limiter.Overflow(r.Permits))
				return false
			}
			ends := f.ends[i]&(1<<m) != 0
			final, some = final || ends, some && ends
			if w := r.Grant.WaitMicros; by < 0 || p.Choice == permit.All && w > wait || p.Choice == permit.Any && w < wait {
				wait, by = w, m
			}
		}
	}
	if p.Choice == permit.Any {
		final = some
	}
	if q.member = by; !final || q.promised {
		q.decided = cmp.Or(q.decided, now)
		return true
	}
	if q.decided != 0 {
		wait += now - q.came
	}
	q.decided = now
	p.queue.refuse(q, max(0, wait))
	return false
}

// refused plans the next attempt for the waiters, whose first was refused. mu must be held.
func (p *Participant) refused(f *flight, first int, now int64) {
	pause, beyond, least := 0.0, int64(0), int64(math.MaxInt64)
	for k := range f.parts {
		j, ok := f.find(k, first)
		if !ok {
			continue
		}
		for _, m := range p.Parts[k] {
			r := f.request(m, j)
			over := r.Grant.WaitMicros - r.MaxWaitMicros
			if r.Grant.OK || over <= 0 {
				continue
			}
			p.members[m].heldBack(r.Permits, now)
			if pause = max(pause, float64(engine.Horizon(p.members[m].effective()))/20); over > beyond {
				p.queue.refuser = m
			}
			beyond, least = max(beyond, over), min(least, over)
		}
	}
	if p.Choice == permit.Any {
		beyond = least
	}
	chance := rand.Float64()
	pause = max(pause, 50_000)
	beyond = beyond * 2 / 3
	p.queue.postpone(now+min(max(int64(pause*(0.5+chance)), beyond+int64(pause*chance)), retryMost), now)
}

// retryMost is the longest pause before waiters ask again.
const retryMost = 500_000

// askSooner makes the waiters ask at once if a reply shows that the first could be granted now. mu must be held.
func (p *Participant) askSooner(f *flight) {
	if p.queue.askAt == 0 {
		return
	}
	head := p.queue.head()
	if head == nil {
		p.queue.askAt = 0
		return
	}
	fits := 0
	for k := range f.parts {
		if !f.parts[k].decided {
			return
		}
		for _, m := range p.Parts[k] {
			out, t := &f.batch[m].Outcome, p.members[m].effective()
			n := head.permits * p.Members[m].Weight
			if wait, ok := engine.Wait(t, out.Bucket.Balance, out.NowMicros, n); ok && wait <= engine.LookAhead(t, p.Members[m].Limiter.Coordinator.Class, n, p.queue.ahead(m, p.queue.at)) {
				fits++
			}
		}
	}
	if fits == len(p.members) || fits > 0 && p.Choice == permit.Any {
		p.queue.askAt = 0
	}
}
