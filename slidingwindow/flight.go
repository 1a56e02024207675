package slidingwindow

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// flight is one batch on its way.
type flight struct {
	calls   []*call
	told    int64  // permits of calls that do not ask
	asked   []ask  // runs of equal calls that do
	owed    []part // what is told late
	args    []string
	sent    int64
	granted []int64
}

type ask struct{ n, times int64 }

// source is a limiter's batches: a batch.Source.
type source struct {
	batch.Place
	l *Limiter
}

// Depart implements batch.Source.
func (s *source) Depart() (*flight, time.Time, bool) {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	b := s.l.build()
	return b, time.Now().Add(s.l.fleet.timeout), b != nil
}

// Land implements batch.Source.
func (s *source) Land(b *flight, reply []string, err error, late bool) {
	l, f := s.l, s.l.fleet
	l.mu.Lock()
	if late {
		if f.strays--; err == nil { // it is back
			f.outage.ProbeNow()
		}
		l.mu.Unlock()
		return
	}
	if errors.Is(err, batch.ErrLate) {
		f.strays++
	}
	done, tell := l.settle(b, reply, err)
	if len(f.queue) > 0 || f.look || f.owes() {
		l.start()
	}
	l.mu.Unlock()
	for _, c := range done {
		close(c.ready)
	}
	if f.hook != nil && tell != nil {
		f.hook(*tell)
	}
}

// owes tells that there is something to tell Redis, and that it can be told. mu is held.
func (f *fleet) owes() bool { return f.owed.size > 0 && !f.broken && f.outage.Down() == nil }

// build makes the next batch; nil: there is nothing to send. mu is held.
func (l *Limiter) build() *flight {
	f := l.fleet
	now := l.now()
	b := &flight{sent: now}
	var refused []*call
	limit, kept := l.limit.Load(), int64(0)
	for len(f.queue) > 0 && len(b.calls) < maxBatch {
		c := f.queue[0]
		f.queue = f.queue[1:]
		if c.gone {
			f.gone--
			continue
		}
		if c.asks && c.n > 0 && f.heard && l.tally.used(&l.rule, l.latest(now))+kept+c.n > limit { // the last answer has shown it
			refused = append(refused, c)
			continue
		}
		kept += c.n
		c.sent = true
		b.calls = append(b.calls, c)
		switch k := len(b.asked) - 1; {
		case !c.asks:
			b.told += c.n
		case c.n == 0:
		case k >= 0 && b.asked[k].n == c.n:
			b.asked[k].times++
		default:
			b.asked = append(b.asked, ask{c.n, 1})
		}
	}
	for _, c := range refused {
		f.pending -= c.n
		close(c.ready)
	}
	if len(b.calls) == 0 && !f.look && !f.owes() {
		f.queue = nil
		return nil
	}
	f.look = false
	b.owed = f.owed.list()
	f.owed = tally{}
	b.args = l.arguments(b, now)
	return b
}

func (l *Limiter) arguments(b *flight, now int64) []string {
	f, r := l.fleet, &l.rule
	at, deadline := "", ""
	if f.server != nil {
		at = decimal(f.server())
	} else if f.heard {
		deadline = decimal(l.latest(now) + f.timeout.Microseconds())
	}
	asked := make([]byte, 0, 16)
	for _, a := range b.asked {
		asked = strconv.AppendInt(asked, a.n, 10)
		asked = append(asked, ':')
		asked = append(strconv.AppendInt(asked, a.times, 10), ' ')
	}
	const grace = 60_000 // ms beyond what is needed, for a server whose clock steps
	return []string{
		f.key, at, decimal(r.window), decimal(r.resolution), r.mode.String(), decimal(l.limit.Load()),
		decimal((r.window+r.resolution+standstill)/1000 + grace), deadline, decimal(1 + rand.Int64N(1<<40)),
		decimal(b.told), strings.TrimPrefix(formatParts(b.owed), " "), string(asked),
	}
}

func decimal(n int64) string { return strconv.FormatInt(n, 10) }

// send takes a batch to Redis.
func (l *Limiter) send(_ string, items []*batch.Item[*flight, []string]) {
	for _, i := range items {
		ctx, cancel := context.WithDeadline(context.Background(), i.Deadline)
		reply, err := applyScript.Run(ctx, l.fleet.client, 1, i.Batch.args...)
		if err != nil {
			err = l.fleet.explain(ctx, err)
		}
		cancel()
		i.Answer(reply, err)
	}
}

// explain finds out what is behind an error. It has half the time, so that a server which hangs makes no stray.
func (f *fleet) explain(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(ctx, f.timeout/2)
	defer cancel()
	return script.Explain(ctx, f.client, err)
}

// settle hands out the answers of a batch: to those that are to be woken when mu, which is held, is free. tell is for the
// hook.
func (l *Limiter) settle(b *flight, reply []string, err error) (done []*call, tell *error) {
	f := l.fleet
	received := l.now()
	l.gate.Store(nil)
	if err == nil && len(reply) == 2 && reply[0] == "late" {
		if server, ok := integer(reply[1], -maxInteger, maxInteger); ok {
			if done = l.again(b, server, received); done == nil {
				return nil, nil
			}
			b.calls, err = done, fmt.Errorf("%w: limiter %.80q: %w: the script ran too late", ErrAway, l.name, ErrTimeout)
		}
	}
	if err == nil {
		err = l.learn(b, reply, received)
	} else {
		err = l.failed(err)
	}
	for _, c := range b.calls {
		f.pending -= c.n
	}
	switch {
	case err == nil:
		if f.outage.ProbeAnswered() != nil || f.broken {
			tell = new(error) // back
		}
		f.broken = false
		l.hand(b)
		return b.calls, tell
	case !errors.Is(err, ErrAway): // no other answer is to be had until somebody repairs something
		f.outage.ProbeAnswered()
		f.heard, f.broken = false, true
		for _, c := range b.calls {
			c.err = err
		}
		l.restore(b.owed)
		return b.calls, &err
	}
	f.fault = err
	l.restore(b.owed)
	longest := maxPause
	if f.strays > 2 {
		longest = longPause
	}
	f.outage.ProbeFailed(err, minPause, longest)
	done = b.calls
	for _, c := range f.queue {
		if !c.gone {
			f.pending -= c.n
			c.sent = true
			done = append(done, c)
		}
	}
	f.queue, f.gone, f.look = nil, 0, false
	for _, c := range done {
		if c.n == 0 {
			c.err = err
			continue
		}
		c.ok, c.err = l.alone(c.n, received)
	}
	return done, &err
}

// again queues the calls of a batch that ran later than its deadline, by a clock that has stepped perhaps: now that is known.
// It returns those to which that has happened before. mu is held.
func (l *Limiter) again(b *flight, server, received int64) (tired []*call) {
	f := l.fleet
	f.remote.Heard(server, local(b.sent), local(received))
	if server < l.tally.seen {
		l.tally.advance(&l.rule, server)
	}
	var rest []*call
	for _, c := range b.calls {
		switch c.tries++; {
		case c.gone: // nothing was taken for it
			f.pending -= c.n
		case c.tries > 1:
			tired = append(tired, c)
		default:
			c.sent = false
			rest = append(rest, c)
		}
	}
	f.queue = append(rest, f.queue...)
	f.look = len(rest) == 0 && len(tired) == 0
	if len(tired) == 0 {
		l.restore(b.owed)
	}
	return tired
}

// failed wraps an error of the script or of the way to it.
func (l *Limiter) failed(err error) error {
	switch {
	case errors.Is(err, ErrAway):
		return err
	case redis.HasErrorPrefix(err, "CORRUPT"):
		return fmt.Errorf("%w: limiter %.80q: key %s: %w", ErrCorrupt, l.name, l.fleet.key, err)
	case strings.Contains(err.Error(), "WRONGTYPE"):
		return fmt.Errorf("%w: limiter %.80q: key %s holds no string", ErrCorrupt, l.name, l.fleet.key)
	case redis.HasErrorPrefix(err, "OVERFLOW"):
		return fmt.Errorf("%w: limiter %.80q: key %s", ErrOverflow, l.name, l.fleet.key)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: limiter %.80q: %w: %w", ErrAway, l.name, ErrTimeout, err)
	case errors.Is(err, ErrTimeout), script.Away(err):
		return fmt.Errorf("%w: limiter %.80q: %w", ErrAway, l.name, err)
	}
	return fmt.Errorf("%w: limiter %.80q: %w", ErrUnusable, l.name, err)
}

// learn takes over what an answer shows. mu is held.
func (l *Limiter) learn(b *flight, reply []string, received int64) error {
	f := l.fleet
	bad := fmt.Errorf("%w: limiter %.80q: key %s: unexpected reply %.120q", ErrCorrupt, l.name, f.key, reply)
	if len(reply) != 3 {
		return bad
	}
	server, now, _ := strings.Cut(reply[0], " ")
	raw, ok1 := integer(server, -maxInteger, maxInteger)
	seen, ok2 := integer(now, -maxInteger, maxInteger)
	granted := strings.Fields(reply[2])
	if !ok1 || !ok2 || len(granted) != len(b.asked) {
		return bad
	}
	for i, text := range granted {
		g, ok := integer(text, 0, b.asked[i].times)
		if !ok {
			return bad
		}
		b.granted = append(b.granted, g)
	}
	epoch, parts := int64(0), []part(nil)
	if reply[1] != "" {
		var ok bool
		if epoch, _, parts, ok = parse(reply[1]); !ok {
			return bad
		}
	}
	if !f.timed { // until now this process went by its own clock
		by := raw - b.sent
		f.mine.shift(&l.rule, by)
		f.owed.shift(&l.rule, by)
	}
	l.tally.load(&l.rule, seen, parts)
	f.mine.advance(&l.rule, seen)
	if f.timed && epoch != f.epoch { // Redis has lost the state
		f.owed.load(&l.rule, f.mine.seen, l.without(f.mine.list(), b.owed))
	}
	f.heard, f.timed, f.epoch = true, true, epoch
	f.remote.Heard(raw, local(b.sent), local(received))
	return nil
}

// without is parts less those of others, by sub-interval.
func (l *Limiter) without(parts, others []part) (rest []part) {
	for _, p := range parts {
		for _, o := range others {
			if l.rule.index(o.last) == l.rule.index(p.last) {
				p.count -= o.count
			}
		}
		if p.count > 0 {
			rest = append(rest, p)
		}
	}
	return rest
}

// hand answers the calls of a batch. mu is held.
func (l *Limiter) hand(b *flight) {
	own := b.told
	k := 0
	for _, c := range b.calls {
		switch {
		case !c.asks || c.n == 0:
			c.ok = true
		default:
			for b.asked[k].times == 0 {
				k++
			}
			b.asked[k].times--
			if c.ok = b.granted[k] > 0; c.ok {
				b.granted[k]--
				own += c.n
			}
		}
	}
	if own > 0 {
		l.fleet.mine.add(&l.rule, own)
	}
}

// restore owes again what could not be told. mu is held.
func (l *Limiter) restore(parts []part) {
	if f := l.fleet; len(parts) > 0 {
		parts = append(parts, f.owed.list()...)
		f.owed.load(&l.rule, f.mine.seen, parts)
	}
}
