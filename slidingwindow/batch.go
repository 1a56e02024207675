package slidingwindow

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// maxBatch bounds the requests of a batch.
const maxBatch = 1024

// flight is one batch under way. (Package tokenbucket calls that a flight.)
type flight struct {
	calls      []*call
	told       int64  // permits of calls that do not ask
	asked      []ask  // runs of equal calls that do
	unreported []part // what is told late
	refunds    []part // what is given back
	limit      int64  // to be set; 0: none
	args       []string
	sent       int64
	began      time.Duration // by the system's monotonic clock
	granted    []int64
	at         int64 // when, by the server's clock
}

// ask is a number of calls for so many permits each.
type ask struct{ n, times int64 }

// add puts a call into the batch.
func (b *flight) add(q *call) {
	q.sent = true
	b.calls = append(b.calls, q)
	if q.limit > 0 { // of several at once the last
		b.limit = q.limit
	}
	switch last := len(b.asked) - 1; {
	case !q.asks:
		b.told += q.n
	case q.n == 0:
	case last >= 0 && b.asked[last].n == q.n:
		b.asked[last].times++
	default:
		b.asked = append(b.asked, ask{q.n, 1})
	}
}

// source is a coordinator's batches: a batch.Source.
type source struct {
	batch.Place
	coordinator *coordinator
}

// Depart implements batch.Source.
func (s *source) Depart() (*flight, time.Time, bool) {
	c := s.coordinator
	c.mu.Lock()
	defer c.mu.Unlock()
	b := c.build()
	return b, time.Now().Add(c.policy.timeout), b != nil
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
	c.told.of(c, b, landed)
}

// mustReport tells that there is something to tell Redis, and that it can be told. mu is held.
func (c *coordinator) mustReport() bool {
	return (c.admitted.unreported.size > 0 || len(c.admitted.refunds) > 0) && !c.redis.broken && !c.redis.down()
}

// build makes the next batch; nil: there is nothing to send. mu is held.
func (c *coordinator) build() *flight {
	b := &flight{sent: c.now(), began: clock.Mono()}
	limit, kept := c.limit.Load(), int64(0)
	var refused []*call
	for len(b.calls) < maxBatch {
		q := c.queue.next()
		if q == nil {
			break
		}
		if q.asks && q.n > 0 && c.known.heard && c.known.counts.used(&c.rule, c.known.latest(b.sent))+kept+q.n > limit { // the last answer has shown it
			refused = append(refused, q)
			continue
		}
		kept += q.n
		b.add(q)
	}
	c.queue.settle(refused...)
	for _, q := range refused {
		q.verdict.by = BySnapshot
		close(q.ready)
	}
	if len(b.calls) == 0 && !c.look && !c.mustReport() {
		return nil
	}
	c.look = false
	b.unreported = c.admitted.report(&c.rule)
	if !c.redis.down() && !c.redis.broken { // else they may be lost, and could not be sent again
		b.refunds, c.admitted.refunds = c.admitted.refunds, nil
	}
	b.args = c.arguments(b)
	return b
}

// arguments are those of lua/apply.lua.
func (c *coordinator) arguments(b *flight) []string {
	r := &c.rule
	at, deadline, steady, limit := "", "", "", ""
	if c.server != nil {
		at = decimal(c.server())
	} else if c.known.heard {
		deadline = decimal(c.known.latest(b.sent) + c.policy.timeout.Microseconds())
	}
	if c.policy.local {
		steady = "1"
	}
	if b.limit > 0 {
		limit = decimal(b.limit)
	}
	asked := make([]byte, 0, 16)
	for _, a := range b.asked {
		asked = strconv.AppendInt(asked, a.n, 10)
		asked = append(asked, ':')
		asked = append(strconv.AppendInt(asked, a.times, 10), ' ')
	}
	refunds := slices.Clone(b.refunds)
	for i := range refunds {
		refunds[i].last += c.known.back
	}
	const grace = 60_000 // ms beyond what is needed, for a server whose clock steps
	return []string{
		c.key, at, decimal(r.window), decimal(r.resolution), r.mode.String(), decimal(c.limit.Load()),
		decimal((r.window+r.resolution+standstill)/1000 + grace), deadline, decimal(1 + rand.Int64N(1<<40)),
		decimal(b.told), strings.TrimPrefix(formatParts(b.unreported), " "), string(asked),
		decimal(c.version), limit, strings.TrimPrefix(formatParts(refunds), " "), decimal(c.known.epoch), steady,
	}
}

// send takes a batch to Redis.
func (c *coordinator) send(_ string, items []*batch.Item[*flight, []string]) {
	for _, i := range items {
		ctx, cancel := context.WithDeadline(context.Background(), i.Deadline)
		reply, err := applyScript.Run(ctx, c.client, 1, i.Batch.args...)
		if err != nil {
			err = c.explain(ctx, err)
		}
		cancel()
		i.Answer(reply, err)
	}
}

// explain finds out what is behind an error. It has half the time, so that a server which hangs makes no abandoned trip.
func (c *coordinator) explain(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(ctx, c.policy.timeout/2)
	defer cancel()
	return script.Explain(ctx, c.client, err)
}

// wrap is an error of the script, or of the way to it, as a caller gets it.
func (c *coordinator) wrap(err error) error {
	switch {
	case errors.Is(err, ErrAway), errors.Is(err, ErrClock):
		return err
	case redis.HasErrorPrefix(err, "CORRUPT"):
		return fmt.Errorf("%w: limiter %.80q: key %s: %w", ErrCorrupt, c.name, c.key, err)
	case strings.Contains(err.Error(), "WRONGTYPE"):
		return fmt.Errorf("%w: limiter %.80q: key %s holds no string", ErrCorrupt, c.name, c.key)
	case redis.HasErrorPrefix(err, "OVERFLOW"):
		return fmt.Errorf("%w: limiter %.80q: key %s", ErrOverflow, c.name, c.key)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: limiter %.80q: %w: %w", ErrAway, c.name, ErrTimeout, err)
	case errors.Is(err, ErrTimeout), script.Away(err):
		return fmt.Errorf("%w: limiter %.80q: %w", ErrAway, c.name, err)
	}
	return fmt.Errorf("%w: limiter %.80q: %w", ErrUnusable, c.name, err)
}
