package slidingwindow

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/waiting"
)

// machine is the waiting.Machine of a limiter: the part that decides. It has no lock, clock, channel or goroutine.
//
// A call is refused by the view, or joins the queue and is sent with the next batch. A call that waits for permits is not refused: it joins the
// line. Once the view shows room for the first of the line, it joins the queue with all behind it that fit. Without Redis, calls are decided at
// once, and the line is judged by the counts of this process.
//
// Replies bring the server's clock. From the first reply on, times are those of that clock, whatever time of day this process has.
type machine struct {
	config
	published published
	limit     int64 // in force
	// full is a span in which not even one permit can be admitted, by the limiter's clock, which may be set. The zero value is none.
	full span

	queue    queue         // calls that wait to be sent
	line     queue         // calls that wait for permits
	called   int           // calls of the line that are in the queue or in flight
	lookAt   int64         // when the first of the line is judged again; by now
	flying   *flight       // nil if no batch is in flight
	look     bool          // send a batch even without calls, for its reply
	asked    int64         // the sub-interval whose first request was sent although the view refuses it; 0 if none
	version  int64         // of the limit
	view     view          // what the last reply showed
	admitted admitted      // permits that this process has admitted
	steady   steady        // the clock of all these
	fault    error         // of the last probe, during an outage; else nil
	broken   bool          // the state or the way to Redis needs a repair
	began    time.Duration // when the outage began, by waiting.Moment.Mono
	reportBy time.Duration // when a probe reports what Redis lacks, during an outage; 0 if unset
	putOff   time.Duration // until when reports and refunds wait, by waiting.Moment.Mono
	random   rand.PCG
}

// config is the fixed part of a machine.
type config struct {
	name     named
	rule     rule
	key      string                  // "" without Redis
	sender   string                  // the name of this process in the keys of its reports
	server   func(local int64) int64 // see options
	policy   policy
	observer *Observer
}

// policy is the configuration of waits, round trips and outages.
type policy struct {
	waiters int // the most calls that may be queued, or wait for permits
	timeout time.Duration
	failure FailurePolicy
	local   bool // scripts decide by the limiter's clock
}

// apart is how long reports and refunds wait after the key of a report was found apart from the counts: a slot moves.
const apart = 250 * time.Millisecond

// now returns the limiter's clock without its steps back. After such a step it is unknown how much time has passed, so the view becomes
// invalid.
func (m *machine) now(local int64) int64 {
	now, stepped := m.steady.read(local)
	if stepped {
		m.view.valid = false
		m.view.server.Stepped()
	}
	return now
}

// end ends a call, unless its caller has left.
func (m *machine) end(c *call, v verdict, err error, out *waiting.Out) waiting.Way {
	if !c.cancelled {
		c.verdict, c.err = v, err
		out.End(&c.Ticket)
	}
	return waiting.Ended
}

// Join implements waiting.Machine.
func (m *machine) Join(c *call, moment waiting.Moment, out *waiting.Out) waiting.Way {
	now := m.now(moment.Local)
	c.since = moment.Mono
	switch _, shares := m.policy.failure.share(); {
	case c.kind == allows:
		m.full = span{}
		if c.waits && m.waiting() > 0 {
			return m.stand(c, &m.line, m.waiting(), out)
		}
		return m.judge(c, now, moment, out)
	case c.kind == refunds:
		m.full, m.lookAt = span{}, 0
		if m.key == "" {
			m.admitted.counts.advance(&m.rule, moment.Local)
			m.admitted.counts.remove(&m.rule, c.at+m.admitted.counts.shifted, c.n)
			return m.end(c, verdict{}, nil, out)
		}
		m.admitted.refund(&m.rule, c.at+m.admitted.counts.shifted, c.n)
		if c.n = 0; len(m.admitted.refunds) == 0 || m.fault != nil || m.queue.live() >= m.policy.waiters {
			return m.end(c, verdict{}, nil, out)
		}
	case m.key == "":
		if c.kind == sets {
			m.limit, m.full, m.lookAt = c.limit, span{}, 0
		}
		return m.end(c, verdict{}, nil, out)
	case m.fault == nil:
		if c.kind == knows && m.view.valid && !m.view.stale(&m.rule, m.view.earliest(now)) {
			return m.end(c, verdict{}, nil, out)
		}
	case c.kind != sets && shares:
		m.look = m.look || moment.Pause == 0
		return m.end(c, verdict{}, nil, out)
	case moment.Pause > 0:
		return m.end(c, verdict{}, m.fault, out)
	}
	return m.stand(c, &m.queue, m.queue.live(), out)
}

// waiting returns how many calls wait for permits.
func (m *machine) waiting() int { return m.line.live() + m.called }

// stand adds a call to the queue or the line, where so many are, unless they are too many.
func (m *machine) stand(c *call, q *queue, are int, out *waiting.Out) waiting.Way {
	if are >= m.policy.waiters {
		return m.end(c, verdict{by: ByCheck}, fmt.Errorf("%w: limiter %.80q: %d are waiting", ErrTooManyWaiters, m.name, are), out)
	}
	c.lined = q == &m.line
	c.stood = c.stood || c.lined
	if q.push(c); c.lined || m.flying != nil {
		return waiting.Queued
	}
	return waiting.Alone
}

// judge decides a request by the view or by the policy, or queues it.
//
// The view only lacks permits that others have admitted since. So a refusal by it is right, as long as the state is not lost and the
// server's clock does not jump. Both show at the next sub-interval, whose first request is sent whatever the view is. Permits that this
// process has requested count as granted. During an outage of Redis the view stays true.
func (m *machine) judge(c *call, now int64, moment waiting.Moment, out *waiting.Out) waiting.Way {
	if m.key == "" {
		v, err := m.here(c.n, moment.Local)
		if err == nil && !v.ok {
			return m.refuse(c, v.by, out)
		}
		return m.end(c, v, err, out)
	}
	down := m.fault != nil
	if down && moment.Pause == 0 { // a probe is due
		m.look = true
	}
	if m.view.valid && (!down || m.policy.failure != FailOpen) {
		switch m.checkView(c.n, now, moment.Local) {
		case full:
			return m.refuse(c, BySnapshot, out)
		case outdated:
			c.recheck = true
		}
	}
	if down {
		return m.decideLocally(c, now, out)
	}
	return m.stand(c, &m.queue, m.queue.live(), out)
}

// refuse refuses a request. One that waits joins the line.
func (m *machine) refuse(c *call, by Decider, out *waiting.Out) waiting.Way {
	switch {
	case c.lined:
		return waiting.Queued
	case c.waits && !c.cancelled:
		return m.stand(c, &m.line, m.waiting(), out)
	}
	return m.end(c, verdict{by: by}, nil, out)
}

// here decides a request without Redis, by the limiter's clock.
func (m *machine) here(n, local int64) (v verdict, err error) {
	c := &m.admitted.counts
	at := c.advance(&m.rule, local)
	used := c.used(&m.rule, at)
	if m.full = (span{}); used+n > m.limit {
		if used+1 > m.limit {
			m.full = spanOf(local, c.until(&m.rule, at, m.limit-1)-at)
		}
		return v, nil
	}
	if !c.add(&m.rule, n) {
		return v, fmt.Errorf("%w: limiter %.80q", ErrOverflow, m.name)
	}
	return verdict{true, ByStore, at - c.shifted}, nil
}

// decideLocally decides a request during an outage.
func (m *machine) decideLocally(c *call, now int64, out *waiting.Out) waiting.Way {
	if m.policy.failure == FailClosed {
		return m.end(c, verdict{}, m.fault, out)
	}
	share, _ := m.policy.failure.share() // not above 0 under FailOpen: no bound
	at, ok := m.admitted.take(&m.rule, c.n, min(int64(share), m.limit), m.view.earliest(now), m.view.latest(now))
	if !ok {
		return m.refuse(c, ByPolicy, out)
	}
	return m.end(c, verdict{true, ByPolicy, at - m.admitted.counts.shifted}, nil, out)
}

// opinion is what the view says of a request.
type opinion uint8

const (
	fits     opinion = iota // it may have room: Redis decides
	full                    // it has no room
	outdated                // it has no room by the view, but Redis decides: others may have raised the limit or refunded permits
)

// checkView returns what the view says of a request. It is outdated for the first request in a sub-interval. The other requests do not wait for
// that one. If they did and Redis hung, a flood of requests to refuse would hang too.
func (m *machine) checkView(n, now, local int64) opinion {
	k, r := &m.view, &m.rule
	latest := k.latest(now)
	used := k.counts.used(r, latest) + m.queue.pending
	if used+n <= m.limit {
		return fits
	}
	earliest := k.earliest(now)
	if k.stale(r, earliest) && m.fault == nil { // not by the latest, which might send two
		if in := r.index(earliest); in != m.asked {
			m.asked = in
			return outdated
		}
	}
	if used+1 > m.limit {
		next := (r.index(earliest)+1)*r.resolution - earliest // until a request is sent again
		m.full = spanOf(local, min(next, k.counts.until(r, latest, m.limit-1-m.queue.pending)-latest))
	}
	return full
}

// Leave implements waiting.Machine.
func (m *machine) Leave(c *call, _ waiting.Moment, _ *waiting.Out) {
	if c.lined {
		if m.line.first() == c {
			m.lookAt = 0
		}
		m.line.cancel(c)
		return
	}
	if m.queue.cancel(c); c.sent {
		return
	}
	m.back(c)
	if c.recheck {
		m.asked = 0 // the next request is sent in its place
	}
}

// back records that a call has come out of the queue, or that its batch has landed.
func (m *machine) back(c *call) {
	if c.called {
		c.called = false
		m.called--
	}
}

// Expire implements waiting.Machine. A call that waits for permits has no timeout.
func (m *machine) Expire(moment waiting.Moment, out *waiting.Out) (next time.Duration) {
	const together = time.Millisecond // otherwise each call of a crowd would have an alarm of its own
	calls := slices.Clone(m.queue.calls)
	if f := m.flying; f != nil {
		if f.began+m.policy.timeout-m.policy.timeout/16 <= moment.Mono {
			return moment.Mono + m.policy.timeout // the batch is nearly overdue, which decides all calls
		}
		calls = append(calls, f.calls...)
	}
	late := func(c *call) bool {
		by := c.since + m.policy.timeout
		if by > moment.Mono+together && (next == 0 || by < next) {
			next = by
		}
		return by <= moment.Mono+together
	}
	for _, c := range calls {
		if !c.waits && !c.cancelled && late(c) {
			m.end(c, verdict{}, fmt.Errorf("%w: limiter %.80q: %w: it has waited behind other calls", ErrStoreUnavailable, m.name, ErrStoreTimeout), out)
			m.Leave(c, moment, out)
		}
	}
	return next
}

// Tick implements waiting.Machine.
func (m *machine) Tick(moment waiting.Moment, out *waiting.Out) (next waiting.Next) {
	if m.line.live() > 0 && m.called == 0 {
		next.Wait = m.serve(moment, out)
	}
	if m.fault != nil {
		m.reportLater(moment)
		next.By = m.reportBy
	}
	m.published.set(m.limit, m.full)
	next.Send = m.flying == nil && (m.queue.live() > 0 || m.look || m.mustReport(moment))
	return next
}

// minLook is the least time between two requests of a waiter. Without it, a waiter would repeat its request at once whenever another process
// took the free permits.
const minLook = time.Millisecond

// serve judges the calls of the line whose turn it is, and returns when to do so again; 0 while some of them are in flight.
//
// Those that are sent together have sizes that do not fall. So if Redis refuses one, it refuses those behind it, too: none is overtaken.
func (m *machine) serve(moment waiting.Moment, out *waiting.Out) time.Duration {
	now := m.now(moment.Local)
	size := int64(0)
	for m.called < maxBatch && now >= m.lookAt {
		c := m.line.first()
		if c == nil || c.n < size || m.called > 0 && !m.fitsToo(c, now) {
			break
		}
		if c.n > m.limit { // it was lowered meanwhile
			m.end(c, verdict{by: ByCheck}, m.name.tooMany(c.n, m.limit), out)
		} else if c.since = moment.Mono; m.judge(c, now, moment, out) != waiting.Ended {
			if c.lined { // still
				m.lookAt = now + m.untilLook(c.n, moment).Microseconds()
				break
			}
			c.called, size = true, c.n
			m.called++
		}
		m.line.next()
	}
	if m.called > 0 || m.line.live() == 0 {
		return 0
	}
	return time.Duration(max(1, m.lookAt-now)) * time.Microsecond
}

// fitsToo reports whether the view shows room for a call besides those that are pending.
func (m *machine) fitsToo(c *call, now int64) bool {
	return m.view.valid && m.fault == nil && m.view.counts.used(&m.rule, m.view.latest(now))+m.queue.pending+c.n <= m.limit
}

// untilLook returns when the first of the line is judged again: when its permits may be free. With Redis at least once in a sub-interval, since
// others may have refunded permits, and during an outage when a probe is due.
func (m *machine) untilLook(n int64, moment waiting.Moment) time.Duration {
	_, _, wait := m.standing(n, moment)
	switch d := min(wait, time.Duration(m.rule.resolution)*time.Microsecond); {
	case m.key == "":
		return wait
	case m.fault != nil:
		return max(minLook, min(d, max(waiting.MinPause, moment.Pause)))
	default:
		return max(minLook, d)
	}
}

// standing implements Limiter.standing.
func (m *machine) standing(n int64, moment waiting.Moment) (limit, used int64, wait time.Duration) {
	now, counts := m.now(moment.Local), &m.view.counts
	at, pending, limit := m.view.latest(now), m.queue.pending, m.limit
	switch share, shares := m.policy.failure.share(); {
	case m.key == "":
		counts, at = &m.admitted.counts, max(m.admitted.counts.seen, moment.Local)
	case m.fault != nil && !shares:
		return limit, limit, moment.Pause
	case m.fault != nil:
		counts, pending, limit = &m.admitted.counts, 0, min(int64(share), limit)
		at = max(counts.seen, m.view.earliest(now))
	}
	return limit, counts.used(&m.rule, at) + pending, counts.wait(&m.rule, at, limit-pending, n)
}

// reportLater makes sure that Redis receives the permits and refunds it lacks when the outage ends, even if this process gets no more calls.
func (m *machine) reportLater(moment waiting.Moment) {
	if m.reportBy == 0 {
		if m.admitted.owes(&m.rule, m.view.earliest(m.now(moment.Local))) {
			m.reportBy = moment.Mono + waiting.LongPause/2 + time.Duration(m.draw(int64(waiting.LongPause)))
		}
	} else if moment.Mono >= m.reportBy {
		m.reportBy, m.look = 0, true
	}
}

// draw returns a random number from 0 to n - 1.
func (m *machine) draw(n int64) int64 { return int64(m.random.Uint64() % uint64(n)) }

// Outage implements waiting.Machine.
func (m *machine) Outage(err error, moment waiting.Moment, out *waiting.Out) {
	before := m.fault
	m.fault, m.lookAt, m.full = err, 0, span{}
	if err == nil {
		m.reportBy = 0
		m.noteHealth(Health{After: moment.Mono - m.began}, out)
		return
	}
	if before == nil {
		m.began = moment.Mono
		m.noteHealth(Health{Down: true, Err: err}, out)
	}
	now := m.now(moment.Local)
	m.look = false
	var line []*call
	for _, c := range m.queue.takeAll() {
		m.back(c)
		switch c.lined = c.waits; {
		case c.n == 0:
			m.end(c, verdict{}, err, out)
		case c.recheck && m.policy.failure != FailOpen && m.view.counts.used(&m.rule, m.view.latest(now))+c.n > m.limit:
			m.refuse(c, BySnapshot, out)
		default:
			m.decideLocally(c, now, out)
		}
		if c.recheck = false; c.lined && !c.Ended() {
			line = append(line, c)
		}
	}
	m.line.putBack(line)
}
