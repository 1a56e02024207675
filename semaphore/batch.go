package semaphore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"
)

// flight is a batch, and what it was made of.
type flight struct {
	batch   *Batch
	sent    time.Duration
	enter   []*request
	resent  int // the first so many were sent before
	leaves  []*leave
	renew   []*Permit
	setting *order
}

// build makes the next batch; nil: there is nothing to send. mu is held.
func (s *shared) build(now time.Duration) *flight {
	f := &flight{sent: now}
	if len(s.settings) > 0 {
		f.setting, s.settings = s.settings[0], s.settings[1:]
	}
	wanted := func(r *request) bool { return !r.done }
	if len(s.held) == 0 {
		s.renewAt = 0
	}
	calm := now >= s.notUntil
	if calm {
		f.leaves, s.leaves = cut(s.leaves, func(l *leave) bool { return l.done != nil || now < l.until })
		f.enter, s.again = cut(s.again, wanted)
		f.resent = len(f.enter)
	} else {
		awaited := func(l *leave) bool { return l.done != nil }
		f.leaves = slices.DeleteFunc(slices.Clone(s.leaves), func(l *leave) bool { return !awaited(l) })
		s.leaves = slices.DeleteFunc(s.leaves, awaited)
	}
	fresh := s.queue
	fresh, s.queue = cut(fresh, wanted)
	f.enter = append(f.enter, fresh...)
	if calm && s.renewAt != 0 && now >= s.renewAt {
		s.renewAt = 0
		for _, p := range s.held {
			if due := p.more.renewed + s.lease/3; due > now {
				s.renewAt = earlier(s.renewAt, due)
			} else if f.renew = append(f.renew, p); len(f.renew) == maxBatch {
				s.renewAt = now
				break
			}
		}
	}
	beat := calm && len(s.waiting) > 0 && (now >= s.beatAt || s.lookAt != 0 && now >= s.lookAt)
	if len(f.enter)+len(f.leaves)+len(f.renew) == 0 && f.setting == nil && !beat {
		return nil
	}
	b := &Batch{
		Process: s.process, Label: s.label, LeaseMicros: s.lease.Microseconds(), Permits: s.own,
	}
	if s.server.Known() {
		b.Deadline = s.server.Earliest(now + s.timeout)
	}
	if f.setting != nil {
		b.SetPermits = f.setting.n
	}
	for _, l := range f.leaves {
		b.Leave = append(b.Leave, l.id)
	}
	for _, p := range f.renew {
		b.Renew = append(b.Renew, p.more.id)
	}
	for _, r := range f.enter {
		b.Enter = append(b.Enter, Entry{ID: r.id, Permits: r.n, Ticket: r.ticket, Wait: r.wait})
		s.waiting[r.id], r.flight = r, f
	}
	for _, r := range s.waiting {
		if r.wait {
			b.PatienceMicros = 3 * s.beat.Microseconds()
			break
		}
	}
	f.batch = b
	return f
}

// next is when there will be something to send, though nobody asks for anything more: 0: never; now or earlier: now. mu is held.
func (s *shared) next(now time.Duration) time.Duration {
	if len(s.queue) > 0 || len(s.settings) > 0 {
		return now
	}
	var next time.Duration
	if len(s.leaves) > 0 || len(s.again) > 0 {
		next = now
	}
	if len(s.held) > 0 {
		next = earlier(next, s.renewAt)
	}
	if len(s.waiting) > 0 {
		next = earlier(earlier(next, s.beatAt), s.lookAt)
	}
	if next != 0 {
		next = max(next, s.notUntil)
	}
	if s.lingers > now {
		next = earlier(next, s.lingers)
	}
	return next
}

// cut takes up to a batch's worth of those that are wanted off the front.
func cut[T any](list []T, wanted func(T) bool) (head, rest []T) {
	for i, x := range list {
		if len(head) == maxBatch {
			return head, list[i:]
		}
		if wanted(x) {
			head = append(head, x)
		}
	}
	return head, nil
}

// earlier of two times, of which 0 is none.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// settle hands out the answers of a batch. mu is held.
func (s *shared) settle(f *flight, report *Report, err error, now time.Duration) {
	if err == nil && report.Late { // its clock has stepped; now that it is known, once more
		s.server.Heard(report.Now, f.sent, now)
		s.again = append(f.enter[:f.resent:f.resent], s.again...)
		s.queue = append(f.enter[f.resent:], s.queue...)
		s.leaves = append(f.leaves, s.leaves...)
		if f.setting != nil {
			s.settings = append([]*order{f.setting}, s.settings...)
		}
		if len(f.renew) > 0 {
			s.renewAt = now
		}
		return
	}
	if err != nil {
		s.failed(f, fmt.Errorf("semaphore %.80q: %w", s.name, err), now)
		return
	}
	s.notUntil = 0
	s.server.Heard(report.Now, f.sent, now)
	s.known = report.Permits
	s.beatAt = now + s.beat
	s.lookAt = 0
	if report.Earliest != 0 {
		s.lookAt = now + time.Duration(report.Earliest-report.Now)*time.Microsecond + time.Millisecond + rand.N(10*time.Millisecond)
	}
	if f.setting != nil {
		close(f.setting.done)
	}
	for i, l := range f.leaves {
		if l.was = report.Left[i]; l.done != nil {
			close(l.done)
		}
	}
	for i, p := range f.renew {
		switch {
		case s.held[p.more.id] != p: // released meanwhile
		case report.Renewed[i]:
			p.more.renewed, p.more.deadline = f.sent, f.sent+s.lease-s.margin
			s.renewAt = earlier(s.renewAt, p.more.renewed+s.lease/3)
		default:
			delete(s.held, p.more.id)
			p.end(ErrLost)
		}
	}
	if report.Fresh {
		s.heard = 0
		for _, r := range s.waiting {
			if r.flight != f { // the backend has forgotten all who are not of this batch
				s.resend(f)
				break
			}
		}
	}
	for i, r := range f.enter {
		a := report.Entered[i]
		switch {
		case r.done && a.Outcome == Granted && s.held[r.id] == nil:
			s.leave(r.id, now+s.lease) // given up, and its leave may have come first
		case r.done:
		case a.Outcome == Granted:
			s.grant(r, a.Fence, f.sent+s.lease, now)
		case a.Outcome == Queued && !r.wait: // it has become impatient on the way
			s.abandon(r)
			r.finish(nil, nil)
		case a.Outcome == Queued:
			r.ticket = a.Ticket
		default:
			delete(s.waiting, r.id)
			if a.Outcome == TooMany {
				r.finish(nil, tooMany(s.name, r.n, report.Permits))
			} else {
				r.finish(nil, nil)
			}
		}
	}
	for _, g := range report.Grants {
		s.admitted(g, f.sent+time.Duration(g.Expires-report.Now)*time.Microsecond, now)
	}
	switch { // a grant that was sent long enough ago for a whole beat, and has not arrived, is lost
	case report.Told <= s.heard:
		s.missed = 0
	case s.missed == 0 || s.missed > report.Told:
		s.missed = report.Told
	case s.heard < s.missed && f.resent == 0:
		s.heard, s.missed = report.Told, 0
		s.resend(nil)
		if s.listener != nil { // on another connection: this one may hang
			s.listener()
			s.listener = nil
		}
	}
	s.listen()
	if len(s.waiting) > 0 && !s.closed {
		s.lingers = now + linger
	}
}

// settleLate gives back what a batch has taken that was taken for lost. mu is held.
func (s *shared) settleLate(f *flight, report *Report, err error, now time.Duration) {
	if err != nil || report.Late {
		return
	}
	for i, r := range f.enter {
		if r.done && report.Entered[i].Outcome == Granted && s.held[r.id] == nil {
			s.leave(r.id, now+s.lease)
		}
	}
	for _, g := range report.Grants {
		s.admitted(g, f.sent+time.Duration(g.Expires-report.Now)*time.Microsecond, now)
	}
}

// failed deals with a batch of which it is unknown whether it was decided. mu is held.
func (s *shared) failed(f *flight, err error, now time.Duration) {
	s.notUntil = now + min(s.beat/4, 50*time.Millisecond)
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	if f.setting != nil {
		f.setting.err = err
		close(f.setting.done)
	}
	for _, l := range f.leaves {
		if l.done != nil {
			l.err = err
			close(l.done)
		}
		if now < l.until && !s.closed && !errors.Is(err, ErrCorrupt) { // once more, though nobody waits
			s.leave(l.id, l.until)
		}
	}
	if len(f.renew) > 0 {
		s.renewAt = now
	}
	for i, r := range f.enter {
		if !r.done && (i >= f.resent || !r.wait) {
			s.abandon(r)
			r.finish(nil, err)
		}
	}
	s.resend(nil)                   // the others too: it may have admitted any of them, and have said so in the answer alone
	if errors.Is(err, ErrTimeout) { // those behind it have waited as long
		s.queue = slices.DeleteFunc(s.queue, func(r *request) bool {
			if !r.done && now-r.since >= s.timeout {
				r.finish(nil, err)
			}
			return r.done
		})
	}
	s.beatAt = max(s.beatAt, s.notUntil)
	s.lookAt = max(s.lookAt, s.notUntil)
}

// grant gives a request its permit, whose lease ends then. mu is held.
func (s *shared) grant(r *request, fence int64, ends, now time.Duration) {
	delete(s.waiting, r.id)
	if r.n == 0 {
		r.finish(nil, nil)
		return
	}
	p := &Permit{engine: s, permits: r.n, fence: fence, more: &more{id: r.id, renewed: ends - s.lease, deadline: ends - s.margin}}
	if now >= p.more.deadline { // its lease is nearly over: this process was stopped. It has still its ticket
		s.waiting[r.id] = r
		s.again = append(s.again, r)
		return
	}
	s.held[r.id] = p
	s.renewAt = earlier(s.renewAt, p.more.renewed+s.lease/3)
	s.watch(p.more.deadline, now)
	r.finish(p, nil)
}

// admitted is what the backend tells of a waiter. mu is held.
func (s *shared) admitted(g Grant, ends, now time.Duration) {
	r := s.waiting[g.ID]
	switch {
	case r == nil || r.done:
		if s.held[g.ID] == nil && g.Outcome == Granted { // it has left, but too late
			s.leave(g.ID, now+s.lease)
		}
	case g.Outcome == TooMany:
		delete(s.waiting, r.id)
		r.finish(nil, tooMany(s.name, r.n, s.known))
	default:
		s.grant(r, g.Fence, ends, now)
	}
}
