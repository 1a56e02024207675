package group

import (
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// member is one bucket as its participant knows it, and what goes back to that bucket. The participant's mu must be held for all methods.
//
// Invariants: the session is here, or it travels with the batch in flight. A refund is here, or in a flight, or its permits are counted as lost or were
// given back.
type member struct {
	Member
	account
	micros  func() int64 // see permit.Batch.LocalMicros
	refunds []*refund    // for the next batch
	session permit.Session
	lost    *atomic.Int64 // see Config.Lost
}

// account is a bucket as the replies have shown it to a participant.
type account struct {
	offset  clock.Offset
	server  clock.Remote
	penalty schedule.Penalty
	terms   *permit.Terms // in force as of the last reply; nil before
	epoch   int64         // as of the last reply
	known   *permit.Terms // the newest with a version; nil if there is none
	free    int64         // when the bucket's debt ends, in limiter microseconds
	tail    int64         // the same by the store's clock, once the refunds that are on their way are accepted
	stored  int64         // stored permits, which take no time
	floor   engine.Floor  // of a class below the highest
}

// effective returns the configuration in force, as far as this process knows.
func (m *member) effective() *permit.Terms {
	t := m.Limiter.Effective()
	if m.known != nil && m.known.Version >= t.Version {
		t = m.known
	}
	if t == m.Limiter.Own && m.terms != nil && m.terms.Version > t.Version {
		return m.terms
	}
	return t
}

// outdates reports whether the process gives up a part of a grant. See [engine.Limiter.Outdates].
func (m *member) outdates(p *part) bool {
	return m.terms != nil && m.Limiter.Outdates(p.terms, p.place.Epoch, m.terms, m.epoch)
}

// begin begins the next batch, without requests. It takes the session.
func (m *member) begin(b *permit.Batch, config *Config) {
	l, c := m.Limiter, m.Limiter.Coordinator
	*b = permit.Batch{
		Name: c.Name, Key: c.Key, Terms: l.Own, Known: m.effective(), Initial: l.Initial, Transient: l.Transient,
		Requests: b.Requests[:0], Epoch: engine.NewEpoch(), LocalMicros: m.micros, Session: m.session,
	}
	if m.session = nil; b.Session == nil && config.NewSession != nil && !config.Immediate {
		b.Session = config.NewSession()
	}
	if m.server.Known() {
		server, received := m.server.Last()
		b.ServerMicros, b.ServerRead = server, clock.At(received)
	}
}

// keepSession takes back the session of a batch that has landed. That of a late batch is released.
func (m *member) keepSession(b *permit.Batch, late bool) {
	if s := b.Session; m.session == nil && !late {
		m.session = s
	} else if s != nil {
		s.Release()
	}
}

// giveBack adds a refund to the next batch.
func (m *member) giveBack(r *refund) { m.refunds = append(m.refunds, r) }

// addRefunds moves the refunds that a batch has room for to its requests, the newest first, because that is at the bucket's tail.
func (m *member) addRefunds(to []own) []own {
	slices.SortStableFunc(m.refunds, func(a, b *refund) int { return int(b.give.ID - a.give.ID) })
	n := min(len(m.refunds), permit.MaxBatch/4)
	for _, r := range m.refunds[:n] {
		to = append(to, own{refund: r})
	}
	m.refunds = slices.Delete(m.refunds, 0, n)
	return to
}

// lose counts permits that did not go back.
func (m *member) lose(permits int64) {
	if permits > 0 {
		m.lost.Add(permits)
		m.Limiter.Lost(permits)
	}
}

// seen returns the bucket as of the last reply.
func (m *member) seen(now int64) engine.Seen {
	offset := m.offset.Micros()
	return engine.Seen{Terms: m.terms, Balance: permit.Balance{Next: m.free - offset, Stored: float64(m.stored)}, Now: now - offset}
}

// report reports a failed batch to the monitor of the store.
func (m *member) report(err error) {
	c := m.Limiter.Coordinator
	if c.Health != nil && (c.Away(err) || c.NotAsked(err)) {
		c.Health.Suspect(c)
	}
}

// heard records a reply in time for the server's clock and the monitor of the store. The store must not be Immediate.
func (m *member) heard(out *permit.Outcome, sent, received time.Duration) {
	m.server.Heard(out.ClockMicros, sent, received)
	if h := m.Limiter.Coordinator.Health; h != nil {
		h.Answered(received - sent - out.LockWait)
	}
}

// observe records the bucket that a reply shows. The reply was decided at the limiter's time received, or earlier, and its trip took trip microseconds. It
// returns by how much grants of the bucket have moved since the reply before.
func (m *member) observe(out *permit.Outcome, received, trip int64) shift {
	b := &out.Bucket
	m.offset.Observe(received-out.NowMicros, trip)
	m.terms, m.epoch = b.Terms, b.Epoch
	if b.Terms.Version > 0 && (m.known == nil || b.Terms.Version >= m.known.Version) {
		m.known = b.Terms
	} else if b.Terms.Version == 0 {
		m.known = nil
	}
	m.free, m.tail, m.stored = b.Next+m.offset.Micros(), b.Next, 0
	if !b.Terms.WarmsUp {
		m.stored = int64(b.Stored)
	}
	shorter, longer, held := m.penalty.Observe(b.PausedMicros, b.HeldUntilMicros, out.NowMicros)
	switch {
	case held:
		return shift{shorter, longer, b.HeldUntilMicros + m.offset.Micros()}
	case shorter > 0:
		return shift{shorter, longer, math.MinInt64}
	}
	return shift{}
}

// heldBack gives a lower class its credit for the time in which the bucket's debt held it back. next is the size of the request that was refused.
func (m *member) heldBack(next, now int64) {
	m.floor.Earn(m.effective(), m.Limiter.Coordinator.Class, m.Limiter.Floor, m.free-now, next, now)
}

// dueOf returns when the last of permits would be due, if all that the waiters ahead want is granted first. waiting is what those and the call want.
func (m *member) dueOf(permits, waiting, now int64) int64 {
	t := m.effective()
	n := float64(waiting)*float64(m.Weight) - float64(m.stored)
	if t.PayLater {
		n -= float64(permits * m.Weight)
	}
	return max(now, m.free) + int64(min(max(0, n)*t.Interval, permit.MaxExact))
}

// shift is how a penalty, or its early end, moves what a process owns of a bucket. The zero value moves nothing.
type shift struct {
	shorter int64 // by how much the previous penalty ended early, in microseconds
	longer  int64 // the least duration of a new penalty
	until   int64 // the end of the penalty, in limiter microseconds; math.MinInt64 if none has begun
}

// move sets the due time of a part that was taken. What is due already stays so, unless a penalty lasts.
func (s shift) move(p *part, now int64) {
	if p.due > now {
		p.due = max(now, p.due-s.shorter) + s.longer
	}
	p.due = max(p.due, s.until)
}

// look bounds how much of a bucket's time a batch asks for, see lookAhead in internal/engine.
type look struct {
	horizon int64
	ahead   int64 // time that the process owns, or asks for
	counted int64 // ahead when most was computed
	permits int64 // for which most was computed
	most    int64 // the longest wait of a request
	trip    int64 // duration of a round trip
	stored  int64 // stored permits that are left, which take no time
	terms   *permit.Terms
	own     engine.Class
	class   engine.Class // for which most was computed
	floor   engine.Floor // the credit that is left
}

// look returns the bound of the next batch, while the process owns ahead microseconds of the bucket's future time.
func (m *member) look(ahead int64) look {
	t := m.effective()
	return look{terms: t, horizon: engine.Horizon(t), ahead: ahead, trip: m.offset.Trip(), stored: m.stored, own: m.Limiter.Coordinator.Class, floor: m.floor}
}

// tells reports whether a refusal tells a member's wait rather than another's: for permit.All the longest, for permit.Any the shortest.
func tells(choice permit.Choice, wait, other int64) bool {
	if choice == permit.All {
		return wait > other
	}
	return wait < other
}

// reach returns the longest wait of a reservation. It does not wait in the queue for the time that the look-ahead of a lower class lacks, so it is granted
// no later than that. See engine.Coordinator.LookAhead.
func (l *look) reach(n int64) int64 {
	if l.own == engine.Normal {
		return permit.MaxExact
	}
	return engine.LookAhead(l.terms, l.floor.Next(l.own, n), n, 0, l.trip)
}

// bound returns the longest wait of a request of a waiter. It reports whether there is any use in asking for another waiter. The wait is computed
// again in steps, so most requests of a batch are equal.
func (l *look) bound(permits int64) (most int64, more bool) {
	if c := l.floor.Next(l.own, permits); l.permits != permits || l.class != c || l.ahead-l.counted > l.horizon/16 {
		l.permits, l.class, l.counted, l.most = permits, c, l.ahead, engine.LookAhead(l.terms, c, permits, l.ahead, l.trip)
	}
	if l.stored -= permits; l.stored < 0 {
		l.ahead += engine.CostFromCold(l.terms, min(-l.stored, permits))
	}
	return l.most, l.ahead <= 2*l.horizon
}
