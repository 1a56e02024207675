package slidingwindow

import (
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// maxBatch is the most calls of a batch.
const maxBatch = 1024

// flight is a batch.
type flight struct {
	calls   []*call
	asked   []ask   // runs of equal calls that Redis decides
	report  *report // permits admitted earlier; nil if there are none
	refunds []part  // permits to refund
	alone   bool    // Redis had only the first key, so it got neither the report nor the refunds
	limit   int64   // to be set; 0 if none
	args    []string
	keys    int           // of args
	sent    int64         // by the coordinator's clock
	began   time.Duration // by clock.Mono
	granted []int64
	at      int64 // when it was decided, by the server's clock
}

// ask is a number of calls for n permits each.
type ask struct{ n, times int64 }

// add adds a call to the batch.
func (b *flight) add(q *call) {
	q.sent = true
	b.calls = append(b.calls, q)
	if q.limit > 0 { // if several set one, the last counts
		b.limit = q.limit
	}
	switch last := len(b.asked) - 1; {
	case q.n == 0:
	case last >= 0 && b.asked[last].n == q.n:
		b.asked[last].times++
	default:
		b.asked = append(b.asked, ask{q.n, 1})
	}
}

// told returns the permits that the batch reports.
func (b *flight) told() []part {
	if b.report == nil {
		return nil
	}
	return b.report.parts
}

// goAlone leaves out the report, whose key is not where the counts are while a slot moves, or nowhere, and the refunds, which may be of its permits.
func (b *flight) goAlone() {
	b.args, b.keys = slices.Delete(b.args, 1, 2), 1
	for _, i := range []int{8, 12, 15} { // of ARGV
		b.args[i] = ""
	}
	b.report, b.alone = nil, true
}

// source is the batch.Source of a coordinator.
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

// mustReport reports whether Redis lacks permits or refunds of this process and can be sent them. mu must be held.
func (c *coordinator) mustReport() bool {
	a := &c.admitted
	return (a.unreported.size > 0 || a.doubtful != nil || len(a.refunds) > 0) && !c.redis.broken && !c.redis.down() && !c.putsOff()
}

// putsOff reports whether reports and refunds wait, because a slot moves. mu must be held.
func (c *coordinator) putsOff() bool { return clock.Mono() < c.putOff }

// build returns the next batch, or nil if there is nothing to send. mu must be held.
func (c *coordinator) build() *flight {
	b := &flight{sent: c.now(), began: clock.Mono()}
	limit, kept := c.limit.Load(), int64(0)
	var refused []*call
	for len(b.calls) < maxBatch {
		q := c.queue.next()
		if q == nil {
			break
		}
		if !q.recheck && q.n > 0 && c.view.valid && c.view.counts.used(&c.rule, c.view.latest(b.sent))+kept+q.n > limit { // the last reply showed it
			refused = append(refused, q)
			continue
		}
		kept += q.holds()
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
	b.report = c.admitted.report(&c.rule, 1+rand.Int64N(maxInteger))
	if c.putsOff() {
		b.report = nil
	} else if !c.redis.down() && !c.redis.broken { // else they may be lost, and could not be sent again
		b.refunds, c.admitted.refunds = c.admitted.refunds, nil
	}
	b.args, b.keys = c.arguments(b)
	return b
}

// arguments returns the keys and arguments of lua/apply.lua, and how many of them are keys.
func (c *coordinator) arguments(b *flight) (args []string, keys int) {
	r := &c.rule
	at, deadline, steady, limit := "", "", "", ""
	if c.server != nil {
		at = decimal(c.server())
	} else if c.view.valid {
		deadline = decimal(c.view.latest(b.sent) + c.policy.timeout.Microseconds())
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
		refunds[i].last += c.view.back
	}
	args, number, parts := []string{c.key}, "", ""
	if b.report != nil {
		args, number, parts = append(args, c.key+":"+c.process), decimal(b.report.number), strings.TrimPrefix(formatParts(b.report.parts), " ")
	}
	keys = len(args)
	const grace = 60_000 // ms beyond the least time to live, for a server whose clock is set back
	return append(args,
		at, decimal(r.window), decimal(r.resolution), decimal(c.limit.Load()),
		decimal((r.window+r.resolution+standstill)/1000+grace), deadline, decimal(1+rand.Int64N(1<<40)),
		parts, string(asked),
		decimal(c.version), limit, strings.TrimPrefix(formatParts(refunds), " "), decimal(c.view.epoch), steady, number,
	), keys
}

// send runs the scripts of batches in a goroutine of c.trips.
func (c *coordinator) send(_ string, items []*batch.Item[*flight, []string]) { c.ask(c.client, items) }

// ask runs the scripts of batches with a client. A caller may run it in its own goroutine only if the client returns by the deadline.
func (c *coordinator) ask(client script.Client, items []*batch.Item[*flight, []string]) {
	for _, i := range items {
		ctx, cancel := context.WithDeadline(context.Background(), i.Deadline)
		reply, err := applyScript.RunTogether(ctx, client, i.Batch.keys, i.Batch.args...)
		if i.Batch.keys > 1 && script.KeysApart(err) {
			i.Batch.goAlone()
			reply, err = applyScript.Run(ctx, client, i.Batch.keys, i.Batch.args...)
		}
		if err != nil {
			err = c.explain(ctx, client, err)
		}
		cancel()
		i.Answer(reply, err)
	}
}
