package group

import (
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// expireFlight stops waiting for a batch whose deadline has passed. mu must be held.
func (p *Participant) expireFlight(f *flight, now int64) {
	f.late, p.queue.at = true, now
	err := p.timeoutError(f)
	for i, q := range f.rows {
		if q.flight = nil; q.state == asking {
			p.queue.failOrRetry(q, err, now)
		}
		f.rows[i] = nil
	}
	for m := range f.own {
		for i, o := range f.own[m] {
			if o.refund != nil {
				p.members[m].settle(o.refund, false, err)
			} else if o.call != nil {
				p.queue.fail(o.call, err)
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
		if q == nil || q.state != asking || q.promised || q.flight == nil && !p.queue.asks(q, now) {
			return false
		}
		since := max(q.sent, p.since)
		if mono-since < p.Timeout {
			oldest = min(oldest, since)
			return false
		}
		p.queue.fail(q, p.timeoutError(p.flight))
		return true
	}
	if f := p.flight; f != nil {
		oldest = min(oldest, f.began)
		for _, q := range f.rows {
			expire(q)
		}
	}
	p.queue.asking = slices.DeleteFunc(p.queue.asking, expire)
	p.startDeadline(p.Timeout - (mono - oldest))
	p.setAlarm(now)
}

// setAlarm sets the timer for the first due time, the end of a timeout, the next attempt, and the next read. mu must be held.
func (p *Participant) setAlarm(now int64) {
	next := p.queue.next(p.busy)
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
