package semaphore

import (
	"errors"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// Land implements batch.Source.
func (s *source) Land(f *flight, report *store.Report, err error, late bool) {
	c := s.coordinator
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	if s.flight == f {
		s.flight = nil
	}
	var partial *store.Partial
	err = wrap(c.name, err)
	if !late {
		c.transport.note(err)
		c.health.landed(f.size(), now-f.sent, err)
	}
	switch {
	case late:
		s.settleLate(f, report, err, now)
	case errors.As(err, &partial):
		s.partly(f, partial, now)
	case err != nil:
		s.failed(f, err, now)
	case report.Late:
		s.putBack(f, report, now)
	default:
		s.settle(f, report, now)
	}
	c.setAlarm(now)
}

// putBack queues everything in a batch again, because the store found it past its deadline. The store's clock has stepped; the view learns
// the new time first. The coordinator's mu must be held.
func (s *source) putBack(f *flight, report *store.Report, now time.Duration) {
	c := s.coordinator
	c.view.server.Heard(report.Now, f.sent, now)
	c.waiters.putBack(f.enter, f.resent)
	c.releases.putBack(f.releases)
	c.limits.putBack(f.change)
	c.held.renewAgain(f.renew, now)
}

// settle hands out the results of a batch. The coordinator's mu must be held.
func (s *source) settle(f *flight, report *store.Report, now time.Duration) {
	c := s.coordinator
	c.health.recovered()
	c.waiters.apart = false
	c.view.update(report, f.sent, now, c.heartbeat)
	if f.change != nil {
		f.change.settle(c.name, report)
	}
	for i, l := range f.releases {
		l.was = report.Left[i]
		l.finish(nil)
	}
	for i, p := range f.renew {
		c.held.renewed(p, report.Renewed[i], f.sent)
	}
	if report.Fresh {
		c.view.grants = 0
		if c.waiters.notOf(f) { // the store has lost all waiters that are not of this batch
			c.waiters.askAgain(f)
		}
	}
	for i, r := range f.enter {
		c.entered(r, report.Entered[i], f.sent, now)
	}
	s.admittedHere(f, report, now)
	if c.view.lost(report.Notified, f.resent > 0, now, c.heartbeat) {
		c.waiters.askAgain(nil)
		c.listener.stop() // it starts again on another connection: this one may hang
	}
	if !c.closed && len(c.waiters.sent) > 0 {
		c.listener.listen(now)
	}
}

// entered handles the result of a request. c.mu must be held.
func (c *coordinator) entered(r *request, a store.Result, sent, now time.Duration) {
	switch {
	case r.done && a.Outcome == store.Granted && c.held.permits[r.id] == nil:
		c.releases.add(r.id, now, c.lease) // its caller has given up, and the release may have been decided before the request
	case r.done:
	case a.Outcome == store.Granted:
		c.grant(r, a.Fence, sent+c.lease, now)
	case a.Outcome == store.Queued && !r.wait: // its timeout passed on the way
		c.fail(r, nil)
	case a.Outcome == store.Queued:
		r.queued, r.ticket = true, a.Ticket
	case a.Outcome == store.TooMany:
		c.waiters.finish(r, nil, tooMany(c.name, r.n, c.view.permits))
	default:
		c.waiters.finish(r, nil, nil)
	}
}

// admittedHere handles the grants to waiters of this process that its own batch has admitted. The coordinator's mu must be held.
func (s *source) admittedHere(f *flight, report *store.Report, now time.Duration) {
	for _, g := range report.Grants {
		s.coordinator.admitted(g, f.sent+time.Duration(g.Expires-report.Now)*time.Microsecond, now)
	}
}

// settleLate releases the permits of a batch whose report came after its deadline. The coordinator's mu must be held.
func (s *source) settleLate(f *flight, report *store.Report, err error, now time.Duration) {
	c := s.coordinator
	var entered []store.Result
	if partial := (*store.Partial)(nil); errors.As(err, &partial) {
		entered = partial.Entered
	} else if err == nil && !report.Late {
		entered = report.Entered
	}
	for i, a := range entered {
		r := f.enter[i]
		if o := a.Outcome; r.done && (o == store.Granted || o == store.Queued) && c.held.permits[r.id] == nil {
			c.releases.add(r.id, now, c.lease)
		}
	}
	if err == nil && !report.Late {
		s.admittedHere(f, report, now)
	}
}

// partly hands out the results of a batch that was decided in part, and queues the rest again. The coordinator's mu must be held.
func (s *source) partly(f *flight, p *store.Partial, now time.Duration) {
	c := s.coordinator
	c.health.undecided(now, now-f.sent)
	c.limits.putBack(f.change)
	for i, was := range p.Left {
		if l := f.releases[i]; was == store.Holding || p.Fresh {
			l.was = was
			l.finish(nil)
			f.releases[i] = nil
		}
	}
	c.releases.putBack(slices.DeleteFunc(f.releases, func(l *release) bool { return l == nil }))
	c.held.renewAgain(f.renew, now)
	for i, ok := range p.Renewed {
		if ok || p.Fresh {
			c.held.renewed(f.renew[i], ok, f.sent)
		}
	}
	var off []*request
	for i, r := range f.enter {
		switch {
		case i >= len(p.Entered), p.Entered[i].Outcome == store.Queued && r.wait:
			off = append(off, r)
		default:
			c.entered(r, p.Entered[i], f.sent, now)
		}
	}
	c.waiters.putOff(off)
	if p.Fresh && c.waiters.notOf(f) {
		c.waiters.askAgain(nil)
	}
	c.view.pause(c.health.notUntil)
	if !c.closed && len(c.waiters.sent) > 0 {
		c.listener.listen(now)
	}
}

// failed handles a batch that failed. It is unknown whether the store has decided it. The coordinator's mu must be held.
func (s *source) failed(f *flight, err error, now time.Duration) {
	c := s.coordinator
	c.health.failed(now)
	if f.change != nil {
		f.change.finish(err)
	}
	for _, l := range f.releases {
		l.finish(err)
		if now < l.until && !c.closed && !errors.Is(err, ErrCorruptState) { // sent again, although no caller waits
			c.releases.readd(&release{id: l.id, until: l.until}, now)
		}
	}
	c.held.renewAgain(f.renew, now)
	for i, r := range f.enter {
		if !r.done && (i >= f.resent || !r.wait) {
			c.fail(r, err)
		}
	}
	c.waiters.askAgain(nil) // the other waiters too: their grants may have been in the lost report
	c.view.pause(c.health.notUntil)
}

// grant gives a request its permit, whose lease lasts until ends. c.mu must be held.
func (c *coordinator) grant(r *request, fence int64, ends, now time.Duration) {
	if r.n == 0 {
		c.waiters.finish(r, nil, nil)
		return
	}
	deadline := ends - c.held.margin
	if now >= deadline { // the process was stopped, and the lease is nearly over; the request still has its ticket
		c.waiters.askAgainOne(r)
		return
	}
	p := &Permit{engine: c, permits: r.n, fence: fence, since: now, more: &more{id: r.id, renewed: ends - c.lease, deadline: deadline}}
	c.held.add(p)
	c.waiters.finish(r, p, nil)
}

// admitted handles a grant from the queue. c.mu must be held.
func (c *coordinator) admitted(g store.Grant, ends, now time.Duration) {
	r := c.waiters.sent[g.ID]
	switch {
	case r == nil || r.done:
		if c.held.permits[g.ID] == nil && g.Outcome == store.Granted { // granted after the request was withdrawn
			c.releases.add(g.ID, now, c.lease)
		}
	case g.Outcome == store.TooMany:
		c.waiters.finish(r, nil, tooMany(c.name, r.n, c.view.permits))
	default:
		c.grant(r, g.Fence, ends, now)
	}
}
