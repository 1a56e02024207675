package semaphore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// flight is a batch, and what it was made of.
type flight struct {
	batch    Batch
	sent     time.Duration
	enter    []*request
	resent   int // the first so many were sent before
	releases []*release
	renew    []*Permit
	change   *limitChange
}

// size is how many requests it has.
func (f *flight) size() int {
	n := len(f.enter) + len(f.releases) + len(f.renew)
	if f.change != nil {
		n++
	}
	return n
}

// Depart implements batch.Source.
func (c *coordinator) Depart() (*flight, time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	f := c.build(now)
	if f == nil {
		c.setAlarm(now)
		return nil, time.Time{}, false
	}
	c.flight = f
	return f, clock.At(now + c.timeout), true
}

// Land implements batch.Source.
func (c *coordinator) Land(f *flight, report *Report, err error, late bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	if c.flight == f {
		c.flight = nil
	}
	if !late {
		c.answered(f, err, now)
	}
	switch {
	case late:
		c.settleLate(f, report, err, now)
	case err != nil:
		c.failed(f, fmt.Errorf("semaphore %.80q: %w", c.name, err), now)
	case report.Late:
		c.putBack(f, report, now)
	default:
		c.settle(f, report, now)
	}
	c.setAlarm(now)
}

// build makes the next batch; nil: there is nothing to send. mu is held.
func (c *coordinator) build(now time.Duration) *flight {
	f := &flight{sent: now}
	calm := c.health.calm(now)
	if len(c.changes) > 0 {
		f.change, c.changes = c.changes[0], c.changes[1:]
	}
	f.releases = c.releases.take(now, calm)
	if calm && c.heard.check(now, c.heartbeat, len(c.waiters.sent)) {
		c.waiters.askAgain(nil)
	}
	f.enter, f.resent = c.waiters.take(calm)
	if calm {
		f.renew = c.held.due(now, c.lease)
	}
	heartbeat := calm && len(c.waiters.sent) > 0 && c.heard.due(now)
	if f.size() == 0 && !heartbeat {
		return nil
	}
	c.write(f)
	return f
}

// write writes down what a flight asks. mu is held.
func (c *coordinator) write(f *flight) {
	b := &f.batch
	b.Process, b.Label, b.LeaseMicros, b.Permits, b.Limit = c.process, c.label, c.lease.Microseconds(), c.permits, c.heard.limit
	if c.heard.server.Known() {
		b.Deadline = c.heard.server.Earliest(f.sent + c.timeout)
	}
	if f.change != nil {
		b.SetPermits, b.AddPermits = f.change.set, f.change.add
	}
	for _, l := range f.releases {
		b.Leave = append(b.Leave, l.id)
	}
	for _, p := range f.renew {
		b.Renew = append(b.Renew, p.more.id)
	}
	if len(f.enter) > 0 {
		b.Enter = make([]Entry, 0, len(f.enter))
	}
	for _, r := range f.enter {
		b.Enter = append(b.Enter, Entry{ID: r.id, Permits: r.n, Ticket: r.ticket, Wait: r.wait, Label: r.label})
		c.waiters.depart(r, f)
	}
	if c.waiters.patient() {
		b.PatienceMicros, b.AliveMicros = 3*c.heartbeat.Microseconds(), c.heartbeat.Microseconds()
	}
}

// nextBatch is when there will be something to send, though nobody asks for anything more: 0: never; now or earlier: now. mu is held.
func (c *coordinator) nextBatch(now time.Duration) time.Duration {
	if len(c.waiters.fresh) > 0 || len(c.changes) > 0 {
		return now
	}
	var next time.Duration
	if len(c.releases.list) > 0 || len(c.waiters.resend) > 0 {
		next = now
	}
	next = earlier(next, c.held.nextRenewal())
	if len(c.waiters.sent) > 0 {
		next = earlier(next, c.heard.next())
	}
	if next != 0 {
		next = max(next, c.health.notUntil)
	}
	return next
}

// putBack sends a batch once more that came too late by the backend's clock: that has stepped, and is known now. mu is held.
func (c *coordinator) putBack(f *flight, report *Report, now time.Duration) {
	c.heard.server.Heard(report.Now, f.sent, now)
	c.waiters.putBack(f.enter, f.resent)
	c.releases.putBack(f.releases)
	if f.change != nil && f.change.awaited() {
		c.changes = append([]*limitChange{f.change}, c.changes...)
	}
	if len(f.renew) > 0 {
		c.held.renewAt = now
	}
}

// settle hands out the answers of a batch. mu is held.
func (c *coordinator) settle(f *flight, report *Report, now time.Duration) {
	c.health.notUntil = 0
	c.heard.answer(report, f.sent, now, c.heartbeat)
	if f.change != nil && report.Unchanged {
		f.change.tell(outOfRange(c.name, report.Permits, f.change.add))
	} else if f.change != nil {
		f.change.tell(nil)
	}
	for i, l := range f.releases {
		l.was = report.Left[i]
		l.tell(nil)
	}
	for i, p := range f.renew {
		c.renewed(p, report.Renewed[i], f.sent)
	}
	if report.Fresh {
		c.heard.grants = 0
		if c.waiters.notOf(f) { // the backend has forgotten all who are not of this batch
			c.waiters.askAgain(f)
		}
	}
	for i, r := range f.enter {
		c.entered(r, report.Entered[i], f.sent, now)
	}
	c.admittedHere(f, report, now)
	if c.heard.lost(report.Told, f.resent > 0, now, c.heartbeat) {
		c.waiters.askAgain(nil)
		c.listener.stop() // on another connection: this one may hang
	}
	c.listen(now)
}

// renewed hears whether a permit was renewed by a batch that was sent then. mu is held.
func (c *coordinator) renewed(p *Permit, ok bool, sent time.Duration) {
	switch {
	case c.held.permits[p.more.id] != p: // released meanwhile
	case ok:
		p.more.renewed, p.more.deadline = sent, sent+c.lease-c.margin
		c.held.add(p, c.lease)
	default:
		c.end(p, ErrLost)
	}
}

// entered hears the answer to a request. mu is held.
func (c *coordinator) entered(r *request, a Answer, sent, now time.Duration) {
	switch {
	case r.done && a.Outcome == Granted && c.held.permits[r.id] == nil:
		c.releases.add(r.id, now, c.lease) // given up, and its release may have come first
	case r.done:
	case a.Outcome == Granted:
		c.grant(r, a.Fence, sent+c.lease, now)
	case a.Outcome == Queued && !r.wait: // it has become impatient on the way
		c.abandon(r)
		c.waiters.finish(r, nil, nil)
	case a.Outcome == Queued:
		r.queued, r.ticket = true, a.Ticket
	case a.Outcome == TooMany:
		c.waiters.finish(r, nil, tooMany(c.name, r.n, c.heard.permits))
	default:
		c.waiters.finish(r, nil, nil)
	}
}

// admittedHere hears of the waiters of this process that its own batch has admitted. mu is held.
func (c *coordinator) admittedHere(f *flight, report *Report, now time.Duration) {
	for _, g := range report.Grants {
		c.admitted(g, f.sent+time.Duration(g.Expires-report.Now)*time.Microsecond, now)
	}
}

// settleLate gives back what a batch has taken that was taken for lost. mu is held.
func (c *coordinator) settleLate(f *flight, report *Report, err error, now time.Duration) {
	if err != nil || report.Late {
		return
	}
	for i, r := range f.enter {
		if o := report.Entered[i].Outcome; r.done && (o == Granted || o == Queued) && c.held.permits[r.id] == nil {
			c.releases.add(r.id, now, c.lease)
		}
	}
	c.admittedHere(f, report, now)
}

// failed deals with a batch of which it is unknown whether it was decided. mu is held.
func (c *coordinator) failed(f *flight, err error, now time.Duration) {
	c.health.notUntil = now + min(c.heartbeat/4, 50*time.Millisecond)
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	if f.change != nil {
		f.change.tell(err)
	}
	for _, l := range f.releases {
		l.tell(err)
		if now < l.until && !c.closed && !errors.Is(err, ErrCorrupt) { // once more, though nobody waits
			c.releases.readd(&release{id: l.id, until: l.until}, now)
		}
	}
	if len(f.renew) > 0 {
		c.held.renewAt = now
	}
	for i, r := range f.enter {
		if !r.done && (i >= f.resent || !r.wait) {
			c.abandon(r)
			c.waiters.finish(r, nil, err)
		}
	}
	c.waiters.askAgain(nil) // the others too: it may have admitted any of them, and have said so in the answer alone
	c.heard.pause(c.health.notUntil)
}

// grant gives a request its permit, whose lease ends then. mu is held.
func (c *coordinator) grant(r *request, fence int64, ends, now time.Duration) {
	if r.n == 0 {
		c.waiters.finish(r, nil, nil)
		return
	}
	deadline := ends - c.margin
	if now >= deadline { // its lease is nearly over: this process was stopped. It has still its ticket
		c.waiters.askAgainOne(r)
		return
	}
	p := &Permit{engine: c, permits: r.n, fence: fence, since: now, more: &more{id: r.id, renewed: ends - c.lease, deadline: deadline}}
	c.held.add(p, c.lease)
	c.waiters.finish(r, p, nil)
}

// admitted is what the backend tells of a waiter. mu is held.
func (c *coordinator) admitted(g Grant, ends, now time.Duration) {
	r := c.waiters.sent[g.ID]
	switch {
	case r == nil || r.done:
		if c.held.permits[g.ID] == nil && g.Outcome == Granted { // it has left, but too late
			c.releases.add(g.ID, now, c.lease)
		}
	case g.Outcome == TooMany:
		c.waiters.finish(r, nil, tooMany(c.name, r.n, c.heard.permits))
	default:
		c.grant(r, g.Fence, ends, now)
	}
}
