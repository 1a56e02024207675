package slidingwindow

import (
	"errors"
	"fmt"
	"strings"
)

// settle takes over what an answer says, and decides the calls of its batch. It returns those that are to be woken when mu, which is
// held, is free. tell is for the hook.
func (c *coordinator) settle(b *inFlight, reply []string, err error) (done []*call, tell *error) {
	received := c.now()
	c.closed.Store(nil)
	if err == nil && len(reply) == 2 && reply[0] == "late" {
		if server, ok := integer(reply[1], -maxInteger, maxInteger); ok {
			if done = c.resend(b, server, received); done == nil {
				return nil, nil
			}
			b.calls, err = done, fmt.Errorf("%w: limiter %.80q: %w: the script ran too late", ErrAway, c.name, ErrTimeout)
		}
	}
	if err == nil {
		err = c.learn(b, reply, received)
	} else {
		err = c.wrap(err)
	}
	c.queue.settle(b.calls...)
	switch {
	case err == nil:
		if c.redis.answered() {
			tell = new(error)
		}
		c.hand(b)
		return b.calls, tell
	case errors.Is(err, ErrAway):
		return c.goAlone(b, err, received), &err
	}
	// No other answer is to be had until somebody repairs something.
	c.redis.outage.ProbeAnswered()
	c.known.heard, c.redis.broken = false, true
	for _, q := range b.calls {
		q.err = err
	}
	c.admitted.restore(&c.rule, b.unreported)
	return b.calls, &err
}

// goAlone notes that Redis is away, and decides the calls of a batch, which are settled, and all that wait. mu is held.
func (c *coordinator) goAlone(b *inFlight, err error, now int64) (done []*call) {
	c.redis.failed(err)
	c.admitted.restore(&c.rule, b.unreported)
	done = append(b.calls, c.queue.takeAll()...)
	c.look = false
	for _, q := range done {
		if q.n == 0 {
			q.err = err
			continue
		}
		q.ok, q.err = c.alone(q.n, now)
	}
	return done
}

// resend queues the calls of a batch that ran later than its deadline, by a clock that has stepped perhaps: now that is known.
// It returns those to which that has happened before. mu is held.
func (c *coordinator) resend(b *inFlight, server, received int64) (tired []*call) {
	k := &c.known
	k.server.hear(server, b.sent, received)
	if server < k.counts.seen {
		k.counts.advance(&c.rule, server)
	}
	var rest []*call
	for _, q := range b.calls {
		switch q.tries++; {
		case q.cancelled: // nothing was taken for it
			c.queue.settle(q)
		case q.tries > 1:
			tired = append(tired, q)
		default:
			rest = append(rest, q)
		}
	}
	c.queue.putBack(rest)
	c.look = len(rest) == 0 && len(tired) == 0
	if len(tired) == 0 {
		c.admitted.restore(&c.rule, b.unreported)
	}
	return tired
}

// learn takes over what an answer shows. mu is held.
func (c *coordinator) learn(b *inFlight, reply []string, received int64) error {
	a, ok := readAnswer(b, reply)
	if !ok {
		return fmt.Errorf("%w: limiter %.80q: key %s: unexpected reply %.120q", ErrCorrupt, c.name, c.key, reply)
	}
	b.granted = a.granted
	k, r := &c.known, &c.rule
	first := !k.server.known
	if first { // until now this process went by its own clock
		c.admitted.shift(r, a.clock-b.sent)
	}
	k.counts.load(r, a.seen, a.parts)
	c.admitted.counts.advance(r, a.seen)
	if !first && a.epoch != k.epoch { // Redis has lost the state
		c.admitted.lost(r, b.unreported)
	}
	k.heard, k.epoch = true, a.epoch
	k.server.hear(a.clock, b.sent, received)
	return nil
}

// answer is what lua/apply.lua returns.
type answer struct {
	clock, seen int64 // the server's, and the time of the decision
	epoch       int64
	parts       []part
	granted     []int64 // how many of each ask
}

func readAnswer(b *inFlight, reply []string) (a answer, ok bool) {
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
		if a.epoch, _, a.parts, ok = parse(reply[1]); !ok {
			return a, false
		}
	}
	return a, true
}

// hand answers the calls of a batch. mu is held.
func (c *coordinator) hand(b *inFlight) {
	own, k := b.told, 0
	for _, q := range b.calls {
		if q.ok = true; !q.asks || q.n == 0 {
			continue
		}
		for b.asked[k].times == 0 {
			k++
		}
		b.asked[k].times--
		if q.ok = b.granted[k] > 0; q.ok {
			b.granted[k]--
			own += q.n
		}
	}
	if own > 0 {
		c.admitted.counts.add(&c.rule, own)
	}
}
