package slidingwindow

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
)

// landed is the outcome of a batch: the calls to wake and the events to report when mu is free.
type landed struct {
	done   []*call
	err    error
	down   bool          // an outage began
	policy FailurePolicy // in force until the outage ends
	ended  *outage.Outage
}

// settle handles a reply and decides the calls of its batch. mu must be held.
func (c *coordinator) settle(b *flight, reply []string, err error) (l landed) {
	received := c.now()
	c.full.Store(nil)
	l.policy = c.policy.failure
	if b.alone {
		c.putOff = clock.Mono() + apart
		c.admitted.refunds, b.refunds = append(c.admitted.refunds, b.refunds...), nil
	}
	if err == nil {
		var again bool
		if again, err = c.resend(b, reply, received); again {
			return l
		}
	}
	if err == nil {
		err = c.adoptReply(b, reply, received)
	} else {
		err = c.wrap(err)
	}
	if err != nil {
		c.asked = 0
	}
	c.queue.settle(b.calls...)
	l.done, l.err = b.calls, err
	switch {
	case err == nil:
		if l.ended = c.redis.replied(); l.ended != nil {
			c.waiters.wake() // there may be more room than a share had
		}
		c.deliver(b)
	case errors.Is(err, ErrStoreUnavailable):
		l.down = !c.redis.down()
		l.done = c.fallBack(b, err, received)
	default: // a repair is needed, so every policy returns the error
		l.ended = c.redis.outage.ProbeAnswered()
		c.view.valid, c.redis.broken = false, true
		for _, q := range b.calls {
			q.err = err
		}
	}
	return l
}

// resend handles a reply whose script decided nothing: it ran after its deadline, perhaps by a clock that has stepped, or its time was too
// far in the past. The view now has the right time, so the calls are queued again. A call to which it has happened before is not: then
// resend returns an error, and only such calls are left in the batch. mu must be held.
func (c *coordinator) resend(b *flight, reply []string, received int64) (again bool, err error) {
	if len(reply) != 2 {
		return false, nil
	}
	micros, ok := integer(reply[1], -maxInteger, 2*maxInteger)
	switch k := &c.view; {
	case !ok:
		return false, nil
	case reply[0] == "late":
		err = fmt.Errorf("%w: limiter %.80q: %w: the script ran too late", ErrStoreUnavailable, c.name, ErrStoreTimeout)
		k.server.Observe(micros, b.sent, received)
		if micros < k.counts.seen {
			k.counts.advance(&c.rule, micros)
		}
	case reply[0] == "behind":
		err = fmt.Errorf("%w: limiter %.80q: %v behind the latest time seen in key %s", ErrClock, c.name, time.Duration(micros)*time.Microsecond, c.key)
	default:
		return false, nil
	}
	var rest, tired []*call
	for _, q := range b.calls {
		switch q.tries++; {
		case q.cancelled: // no permits were taken for it
			c.queue.settle(q)
		case q.tries > 1:
			tired = append(tired, q)
		default:
			rest = append(rest, q)
		}
	}
	c.queue.putBack(rest)
	c.admitted.refunds = append(c.admitted.refunds, b.refunds...)
	if len(tired) > 0 {
		b.calls = tired
		return false, err
	}
	c.look = len(rest) == 0 && reply[0] == "late"
	return true, nil
}

// adoptReply updates the view from a reply. mu must be held.
func (c *coordinator) adoptReply(b *flight, reply []string, received int64) error {
	a, ok := decodeReply(b, reply)
	if !ok {
		return fmt.Errorf("%w: limiter %.80q: key %s: unexpected reply %.120q", ErrCorruptState, c.name, c.key, reply)
	}
	b.granted, b.at = a.granted, a.seen
	k, r, own := &c.view, &c.rule, &c.admitted
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
		own.reported()
	}
	if lost {
		own.lost(r, b.told())
	}
	k.valid, k.epoch, k.back = true, a.epoch, a.back
	k.server.Observe(a.clock, b.sent, received)
	c.adopt(a.limit, a.version)
	if len(b.refunds) > 0 {
		c.waiters.wake()
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

// deliver gives the calls of a batch their results. mu must be held.
func (c *coordinator) deliver(b *flight) {
	own, unused, k := int64(0), int64(0), 0
	for _, q := range b.calls {
		q.verdict = verdict{true, ByStore, b.at - c.admitted.counts.shifted}
		if q.n == 0 {
			continue
		}
		for b.asked[k].times == 0 {
			k++
		}
		b.asked[k].times--
		if q.verdict.ok = b.granted[k] > 0; q.verdict.ok {
			b.granted[k]--
			own += q.n
			if q.cancelled {
				unused += q.n
			}
		} else if limit := c.limit.Load(); q.n > limit { // it was lowered meanwhile
			q.err = c.tooMany(q.n, limit)
		}
	}
	if own > 0 {
		c.admitted.counts.push(&c.rule, part{b.at, own}) // beyond 2^37 nothing was granted
	}
	if unused > 0 {
		c.admitted.refund(&c.rule, b.at, unused)
	}
}

// Land implements batch.Source.
func (s *source) Land(b *flight, reply []string, err error, late bool) {
	c := s.coordinator
	c.mu.Lock()
	if late {
		if c.redis.abandoned--; err == nil { // it is back
			c.redis.outage.ProbeNow()
		}
		c.mu.Unlock()
		return
	}
	if errors.Is(err, batch.ErrLate) {
		c.redis.abandoned++
	}
	landed := c.settle(b, reply, err)
	if len(c.queue.calls) > 0 || c.look || c.mustReport() {
		c.start()
	}
	c.mu.Unlock()
	for _, q := range landed.done {
		close(q.ready)
	}
	c.observe(b, landed)
}
