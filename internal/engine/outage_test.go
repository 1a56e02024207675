package engine

import (
	"context"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// A probe has the longest store timeout of the limiters, whichever of them was first.
func TestLongestTimeoutProbes(t *testing.T) {
	h := NewHealth(new(outage.Group), func(error) bool { return true }, func(func(*Coordinator) bool) {})
	for _, timeout := range []time.Duration{2, 1, 5, 3} {
		h.serves(timeout * time.Second)
	}
	c := &Config{Health: h}
	require.Equal(t, 5*time.Second, c.probe().Timeout)
}

// holds is a store that records for how long a bucket was held back last.
type holds struct{ micros int64 }

func (s *holds) Decide(_ context.Context, b *permit.Batch) error {
	for i := range b.Requests {
		if r := &b.Requests[i]; r.Op == permit.Hold {
			s.micros, r.Grant.OK = r.HoldMicros, true
		}
	}
	now := b.LocalMicros()
	b.Outcome = permit.Outcome{NowMicros: now, ClockMicros: now, Bucket: permit.Bucket{Balance: permit.Balance{Next: now}, Epoch: 1, Terms: b.Terms}}
	return nil
}

// The local share begins once in an outage: empty, and after the permits that the process has reserved in the bucket itself (O2).
func TestShareBeginsAfterReservations(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := open(&book{terms: terms(time.Second, 1)})
		there := new(holds)
		here := New(Config{Name: "x", Key: "x", Store: there, Immediate: true, Timing: LimiterClock, Clock: clockwork.NewRealClock()})
		l.Coordinator.Env.LocalShare = func() *Coordinator { return here }
		reserveFor(l, 5)
		local := &Limiter{Own: l.Own, MaxWaiters: 100}
		l.Coordinator.LocalShare(local)
		require.Same(t, here, local.Coordinator)
		require.InDelta(t, 4_000_000, there.micros, 10, "one of the five permits was stored")
		there.micros = 0
		l.Coordinator.LocalShare(local)
		require.Zero(t, there.micros, "it has begun")
	})
}

// A lease does not serve a waiter that other permits of the process wait for: they would lapse, and those of the lease with them.
func TestLeaseBesideOwnedPermits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := open(&book{terms: terms(time.Second, 1)})
		l.Prefetch = 10_000_000
		c := l.Coordinator
		c.mu.Lock()
		defer c.mu.Unlock()
		now := c.Now()
		e := &lease{limiter: l, permits: 10, local: now, until: now + l.Prefetch, half: 10, left: Seen{Terms: l.Own}}
		c.leases.current.Store(e)
		c.queue.line.Grant(new(schedule.Waiter[*Call]), &schedule.Grant{Terms: &granted{l.Own, l},
			Before: permit.Balance{Next: now}, Permits: 1, Epoch: 1, Tag: 1}, now)
		q := NewCall(l, 3, permit.MaxExact, 0)
		q.Came = now
		c.callers.count++
		c.queue.join(q, now)
		c.leases.serve(now)
		require.Zero(t, e.used.Load())
		require.Equal(t, pending, q.state)
		c.queue.abandon(q, now)
		c.leases.current.Store(nil)
	})
}

// A call that ended while a reply to its batch was on the way is not reused: the reply will refer to it.
func TestCallInFlightIsNotReused(t *testing.T) {
	l := open(&book{terms: terms(time.Second, 1)})
	c := callers{count: 2}
	for _, f := range []*flight{nil, {}} {
		q := NewCall(l, 1, 0, 0)
		q.flight = f
		c.end(q, refused, nil)
		q.Recycle()
		require.Equal(t, f != nil, q.limiter == l)
	}
	require.Zero(t, c.count)
}

// After a batch the bucket grants from the balance before its first grant, or else from the one that the batch has left.
func TestBalanceOfAFlight(t *testing.T) {
	f := &flight{given: 1, calls: []*Call{{operation: new(Operation)}, {}, {}}}
	f.batch.Requests = make([]permit.Request, 4) // a refund, the operation, two calls
	out := &permit.Outcome{Bucket: permit.Bucket{Balance: permit.Balance{Next: 9}}}
	require.EqualValues(t, 9, f.begins(out))
	f.batch.Requests[3].Grant = permit.Grant{OK: true, Place: permit.Place{Before: permit.Balance{Next: 7}}}
	require.EqualValues(t, 7, f.begins(out))
	f.batch.Requests[2].Grant = permit.Grant{OK: true, Place: permit.Place{Before: permit.Balance{Next: 5}}}
	require.EqualValues(t, 5, f.begins(out))
}
