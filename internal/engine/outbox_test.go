package engine

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// recorder is a book that records the requests of each batch: the operation of each, and of a refund the tag.
type recorder struct {
	*book
	mu      sync.Mutex
	batches []string
}

func (s *recorder) Decide(ctx context.Context, b *permit.Batch) error {
	var ops []string
	for i := range b.Requests {
		switch r := &b.Requests[i]; r.Op {
		case permit.GiveBack:
			ops = append(ops, fmt.Sprintf("refund %d", r.Back.Tag))
		case permit.Hold:
			ops = append(ops, "penalty")
		case permit.Reset:
			ops = append(ops, "reset")
		case permit.SetRate:
			ops = append(ops, "rate")
		default:
			ops = append(ops, fmt.Sprintf("take %d", r.Permits))
		}
	}
	s.mu.Lock()
	s.batches = append(s.batches, strings.Join(ops, ", "))
	s.mu.Unlock()
	return s.book.Decide(ctx, b)
}

// since returns the batches after the first n.
func (s *recorder) since(n int) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.batches[n:]
}

// opened returns a limiter of a full bucket, on a store whose trips take 50 ms, and a function that begins a call in a goroutine of its own
// and returns once the call waits.
func opened(size int64) (s *recorder, l *Limiter, call func(func())) {
	s = &recorder{book: &book{terms: terms(time.Second, size), trip: 50 * time.Millisecond}}
	l = open(s.book)
	l.Coordinator.Store = s
	return s, l, func(f func()) {
		go f()
		synctest.Wait()
	}
}

// operate sends an operation.
func operate(l *Limiter, op permit.Op) {
	q := NewOperation(l, &Operation{Request: permit.Request{Op: op}}, 0)
	l.Coordinator.Wait(context.Background(), q, l.Coordinator.Submit(context.Background(), q))
}

// giveBack returns a call of Return that must not fail.
func giveBack(t *testing.T, l *Limiter, q *Call) func() {
	return func() {
		if err := l.Coordinator.Return(context.Background(), q); err != nil {
			t.Error(err)
		}
	}
}

// The calls that arrive while a batch is in flight share the next one, in the order of their arrival. But a penalty and a change of the
// rate are the first call of their batch, and a reset is the first request of its own (Q2).
func TestOrderOfABatch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, l, call := opened(10)
		unused := reserveFor(l, 3)
		call(func() { try(context.Background(), l, 0) })
		begun := len(s.since(0))
		call(func() { reserveFor(l, 2) })
		call(func() { operate(l, permit.Hold) })
		call(func() { reserveFor(l, 4) })
		call(func() { operate(l, permit.SetRate) })
		call(func() { reserveFor(l, 5) })
		call(giveBack(t, l, unused))
		call(func() { operate(l, permit.Reset) })
		time.Sleep(time.Second)
		require.Equal(t, []string{"refund 1, take 2", "penalty, take 4", "rate, take 5", "reset"}, s.since(begun)[:4])
	})
}

// Refunds are sent before calls, the newest first: only the permits at the bucket's tail can be refunded.
func TestNewestRefundFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, l, call := opened(10)
		first, second := reserveFor(l, 1), reserveFor(l, 2)
		call(func() { operate(l, permit.Hold) })
		begun := len(s.since(0))
		call(func() { reserveFor(l, 4) })
		call(giveBack(t, l, first))
		call(giveBack(t, l, second))
		time.Sleep(time.Second)
		require.Equal(t, "refund 2, refund 1, take 4", s.since(begun)[0])
	})
}

// A batch has one configuration: calls of a limiter with another one wait for the next.
func TestBatchOfOneConfiguration(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, l, call := opened(10)
		other := &Limiter{Coordinator: l.Coordinator, Own: terms(2*time.Second, 10), MaxWaiters: 100}
		call(func() { operate(l, permit.Hold) })
		begun := len(s.since(0))
		call(func() { reserveFor(l, 1) })
		call(func() { reserveFor(l, 2) })
		call(func() { reserveFor(other, 3) })
		call(func() { reserveFor(l, 4) })
		time.Sleep(time.Second)
		require.Equal(t, []string{"take 1, take 2", "take 3", "take 4"}, s.since(begun))
	})
}

// A reservation is refunded once, and from then on the snapshot refuses no caller.
func TestReturnIsSentOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, l, call := opened(2)
		q := reserveFor(l, 2)
		require.True(t, l.Coordinator.View.HasSnapshot(), "the bucket is empty")
		call(func() { operate(l, permit.Hold) })
		begun := len(s.since(0))
		call(giveBack(t, l, q))
		require.False(t, l.Coordinator.View.HasSnapshot(), "the permits are on their way back")
		call(giveBack(t, l, q))
		time.Sleep(time.Second)
		require.Equal(t, []string{"refund 1"}, s.since(begun))
	})
}

// A waiter beyond the look-ahead is asked for again when it may be granted, not only when the bucket is read.
func TestAlarmAsksAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &book{terms: terms(100*time.Millisecond, 1)}
		l, other := open(s), open(s)
		reserveFor(other, 11)
		began := l.Coordinator.Now()
		go try(context.Background(), l, time.Minute)
		synctest.Wait()
		l.Coordinator.Inspect(func(s State) {
			require.Equal(t, 1, s.Uncovered)
			require.InDelta(t, 150_000, s.AlarmAt-began, 125_000)
		})
		time.Sleep(time.Minute)
	})
}

// A newcomer behind waiters that were refused is not refused by an old reply. It makes the process ask, and is granted if there is room.
func TestOldReplyRefusesNoNewcomer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &book{terms: terms(100*time.Millisecond, 1)}
		l, other := open(s), open(s)
		ahead := reserveFor(other, 30)
		go try(context.Background(), l, time.Minute)
		synctest.Wait()
		silent(l.Coordinator, time.Minute)
		require.NoError(t, other.Coordinator.Cancel(context.Background(), ahead))
		time.Sleep(200 * time.Millisecond)
		r := try(context.Background(), l, time.Second)
		require.NoError(t, r.Err)
		require.True(t, r.Granted)
	})
}

// A late flight gives up the lock that it keeps, and leaves the session to the flight that landed last.
func TestLateFlightReleasesItsLock(t *testing.T) {
	late, last := &flight{late: true}, &flight{}
	late.batch.Session, last.batch.Session = new(keepsLock), new(keepsLock)
	var f inFlight
	f.keep(last)
	f.overdue = append(f.overdue, late)
	f.keep(f.landed(&late.batch, true))
	require.Same(t, last.batch.Session, f.session)
	require.True(t, f.kept())
	require.True(t, late.batch.Session.(*keepsLock).released)
}
