package group

import (
	"math"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// overdue reports whether the permits of a grant lapse, because they were due more than 100 ms ago.
func (p *Participant) overdue(g *grant, now int64) bool {
	return p.local.System() && now-g.due > schedule.Tolerated
}

// release ends the calls that are due, and those whose timeouts have ended. Permits that are overdue by more than 100 ms lapse, because this process
// was stopped. mu must be held.
func (p *Participant) release(now int64) {
	if p.nextDue != 0 && p.nextDue <= now {
		p.nextDue = 0
		var lapsed []*Call
		kept := p.owned[:0]
		for _, q := range p.owned {
			switch {
			case q.grant.due > now:
				kept = append(kept, q)
				p.nextDue = sooner(p.nextDue, q.grant.due)
			case p.overdue(q.grant, now):
				lapsed = append(lapsed, q)
			default:
				p.end(q, done, nil)
			}
		}
		clear(p.owned[len(kept):])
		p.owned = kept
		for _, q := range lapsed {
			g := q.grant
			q.grant, q.state = nil, asking
			p.giveBack(g, nil)
		}
		if len(lapsed) > 0 {
			p.asking, p.askAt = append(lapsed, p.asking...), 0
		}
	}
	if p.nextEnd != 0 && p.nextEnd <= now {
		p.expireTimeouts(now)
	}
}

// expireTimeouts refuses the waiters whose timeouts have ended. mu must be held.
func (p *Participant) expireTimeouts(now int64) {
	p.nextEnd = 0
	p.asking = slices.DeleteFunc(p.asking, func(q *Call) bool {
		switch {
		case q.until == math.MaxInt64:
			return false
		case q.until <= now && q.decided != 0: // the store has refused it once; a newcomer with timeout 0 is asked for
			q.blame(p.refuser, now-q.came, len(p.members))
			p.refuse(q, now-q.came)
			return true
		case q.until > now:
			p.nextEnd = sooner(p.nextEnd, q.until)
		}
		return false
	})
	var late []*Call
	for _, q := range p.owned {
		if q.until != math.MaxInt64 && q.grant.due > q.until { // a penalty has moved its permits
			late = append(late, q)
		}
	}
	for _, q := range late {
		p.owned = remove(p.owned, q)
		g := q.grant
		p.refuse(q, g.due-q.came) // its members still have the outcome of the grant
		p.free(g, nil)
	}
}

// sooner returns the earlier of two times, where 0 stands for never.
func sooner(a, b int64) int64 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// expireFlight stops waiting for a batch whose deadline has passed. mu must be held.
func (p *Participant) expireFlight(f *flight, now int64) {
	f.late, p.at = true, now
	err := p.timeoutError(f)
	for i, q := range f.rows {
		if q.flight = nil; q.state == asking {
			p.failOrRetry(q, err, now)
		}
		f.rows[i] = nil
	}
	for m := range f.own {
		for i, o := range f.own[m] {
			if o.refund != nil {
				p.members[m].settle(o.refund, false, err)
			} else if o.call != nil {
				p.fail(o.call, err)
			}
			f.own[m][i] = own{}
		}
	}
	p.suspect()
}

// startDeadline makes sure that the timer of the deadlines runs. mu must be held.
func (p *Participant) startDeadline(d time.Duration) {
	switch {
	case p.ticking:
		return
	case p.deadline == nil:
		p.deadline = time.AfterFunc(d, p.checkDeadlines)
	default:
		p.deadline.Reset(d)
	}
	p.ticking = true
}

// checkDeadlines fails the calls that have waited for the store timeout, by the system's clock.
func (p *Participant) checkDeadlines() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ticking = false
	if !p.busy {
		return
	}
	mono, now := clock.Mono(), p.local.Now()
	oldest := mono
	expire := func(q *Call) bool {
		if q == nil || q.state != asking || q.promised || q.flight == nil && !p.asks(q, now) {
			return false
		}
		since := max(q.sent, p.since)
		if mono-since < p.Timeout {
			oldest = min(oldest, since)
			return false
		}
		p.fail(q, p.timeoutError(p.flight))
		return true
	}
	if f := p.flight; f != nil {
		oldest = min(oldest, f.began)
		for _, q := range f.rows {
			expire(q)
		}
	}
	p.asking = slices.DeleteFunc(p.asking, expire)
	p.startDeadline(p.Timeout - (mono - oldest))
	p.setAlarm(now)
}

// setAlarm sets the timer for the first due time, the end of a timeout, the next attempt, and the next read. mu must be held.
func (p *Participant) setAlarm(now int64) {
	next := sooner(p.nextDue, p.nextEnd)
	if !p.busy && p.listens() {
		next = sooner(next, p.at+engine.ListenMicros)
		if len(p.asking) > 0 && p.askAt != 0 {
			next = sooner(next, p.askAt)
		}
	}
	if next == p.alarmAt {
		return
	}
	p.alarmAt = next
	switch wait := time.Duration(next-now) * time.Microsecond; {
	case next == 0:
		p.alarm.Stop()
	case p.alarm == nil:
		p.alarm = p.Clock.AfterFunc(wait, p.ring)
	default:
		p.alarm.Reset(wait)
	}
	if !p.local.System() && next != 0 && p.local.Now() >= next {
		p.alarm.Reset(0) // the clock of a test may have jumped past the timer before it was set
	}
}

func (p *Participant) ring() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.alarmAt = 0
	p.dispatch(p.local.Now())
}
