package slidingwindow

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/waiting"
)

// Settle implements waiting.Machine. A late reply has admitted nothing: its script ran after the deadline.
func (m *machine) Settle(b *flight, reply []string, how waiting.Landing, err error, moment waiting.Moment, out *waiting.Out) {
	if how == waiting.Late {
		return
	}
	now, requests := m.now(moment.Local), len(b.calls)
	m.full, m.flying, m.lookAt = span{}, nil, 0
	if b.alone {
		m.putOff = moment.Mono + apart
		m.admitted.refunds, b.refunds = append(m.admitted.refunds, b.refunds...), nil
	}
	if how == waiting.Replied {
		err = m.read(b, reply, now)
	}
	m.noteTrip(b, requests, err, moment, out)
	if err != nil {
		m.asked = 0
	}
	if how == waiting.Failed || how == waiting.Overdue { // an outage, which decides them
		m.putBack(b.calls)
		return
	}
	m.broken = err != nil && !errors.Is(err, ErrStoreUnavailable)
	m.queue.settle(b.calls...)
	if err == nil {
		m.deliver(b, now, out)
		return
	}
	m.fail(b.calls, err, out)
	if m.broken { // every policy returns the error
		m.view.valid = false
		m.fail(m.line.takeAll(), err, out)
	}
}

// putBack queues calls of a batch again, before all others.
func (m *machine) putBack(calls []*call) {
	rest := calls[:0:0]
	for _, c := range calls {
		if c.cancelled {
			m.queue.settle(c)
			m.back(c)
			continue
		}
		rest = append(rest, c)
	}
	m.queue.putBack(rest)
}

// fail ends calls with an error.
func (m *machine) fail(calls []*call, err error, out *waiting.Out) {
	for _, c := range calls {
		m.back(c)
		m.end(c, verdict{}, err, out)
	}
}

// read updates the view from a reply, or returns what is wrong with it; then the calls of the batch are those that fail.
func (m *machine) read(b *flight, reply []string, now int64) error {
	if len(reply) == 2 {
		if micros, ok := integer(reply[1], -maxInteger, 2*maxInteger); ok {
			switch reply[0] {
			case "late":
				m.view.server.Observe(micros, b.sent, now)
				if micros < m.view.counts.seen {
					m.view.counts.advance(&m.rule, micros)
				}
				m.look = len(b.calls) == 0
				return m.resend(b, fmt.Errorf("%w: limiter %.80q: %w: the script ran too late", ErrStoreUnavailable, m.name, ErrStoreTimeout))
			case "behind":
				behind := time.Duration(micros) * time.Microsecond
				return m.resend(b, fmt.Errorf("%w: limiter %.80q: %v behind the latest time seen in key %s", ErrClock, m.name, behind, m.key))
			}
		}
	}
	return m.adoptReply(b, reply, now)
}

// resend queues the calls of a batch again whose script decided nothing: it ran after its deadline, perhaps by a clock that has stepped, or its
// time was too far in the past. The view now has the right time. Calls to which it has happened before fail with err.
func (m *machine) resend(b *flight, err error) error {
	var rest, tired []*call
	for _, c := range b.calls {
		if c.tries++; c.tries > 1 {
			tired = append(tired, c)
		} else {
			rest = append(rest, c)
		}
	}
	m.putBack(rest)
	m.admitted.refunds = append(m.admitted.refunds, b.refunds...)
	if b.calls = tired; len(tired) == 0 {
		return nil
	}
	return err
}

// adoptReply updates the view from a reply.
func (m *machine) adoptReply(b *flight, reply []string, received int64) error {
	a, ok := decodeReply(b, reply)
	if !ok {
		return fmt.Errorf("%w: limiter %.80q: key %s: unexpected reply %.120q", ErrCorruptState, m.name, m.key, reply)
	}
	b.granted, b.at = a.granted, a.seen
	k, r, own := &m.view, &m.rule, &m.admitted
	switch {
	case !k.server.Known(): // until now this process went by its own clock
		own.shift(r, a.clock-b.sent)
	case a.epoch == k.epoch:
		own.shift(r, k.back-a.back)
	}
	k.counts.load(r, a.seen, a.parts)
	own.advance(r, a.seen)
	lost := k.server.Known() && a.epoch != k.epoch // the state, by Redis
	if b.report != nil || lost {
		own.doubtful = nil
	}
	if lost {
		own.lost(r, b.told())
	}
	k.valid, k.epoch, k.back = true, a.epoch, a.back
	k.server.Observe(a.clock, b.sent, received)
	m.adopt(a.limit, a.version)
	if len(b.refunds) > 0 {
		m.lookAt = 0
	}
	return nil
}

// decodedReply is a reply of lua/apply.lua.
type decodedReply struct {
	state           // epoch 0: there is none
	clock   int64   // the server's
	granted []int64 // how many of each ask
}

// decodeReply decodes the reply to a batch.
func decodeReply(b *flight, reply []string) (a decodedReply, ok bool) {
	if len(reply) != 3 {
		return a, false
	}
	clock, seen, _ := strings.Cut(reply[0], " ")
	var ok1, ok2 bool
	a.clock, ok1 = integer(clock, -maxInteger, maxInteger)
	a.seen, ok2 = integer(seen, -maxInteger, maxInteger)
	granted := strings.Fields(reply[2])
	if !ok1 || !ok2 || len(granted) != len(b.asked) {
		return a, false
	}
	for i, text := range granted {
		g, ok := integer(text, 0, b.asked[i].times)
		if !ok {
			return a, false
		}
		a.granted = append(a.granted, g)
	}
	if reply[1] != "" {
		now := a.seen
		if a.state, ok = parse(reply[1]); !ok {
			return a, false
		}
		a.seen = now
	}
	return a, true
}

// deliver gives the calls of a batch their results.
func (m *machine) deliver(b *flight, now int64, out *waiting.Out) {
	own, unused, k := int64(0), int64(0), 0
	var refused []*call
	for _, c := range b.calls {
		v := verdict{true, ByStore, b.at - m.admitted.counts.shifted}
		if c.n > 0 {
			for b.asked[k].times == 0 {
				k++
			}
			b.asked[k].times--
			v.ok = b.granted[k] > 0
		}
		var err error
		switch {
		case c.limit > 0 && m.limit != c.limit && m.version == maxInteger:
			err = m.name.badPermits("limit", c.limit, "no version 2^53, which no other follows")
		case c.n > 0 && v.ok:
			b.granted[k]--
			if own += c.n; c.cancelled {
				unused += c.n
			}
		case c.n > m.limit: // it was lowered meanwhile
			err = m.name.tooMany(c.n, m.limit)
		case c.n > 0:
			refused = append(refused, c)
			continue
		}
		m.back(c)
		m.end(c, v, err, out)
	}
	if len(refused) > 0 {
		m.lookAt = now + minLook.Microseconds()
		m.refuseAll(refused, ByStore, out)
	}
	if own > 0 {
		m.admitted.counts.push(&m.rule, part{b.at, own}) // beyond 2^37 nothing was granted
	}
	if unused > 0 {
		m.admitted.refund(&m.rule, b.at, unused)
	}
}

// adopt adopts a limit from a reply, unless its version is 0.
func (m *machine) adopt(limit, version int64) {
	before := m.limit
	if version == 0 {
		return
	}
	if m.limit, m.version = m.newest(limit, version); m.limit != before {
		m.lookAt = 0
	}
}

// newest returns which of two limits is in force: this process's or the given one.
func (m *machine) newest(limit, version int64) (int64, int64) {
	if version < m.version || version == m.version && version > 0 && limit > m.limit {
		return m.limit, m.version
	}
	return limit, version
}
