package slidingwindow

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/waiting"
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
	sent    int64         // by machine.now
	began   time.Duration // by waiting.Moment.Mono
	granted []int64
	at      int64 // when it was decided, by the server's clock

	oneCall [1]*call // storage of calls and asked for a lone caller
	oneAsk  [1]ask
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

// mustReport reports whether Redis lacks permits or refunds of this process and can be sent them.
func (m *machine) mustReport(moment waiting.Moment) bool {
	a := &m.admitted
	return (a.unreported.size > 0 || a.doubtful != nil || len(a.refunds) > 0) && !m.broken && m.fault == nil && !m.putsOff(moment)
}

// putsOff reports whether reports and refunds wait, because a slot moves.
func (m *machine) putsOff(moment waiting.Moment) bool { return moment.Mono < m.putOff }

// Build implements waiting.Machine.
func (m *machine) Build(moment waiting.Moment, out *waiting.Out) (*flight, bool) {
	now := m.now(moment.Local)
	b := &flight{sent: now, began: moment.Mono}
	b.calls, b.asked = b.oneCall[:0], b.oneAsk[:0]
	kept := int64(0)
	var refused []*call
	for len(b.calls) < maxBatch {
		c := m.queue.next()
		if c == nil {
			break
		}
		if !c.recheck && c.n > 0 && m.view.valid && m.view.counts.used(&m.rule, m.view.latest(now))+kept+c.n > m.limit { // the last reply showed it
			refused = append(refused, c)
			continue
		}
		kept += c.holds()
		b.add(c)
	}
	m.queue.settle(refused...)
	m.refuseAll(refused, BySnapshot, out)
	if len(b.calls) == 0 && !m.look && !m.mustReport(moment) {
		return nil, false
	}
	m.look = false
	b.report = m.admitted.report(&m.rule, 1+m.draw(maxInteger))
	if m.putsOff(moment) {
		b.report = nil
	} else if m.fault == nil && !m.broken { // else they may be lost, and could not be sent again
		b.refunds, m.admitted.refunds = m.admitted.refunds, nil
	}
	b.args, b.keys = m.arguments(b, moment.Local)
	m.flying = b
	return b, true
}

// refuseAll refuses requests. Those that wait go back to the front of the line, in their order.
func (m *machine) refuseAll(calls []*call, by Decider, out *waiting.Out) {
	var line []*call
	for _, c := range calls {
		m.back(c)
		c.recheck = false
		if c.lined = c.waits && !c.cancelled; c.lined {
			line = append(line, c)
		} else {
			m.end(c, verdict{by: by}, nil, out)
		}
	}
	m.line.putBack(line)
}

// arguments returns the keys and arguments of lua/apply.lua, and how many of them are keys.
func (m *machine) arguments(b *flight, local int64) (args []string, keys int) {
	r := &m.rule
	now, deadline, steady, limit := "", "", "", ""
	if m.server != nil {
		now = decimal(m.server(local))
	} else if m.view.valid {
		deadline = decimal(m.view.latest(b.sent) + m.policy.timeout.Microseconds())
	}
	if m.policy.local {
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
		refunds[i].last += m.view.back
	}
	args, number, parts := []string{m.key}, "", ""
	if b.report != nil {
		args, number, parts = append(args, m.key+":"+m.sender), decimal(b.report.number), strings.TrimPrefix(formatParts(b.report.parts), " ")
	}
	keys = len(args)
	const grace = 60_000 // ms beyond the least time to live, for a server whose clock is set back
	return append(args,
		now, decimal(r.window), decimal(r.resolution), decimal(m.limit),
		decimal((r.window+r.resolution+standstill)/1000+grace), deadline, decimal(1+m.draw(1<<40)),
		parts, string(asked),
		decimal(m.version), limit, strings.TrimPrefix(formatParts(refunds), " "), decimal(m.view.epoch), steady, number,
	), keys
}
