package engine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// steady is the arithmetic of a bursty bucket whose interval is a whole number of microseconds.
type steady struct{ interval, most int64 }

func (s steady) After(b permit.Balance, n int64) (permit.Balance, bool) {
	spend := min(n, int64(b.Stored))
	b.Stored -= float64(spend)
	b.Next += (n - spend) * s.interval
	return b, b.Next <= permit.MaxExact
}

func (s steady) Resync(b permit.Balance, now int64) permit.Balance {
	if now > b.Next {
		b.Stored = math.Floor(min(float64(s.most), b.Stored+float64((now-b.Next)/s.interval)))
		b.Next = now
	}
	return b
}

// terms returns the configuration of a bucket of a size that grants a permit each interval.
func terms(interval time.Duration, size int64) *permit.Terms {
	s := steady{interval.Microseconds(), size}
	return &permit.Terms{Arithmetic: s, Text: fmt.Sprint("steady ", s, " 0"), Interval: float64(s.interval), Max: float64(size)}
}

// book is a store with one bucket, in this process.
type book struct {
	mu      sync.Mutex
	trip    time.Duration // of each batch
	terms   *permit.Terms
	balance permit.Balance
	seq     int64
	batches atomic.Int64
}

func (s *book) Decide(ctx context.Context, b *permit.Batch) error {
	if s.trip > 0 {
		select {
		case <-time.After(s.trip):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.batches.Add(1)
	now := b.LocalMicros()
	s.balance = s.terms.Resync(s.balance, now)
	for i := range b.Requests {
		r := &b.Requests[i]
		r.Grant = permit.Grant{}
		switch r.Op {
		case permit.Take:
			after, _ := s.terms.After(s.balance, r.Permits)
			if r.Grant.WaitMicros = after.Next - now; r.Grant.WaitMicros > r.MaxWaitMicros {
				continue
			}
			r.Grant.OK = true
			r.Grant.Place = permit.Place{Epoch: 1, Tag: s.seq + 1, Prev: s.seq, Before: s.balance, After: after}
			s.balance = after
			s.seq++
		case permit.GiveBack:
			if r.Grant.OK = r.Back.Tag == s.seq; r.Grant.OK {
				s.balance = r.Back.To
			}
		}
	}
	b.Outcome = permit.Outcome{NowMicros: now, ClockMicros: now, Bucket: permit.Bucket{Balance: s.balance, Epoch: 1, Terms: s.terms}}
	return nil
}

// open returns a limiter in a process of its own.
func open(s *book) *Limiter {
	away := func(err error) bool { return errors.Is(err, permit.ErrStoreTimeout) }
	return &Limiter{Own: s.terms, MaxWaiters: 100, Coordinator: New(Config{
		Name: "x", Key: "x", Store: s, Clock: clockwork.NewRealClock(), Timeout: time.Second,
		Health: NewHealth(new(outage.Group), away, func(func(*Coordinator) bool) {}),
		Env: Env{
			Away: away, NotAsked: func(error) bool { return false }, Failure: func(_ string, err error) error { return err },
			Probe: func(context.Context, string) error { return nil },
		},
	})}
}

// try asks for a permit within a timeout.
func try(ctx context.Context, l *Limiter, timeout time.Duration) Result {
	q := NewCall(l, 1, timeout.Microseconds(), 0)
	if deadline, ok := ctx.Deadline(); ok {
		q.deadline = clock.Of(deadline)
	}
	return l.Coordinator.Wait(ctx, q, l.Coordinator.Submit(ctx, q))
}

// reserveFor reserves permits, whenever they are due.
func reserveFor(l *Limiter, n int64) *Call {
	q := NewReservation(l, n, permit.MaxExact, 0)
	l.Coordinator.Wait(context.Background(), q, l.Coordinator.Submit(context.Background(), q))
	return q
}

// silent lets a coordinator neither listen nor ask for a while.
func silent(c *Coordinator, d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.View.at = c.Now() + d.Microseconds()
	c.queue.line.AskAfter(c.View.at)
}

// bubble runs a test in virtual time, and lets the probes end.
func bubble(t *testing.T, test func(t *testing.T)) {
	synctest.Test(t, func(t *testing.T) {
		defer time.Sleep(time.Minute)
		test(t)
	})
}

// Permits are granted in order, and each when it is due.
func TestQueueInOrder(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &book{terms: terms(100*time.Millisecond, 1), trip: time.Millisecond}
		l := open(s)
		began := time.Now()
		var mu sync.Mutex
		var order []int
		var callers sync.WaitGroup
		for i := range 30 {
			callers.Go(func() {
				r := try(context.Background(), l, time.Minute)
				assert.NoError(t, r.Err)
				assert.True(t, r.Granted)
				mu.Lock()
				defer mu.Unlock()
				order = append(order, i)
			})
			synctest.Wait()
		}
		callers.Wait()
		for i := range order {
			require.Equal(t, i, order[i])
		}
		require.InDelta(t, 2900, time.Since(began).Milliseconds(), 110)
		require.Less(t, s.batches.Load(), int64(30), "calls share batches")
		l.Coordinator.Inspect(func(s State) { require.Zero(t, s.Calls) })
	})
}

// A bucket without a recent reply is read while there are waiters, by a batch without requests and without a caller.
func TestListens(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &book{terms: terms(time.Second, 1)}
		l := open(s)
		q := reserveFor(l, 10)
		before := s.batches.Load()
		time.Sleep(5 * time.Second)
		require.InDelta(t, 10, s.batches.Load()-before, 2, "each %d µs", ListenMicros)
		l.Coordinator.Inspect(func(s State) { require.Equal(t, 1, s.Calls, "the reservation") })
		require.NoError(t, l.Coordinator.Cancel(context.Background(), q))
		time.Sleep(time.Second)
		before = s.batches.Load()
		time.Sleep(5 * time.Second)
		require.Equal(t, before, s.batches.Load(), "nothing waits")
	})
}

// A store that hangs fails its callers in time, and what comes late serves the next caller or is refunded.
func TestHangingStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan struct{})
		s := &book{terms: terms(time.Second, 5)}
		l := open(s)
		require.True(t, try(context.Background(), l, 0).Granted)
		l.Coordinator.Store = hung{s, release}
		began := time.Now()
		r := try(context.Background(), l, time.Minute)
		require.ErrorIs(t, r.Err, permit.ErrStoreTimeout)
		require.Equal(t, time.Second, time.Since(began))
		time.Sleep(time.Millisecond) // the deadline of its batch passes in the same instant as its own
		l.Coordinator.Inspect(func(s State) { require.Equal(t, 1, s.Overdue) })
		close(release)
		synctest.Wait()
		l.Coordinator.Inspect(func(s State) { require.Zero(t, s.Overdue) })
	})
}

// hung is a store that hangs until it is released, whatever the context.
type hung struct {
	Store
	release chan struct{}
}

func (s hung) Decide(ctx context.Context, b *permit.Batch) error {
	<-s.release
	return s.Store.Decide(ctx, b)
}

// A call that is refused after a while, because another process has reserved permits, has no error: the context's deadline is far off.
func TestRefusedAfterAWhile(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &book{terms: terms(100*time.Millisecond, 1)}
		l, other := open(s), open(s)
		reserveFor(other, 24)
		go func() {
			time.Sleep(1100 * time.Millisecond) // between two times at which it listens
			silent(l.Coordinator, 700*time.Millisecond)
			time.Sleep(600 * time.Millisecond) // the caller has 850 ms left, less than the look-ahead
			reserveFor(other, 3)
		}()
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		r := try(ctx, l, 2550*time.Millisecond)
		require.NoError(t, r.Err)
		require.False(t, r.Granted)
	})
}

// A call that the store has refused so far is refused at its timeout, though the store is not asked again until later.
func TestRefusedAtTheTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const timeout = 2550 * time.Millisecond
		s := &book{terms: terms(100*time.Millisecond, 1), trip: 10 * time.Millisecond}
		l := open(s)
		reserveFor(l, 20)
		time.AfterFunc(100*time.Millisecond, func() { silent(l.Coordinator, time.Minute) })
		var callers sync.WaitGroup
		for i := range 5 { // the first is asked for, and the others arrive while it is in flight, or waits
			callers.Go(func() {
				time.Sleep(time.Duration(i) * 6 * time.Millisecond)
				own := timeout + time.Duration(i%3)*time.Millisecond
				began := time.Now()
				r := try(context.Background(), l, own)
				assert.NoError(t, r.Err)
				assert.False(t, r.Granted)
				assert.Equal(t, own, time.Since(began).Truncate(time.Millisecond), "call %d", i)
			})
		}
		callers.Wait()
	})
}

// When a caller in front leaves, a larger request takes the permits of those behind it. A caller whose permits are then too late is refused
// at once.
func TestExpiredIsRefusedAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := open(&book{terms: terms(100*time.Millisecond, 0)})
		c := l.Coordinator
		now := c.Now()
		var calls []*Call
		c.mu.Lock()
		c.View.at = now
		for i, permits := range []int64{1, 2, 1, 1, 3} {
			q := NewCall(l, permits, permit.MaxExact-1, 0)
			if q.Came = now; i == 3 {
				q.timeout = 600_000
			}
			c.callers.count++
			c.queue.join(q, now)
			calls = append(calls, q)
		}
		for _, s := range []struct{ call, begins, permits int64 }{{0, 100_000, 2}, {1, 400_000, 1}, {2, 700_000, 2}, {4, 1_000_000, 3}} {
			c.queue.line.Grant(&calls[s.call].Waiter, &schedule.Grant{Terms: &granted{l.Own, l}, Before: permit.Balance{Next: now + s.begins},
				Permits: s.permits, Epoch: 1, Tag: s.begins, Prev: s.begins - 1}, now)
		}
		require.Nil(t, c.queue.line.Uncovered())
		c.dispatch(now)
		c.mu.Unlock()
		require.True(t, c.leave(calls[0], context.Canceled))
		synctest.Wait()
		var states []state
		c.mu.Lock()
		for _, q := range calls {
			states = append(states, q.state)
		}
		c.mu.Unlock()
		require.Equal(t, []state{left, pending, pending, refused, pending}, states)
		time.Sleep(2 * time.Second)
		c.Inspect(func(s State) { require.Zero(t, s.Calls) })
	})
}

// Spare permits serve the next caller, so it is not refused by what a reply showed before.
func TestSpareDropsTheSnapshot(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := open(&book{terms: terms(time.Second, 0)})
		c := l.Coordinator
		c.mu.Lock()
		defer c.mu.Unlock()
		at, server := c.moment(), c.Micros()
		c.View.snapshot.Store(&snapshot{terms: l.Own, at: permit.Balance{Next: server + 10_000_000}, clock: server, sent: at.mono, local: at.local})
		_, refused := c.View.Refuses(l, 1, 2_000_000)
		require.True(t, refused)
		c.queue.line.Grant(new(schedule.Waiter[*Call]), &schedule.Grant{Terms: &granted{l.Own, l},
			Before: permit.Balance{Next: server}, Permits: 1, Epoch: 1, Tag: 2, Prev: 1, Offset: at.local - server}, at.local)
		c.dispatch(at.local)
		_, refused = c.View.Refuses(l, 1, 2_000_000)
		require.False(t, refused)
	})
}

// A waiter whose permits of an old epoch have lapsed may get permits that its process owns of the new one. Its due time sets the alarm.
func TestRejoinSetsTheAlarm(t *testing.T) {
	var q queue
	q.init(true, Normal, new(callers), new(View))
	under := &granted{terms(time.Second, 1), new(Limiter)}
	wait := func(came, due, epoch int64) *Call {
		w := &Call{Waiter: schedule.Waiter[*Call]{Permits: 1, Came: came, Until: schedule.Forever}, line: q.line}
		w.Value = w
		q.line.Join(&w.Waiter)
		before := permit.Balance{Next: due - time.Second.Microseconds()}
		q.line.Grant(&w.Waiter, &schedule.Grant{Terms: under, Before: before, Permits: 1, Epoch: epoch, Tag: 1}, came)
		return w
	}
	old := wait(1, 2_000_000, 1)
	q.split()
	gone := wait(2, 3_000_000, 2)
	gone.line.Leave(&gone.Waiter, 3)
	require.True(t, q.line.Spare())

	w, _ := q.next(2_500_000) // 500 ms late
	require.Nil(t, w)
	require.Same(t, q.line, old.line)
	require.True(t, old.covered())
	require.EqualValues(t, 3_000_000, q.due)
	w, at := q.next(3_000_000)
	require.Same(t, old, w)
	require.EqualValues(t, 3_000_000, at)
}

// The next batch uses the session of the flight that landed last. A late session gives up its lock.
func TestLateSession(t *testing.T) {
	l := open(&book{terms: terms(time.Second, 1)})
	c := l.Coordinator
	late, last := &flight{late: true, limiter: l}, &flight{limiter: l}
	late.batch.Session, last.batch.Session = new(keepsLock), new(keepsLock)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deliver(late, &permit.Outcome{}, errors.New("failed"), c.moment())
	c.deliver(last, &permit.Outcome{}, errors.New("failed"), c.moment())
	require.Same(t, last.batch.Session, c.inFlight.session)
	require.True(t, late.batch.Session.(*keepsLock).released)
	require.False(t, last.batch.Session.(*keepsLock).released)
}

// keepsLock is a session that keeps a lock until it is released.
type keepsLock struct{ released bool }

func (s *keepsLock) Release()   { s.released = true }
func (s *keepsLock) Kept() bool { return !s.released }
func (*keepsLock) Waits() bool  { return false }

// An alarm may be late, as in a process that was stopped. Then waiters whose timeouts have ended are not ahead of the next caller.
func TestLateAlarm(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &book{terms: terms(100*time.Millisecond, 0)}
		reserveFor(open(s), 20)
		l := open(s)
		var waiters sync.WaitGroup
		for range 10 {
			waiters.Go(func() { assert.False(t, try(context.Background(), l, 3*time.Second).Granted) })
		}
		synctest.Wait()
		c := l.Coordinator
		silent(c, 4*time.Second)
		c.mu.Lock()
		require.NotZero(t, c.queue.line.Wanted())
		c.alarm.timer.Stop()
		c.mu.Unlock()
		time.Sleep(3500 * time.Millisecond)
		c.mu.Lock()
		c.View.inTime = c.Now() // as if a reply had just come
		c.mu.Unlock()
		require.True(t, try(context.Background(), l, 900*time.Millisecond).Granted)
		waiters.Wait()
	})
}
