package slidingwindow

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/outage"
)

// landed is what came of a batch: whom to wake and what to tell when mu is free.
type landed struct {
	done  []*call
	err   error
	back  bool // Redis answers again, or something was repaired
	down  bool // an outage was noticed
	away  Away // what calls get until it ends
	ended *outage.Outage
}

// settle takes over what an answer says, and decides the calls of its batch. mu is held.
func (c *coordinator) settle(b *flight, reply []string, err error) (l landed) {
	received := c.now()
	c.full.Store(nil)
	l.away = c.policy.away
	if err == nil {
		var again bool
		if again, err = c.resend(b, reply, received); again {
			return l
		}
	}
	if err == nil {
		err = c.learn(b, reply, received)
	} else {
		err = c.wrap(err)
	}
	c.queue.settle(b.calls...)
	l.done, l.err = b.calls, err
	switch {
	case err == nil:
		if l.ended, l.back = c.redis.answered(); l.ended != nil {
			c.line.wake() // there may be more room than a share had
		}
		c.hand(b)
	case errors.Is(err, ErrAway):
		l.down = !c.redis.down()
		l.done = c.goAlone(b, err, received)
	default: // no other answer is to be had until somebody repairs something
		l.ended = c.redis.outage.ProbeAnswered()
		c.known.heard, c.redis.broken = false, true
		for _, q := range b.calls {
			q.err = err
		}
		c.admitted.restore(&c.rule, b.unreported)
	}
	return l
}

// goAlone notes that Redis is away, and decides the calls of a batch, which are settled, and all that wait. mu is held.
func (c *coordinator) goAlone(b *flight, err error, now int64) (done []*call) {
	c.redis.failed(err)
	c.admitted.restore(&c.rule, b.unreported)
	c.tellLater()
	done = append(b.calls, c.queue.takeAll()...)
	c.look = false
	for _, q := range done {
		if q.n == 0 {
			q.err = err
			continue
		}
		q.verdict, q.err = c.alone(q.n, now)
	}
	return done
}

// resend reads an answer which says that nothing was decided, since the time was not right: it ran later than its deadline, by a
// clock that has stepped perhaps, or it was told a time that is over. Now that is known, the calls are queued once more. If it has
// happened to some of them before it returns why they fail, and only those are left of the batch. mu is held.
func (c *coordinator) resend(b *flight, reply []string, received int64) (again bool, err error) {
	if len(reply) != 2 {
		return false, nil
	}
	micros, ok := integer(reply[1], -maxInteger, 2*maxInteger)
	switch k := &c.known; {
	case !ok:
		return false, nil
	case reply[0] == "late":
		err = fmt.Errorf("%w: limiter %.80q: %w: the script ran too late", ErrAway, c.name, ErrTimeout)
		k.server.hear(micros, b.sent, received)
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
		case q.cancelled: // nothing was taken for it
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
	c.admitted.restore(&c.rule, b.unreported)
	return true, nil
}

// learn takes over what an answer shows. mu is held.
func (c *coordinator) learn(b *flight, reply []string, received int64) error {
	a, ok := readAnswer(b, reply)
	if !ok {
		return fmt.Errorf("%w: limiter %.80q: key %s: unexpected reply %.120q", ErrCorrupt, c.name, c.key, reply)
	}
	b.granted, b.at = a.granted, a.seen
	k, r, own := &c.known, &c.rule, &c.admitted
	switch {
	case !k.server.known: // until now this process went by its own clock
		own.shift(r, a.clock-b.sent)
	case a.epoch == k.epoch:
		own.shift(r, k.back-a.back)
	}
	k.counts.load(r, a.seen, a.parts)
	own.advance(r, a.seen)
	if k.server.known && a.epoch != k.epoch { // Redis has lost the state
		own.lost(r, b.unreported)
	}
	k.heard, k.epoch, k.back = true, a.epoch, a.back
	k.server.hear(a.clock, b.sent, received)
	c.adopt(a.limit, a.version)
	if len(b.refunds) > 0 {
		c.line.wake()
	}
	return nil
}

// answer is what lua/apply.lua returns.
type answer struct {
	state           // epoch 0: there is none
	clock   int64   // the server's
	granted []int64 // how many of each ask
}

func readAnswer(b *flight, reply []string) (a answer, ok bool) {
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

// hand answers the calls of a batch. mu is held.
func (c *coordinator) hand(b *flight) {
	own, k := b.told, 0
	for _, q := range b.calls {
		q.verdict = verdict{true, ByStore, b.at - c.admitted.counts.shifted}
		if !q.asks || q.n == 0 {
			continue
		}
		for b.asked[k].times == 0 {
			k++
		}
		b.asked[k].times--
		if q.verdict.ok = b.granted[k] > 0; q.verdict.ok {
			b.granted[k]--
			own += q.n
		} else if limit := c.limit.Load(); q.n > limit { // it was lowered meanwhile
			q.err = c.tooMany(q.n, limit)
		}
	}
	if own > 0 {
		c.admitted.counts.push(&c.rule, part{b.at, own}) // beyond 2^37 nothing was granted
	}
}
