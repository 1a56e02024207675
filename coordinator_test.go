package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// A process that only ever reserves, and never cancels, remembers nothing.
func TestHistoryIsBounded(t *testing.T) {
	l, err := NewSmoothBursty("x", 1e6, WithMaxPermits(1e6), WithInitialPermits(1e6))
	require.NoError(t, err)
	for range 10_000 {
		_, err := l.Reserve(background, 1)
		require.NoError(t, err)
	}
	require.True(t, look(l).Idle)
	require.Zero(t, Waiting(l))
}

// Limiters of one name on one store share one line, for as long as one of them is used.
func TestLinesAreShared(t *testing.T) {
	store := NewMemoryStore()
	open := func(name string, s Store) *RateLimiter {
		l, err := NewSmoothBursty(name, 5, WithStore(s))
		require.NoError(t, err)
		return l
	}
	a := open("x", store)
	require.Same(t, a.limiter.Coordinator, open("x", store).limiter.Coordinator)
	require.NotSame(t, a.limiter.Coordinator, open("y", store).limiter.Coordinator)
	require.NotSame(t, a.limiter.Coordinator, open("x", NewMemoryStore()).limiter.Coordinator)
	require.NotSame(t, open("x", uncomparable{}).limiter.Coordinator, open("x", uncomparable{}).limiter.Coordinator)
}

type uncomparable struct {
	Store
	_ []int
}

// Three processes use a store that is often late and sometimes silent. Their callers wait, give up and cancel at random. The window bound
// holds on all permits that were used, except those of callers that were woken late; every caller returns in time.
func TestSlowStore(t *testing.T) {
	seeds := 60
	if os.Getenv("TOKENBUCKET_LONG") != "" {
		seeds = 3000
	}
	var used, late int
	for range seeds {
		synctest.Test(t, func(t *testing.T) {
			const rate, timeout = 20.0, 100 * time.Millisecond
			size := []float64{0, 1, 5}[rand.IntN(3)]
			shared := NewMemoryStore()
			delay := func() time.Duration {
				if rand.IntN(30) == 0 {
					return rand.N(4 * timeout)
				}
				return rand.N(timeout / 20)
			}
			var mu sync.Mutex
			var events []event
			largest := 0.0
			var callers sync.WaitGroup
			for range 3 {
				l, err := NewSmoothBursty("x", rate, WithMaxPermits(size), WithStore(&slow{shared, delay}),
					WithStoreTimeout(timeout), Logged(t))
				require.NoError(t, err)
				for range 8 {
					callers.Go(func() {
						for range 10 {
							n := 1 + rand.IntN(3)
							c, cancel := context.WithTimeout(context.Background(), rand.N(2*time.Second))
							began := time.Now()
							r, err := l.TryReserve(c, n, time.Second)
							require.LessOrEqual(t, time.Since(began), timeout+5*time.Millisecond, "%v", err)
							switch {
							case errors.Is(err, ErrStoreTimeout):
								mu.Lock()
								late++
								mu.Unlock()
							case err == nil && r.OK():
								select {
								case <-r.Ready():
									mu.Lock()
									events = append(events, event{time.Now().UnixMicro(), float64(n)})
									largest = max(largest, float64(n))
									mu.Unlock()
								case <-c.Done():
									_ = r.Cancel(context.Background())
								case <-time.After(rand.N(500 * time.Millisecond)):
									_ = r.Cancel(context.Background())
								}
							}
							cancel()
							time.Sleep(rand.N(200 * time.Millisecond))
						}
					})
				}
			}
			callers.Wait()
			time.Sleep(time.Minute)                            // for the last late replies
			late := timeout.Seconds() + schedule.Tolerated/1e6 // an answer, and a permit that waits for it
			require.LessOrEqual(t, worst(events, rate), max(size, largest)+rate*late)
			used += len(events)
		})
	}
	t.Logf("%d reservations used, %d timed out at the store", used, late)
	require.Greater(t, used, seeds*10)
	require.Greater(t, late, seeds)
}

// A caller gives up while its question is under way, and another process takes behind what it is granted, so that it cannot go back. It goes
// to the reservation that waits for the next batch, and not to one that comes later.
func TestSpareGoesToTheFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const ms = time.Millisecond
		memory := NewMemoryStore()
		open := func() *RateLimiter {
			store := &distant{Store: memory}
			store.trip.Store(int64(50 * ms))
			l, err := NewSmoothBursty("x", 10, WithMaxPermits(0), WithStore(store), Logged(t))
			require.NoError(t, err)
			return l
		}
		l, other := open(), open()
		began := time.Now()
		var mu sync.Mutex
		due := make(map[string]time.Duration)
		reserve := func(after time.Duration, l *RateLimiter, who string) {
			time.AfterFunc(after, func() {
				r, err := l.Reserve(background, 1)
				require.NoError(t, err)
				<-r.Ready()
				mu.Lock()
				defer mu.Unlock()
				due[who] = time.Since(began).Round(ms)
			})
		}
		reserve(0, l, "first") // under way until 50 ms
		time.AfterFunc(10*ms, func() {
			ctx, cancel := context.WithCancel(background)
			time.AfterFunc(70*ms, cancel)
			_, err := l.Acquire(ctx, 1)
			require.ErrorIs(t, err, context.Canceled)
		})
		reserve(20*ms, l, "beside it")     // both are under way until 100 ms
		reserve(70*ms, other, "elsewhere") // until 120 ms; the refund until 150 ms
		reserve(110*ms, l, "waits")
		reserve(151*ms, l, "comes later")
		time.Sleep(time.Second)
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, map[string]time.Duration{
			"first": 150 * ms, "beside it": 250 * ms, "waits": 350 * ms, "elsewhere": 450 * ms, "comes later": 550 * ms,
		}, due)
	})
}

// A reservation that waits for the next batch gets the permits of a caller that has given up. There is no other waiter, and nothing to
// send; the reservation is ready at its due time all the same.
func TestSpareIsReadyInTime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const ms = time.Millisecond
		store := &distant{Store: NewMemoryStore()}
		store.trip.Store(int64(50 * ms))
		l, err := NewSmoothBursty("x", 10, WithMaxPermits(0), WithStore(store), Logged(t))
		require.NoError(t, err)
		began := time.Now()
		ctx, cancel := context.WithCancel(background)
		time.AfterFunc(30*ms, cancel)
		time.AfterFunc(40*ms, func() {
			r, err := l.Reserve(background, 1)
			require.NoError(t, err)
			<-r.Ready()
			require.Equal(t, 150*ms, time.Since(began).Round(ms))
			require.EqualValues(t, 1, store.calls.Load())
		})
		r, err := l.Reserve(ctx, 1) // decided at 50 ms
		require.ErrorIs(t, err, context.Canceled)
		require.Nil(t, r)
		time.Sleep(time.Second)
		require.Zero(t, Waiting(l))
	})
}

// A caller that is refused in the queue of a former epoch gets the refusal.
func TestExpiredBehindAReset(t *testing.T) {
	clock := clockwork.NewFakeClock()
	l, err := NewSmoothBursty("x", 10, WithStore(&distant{Store: NewMemoryStore()}), WithClock(clock), WithMaxPermits(1))
	require.NoError(t, err)
	l.limiter.Coordinator.LapseOverdue()
	p := &stoppable{RateLimiter: l}
	p.ask(tries, 1, 0, 0)
	p.ask(acquires, 1, 0, 1)                // due in 100 ms
	q := p.ask(tries, 1, 250_000, 2)        // 200 ms
	p.ask(acquires, 1, 0, 3)                // 300 ms
	p.ask(acquires, 1, 0, 4)                // 400 ms
	require.NoError(t, l.Reset(background)) // they keep their times
	require.Equal(t, 1, look(l).Epochs)
	whileStopped(l, func() { clock.Advance(350 * time.Millisecond) })
	for range 1000 {
		p.run()
		clock.Advance(10 * time.Millisecond)
	}
	require.True(t, q.answered(), "waits in a line: %v, %d calls", q.Waits(), Waiting(l))
}

// stoneDeaf hangs whatever the context.
type stoneDeaf struct {
	sick
	deaf chan struct{} // nil: answers
}

func (s *stoneDeaf) Apply(ctx context.Context, b *Batch) error {
	if s.deaf != nil {
		<-s.deaf
	}
	return s.sick.Apply(ctx, b)
}

// A promised reservation whose batch hangs does not keep the alarm ringing in an outage.
func TestAlarmInAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		clock := clockwork.NewFakeClock()
		s := new(stoneDeaf)
		l, err := NewSmoothBursty("x", 100, WithStore(s), WithClock(clock), Logged(t))
		require.NoError(t, err)
		c := l.limiter.Coordinator
		c.LapseOverdue()
		for range 2 {
			_, err = l.Reserve(background, 1)
			require.NoError(t, err)
		}
		s.deaf = make(chan struct{})
		whileStopped(l, func() { clock.Advance(5 * time.Second) })
		synctest.Wait() // it asks again, and hangs
		require.True(t, look(l).InFlight)
		s.ill.Store(true)
		time.Sleep(3500 * time.Millisecond) // the batch is given up, and the outage noticed
		require.NotNil(t, c.Down())
		clock.Advance(200 * time.Millisecond)
		c.Ring()
		at := look(l).AlarmAt
		behind := c.Now() - at
		close(s.deaf)
		require.False(t, at != 0 && behind >= 0, "the alarm is set to a time that has passed by %d µs", behind)
	})
}

// A reservation that the store does not grant any more delays no other caller.
func TestPromiseOfAnotherKind(t *testing.T) {
	clock := clockwork.NewFakeClock()
	s := &distant{Store: NewMemoryStore()}
	l, err := NewSmoothBursty("x", 10, WithStore(s), WithClock(clock))
	require.NoError(t, err)
	w, err := NewSmoothWarmingUp("x", 10, time.Second, WithStore(s), WithClock(clock))
	require.NoError(t, err)
	require.Same(t, l.limiter.Coordinator, w.limiter.Coordinator)
	l.limiter.Coordinator.LapseOverdue()
	p, other := &stoppable{RateLimiter: l}, &stoppable{RateLimiter: w}
	p.ask(reserves, 1, 0, 0)
	r := p.ask(reserves, 1, 0, 1)
	require.NoError(t, w.Reset(background))
	whileStopped(l, func() { clock.Advance(time.Second) })
	p.run()
	require.True(t, r.promised())
	q := other.ask(acquires, 1, 0, 2)
	for range 3000 {
		clock.Advance(10 * time.Millisecond)
		other.run()
	}
	require.True(t, q.answered(), "not served in 30 s")
}

// A reservation stands in no line, so it is not refused for those who wait in one.
func TestReserveIsNotRefusedForOthers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := NewMemoryStore()
		mine, err := NewSmoothBursty("x", 10, WithStore(&distant{Store: shared}), WithMaxPermits(1))
		require.NoError(t, err)
		theirs, err := NewSmoothBursty("x", 10, WithStore(&distant{Store: shared}), WithMaxPermits(1))
		require.NoError(t, err)
		_, err = theirs.Reserve(background, 6)
		require.NoError(t, err)
		r, err := mine.Reserve(background, 1) // due in 600 ms
		require.NoError(t, err)
		require.Equal(t, 600*time.Millisecond, r.Delay())
		debt, err := theirs.Reserve(background, 4) // 1 s
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(background)
		defer cancel()
		go func() { _, _ = mine.Acquire(ctx, 5) }() // beyond its reach
		time.Sleep(time.Millisecond)
		require.NoError(t, debt.Cancel(background)) // the bucket is free in 600 ms
		require.NoError(t, r.Cancel(background))
		time.Sleep(time.Microsecond)
		got, err := mine.TryReserve(background, 1, 900*time.Millisecond)
		require.NoError(t, err)
		require.True(t, got.OK(), "%v", got.RetryAfter())
	})
}

// A waiter for which the process owns permits in time is not refused by the reply to a request that was sent before.
func TestCoveredInFlight(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &distant{Store: NewMemoryStore()}
		l, err := NewSmoothBursty("x", 10, WithStore(s), WithMaxPermits(1))
		require.NoError(t, err)
		_, err = l.Reserve(background, 5)
		require.NoError(t, err)
		r, err := l.Reserve(background, 1)
		require.NoError(t, err)
		require.Equal(t, 500*time.Millisecond, r.Delay())
		time.Sleep(150 * time.Millisecond)
		s.trip.Store(int64(20 * time.Millisecond))
		got := make(chan bool)
		go func() {
			ok, err := l.TryAcquire(background, 1, 360*time.Millisecond) // 450 by the store, 350 when r leaves
			require.NoError(t, err)
			got <- ok
		}()
		time.Sleep(10 * time.Millisecond)
		go func() { _ = r.Cancel(background) }()
		require.True(t, <-got)
	})
}

// While the store fails, a caller behind a reservation that asks again is not refused, because no reply has decided about it.
func TestFailureIsNoRefusal(t *testing.T) {
	clock := clockwork.NewFakeClock()
	s := new(ailing)
	l, err := NewSmoothBursty("x", 10, WithStore(s), WithClock(clock), WithMaxPermits(1), Logged(t))
	require.NoError(t, err)
	l.limiter.Coordinator.LapseOverdue()
	p := &stoppable{RateLimiter: l}
	p.ask(reserves, 1, 0, 0)
	r := p.ask(reserves, 1, 0, 1)
	s.fails.Store(true) // before the alarm rings, whose goroutine asks again
	whileStopped(l, func() { clock.Advance(time.Second) })
	p.run()
	require.True(t, r.promised())
	clock.Advance(10 * time.Millisecond)
	ok, err := l.TryAcquire(background, 1, 0)
	require.Error(t, err, "refused: %v", !ok)
}

// What a refund that was refused by a penalty leaves behind moves with the rest.
func TestRefundAcrossAPenalty(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := NewMemoryStore()
		mineStore := &distant{Store: shared}
		mine, err := NewSmoothBursty("x", 10, WithStore(mineStore), WithMaxPermits(1))
		require.NoError(t, err)
		theirs, err := NewSmoothBursty("x", 10, WithStore(&distant{Store: shared}), WithMaxPermits(1))
		require.NoError(t, err)
		_, err = mine.Reserve(background, 6)
		require.NoError(t, err)
		r, err := mine.Reserve(background, 3) // due in 800 ms
		require.NoError(t, err)
		mineStore.trip.Store(int64(20 * time.Millisecond))
		done := make(chan error)
		go func() { done <- r.Cancel(background) }()
		time.Sleep(10 * time.Millisecond)
		require.NoError(t, theirs.Penalize(background, 10*time.Second)) // before the refund arrives
		require.NoError(t, <-done)
		s := look(mine)
		require.NotZero(t, s.HeadDue)
		require.Greater(t, s.LastDue, s.HeadDue, "what is owned ends %d µs after what the first waits for", s.LastDue-s.HeadDue)
	})
}

// heldBack is a store that keeps back the answer of one batch.
type heldBack struct {
	MemoryStore
	keep atomic.Pointer[chan struct{}] // Apply blocks until it is closed; nil if it does not block
}

func (s *heldBack) describe() traits { return traits{self: s} }

func (s *heldBack) Apply(ctx context.Context, b *Batch) error {
	err := s.MemoryStore.Apply(ctx, b)
	if keep := s.keep.Swap(nil); keep != nil {
		<-*keep
	}
	return err
}

// An answer that comes after its callers were served by another finds none of them used again for another call.
func TestLateAnswerToWhoAskedAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		clock := clockwork.NewFakeClock()
		s := new(heldBack)
		l, err := NewSmoothBursty("x", 10, WithStore(s), WithClock(clock), WithMaxPermits(1), Logged(t))
		require.NoError(t, err)
		l.limiter.Coordinator.LapseOverdue()
		_, err = l.Reserve(background, 30)
		require.NoError(t, err)
		r, err := l.Reserve(background, 1)
		require.NoError(t, err)
		require.Equal(t, 3*time.Second, r.Delay())
		answer := make(chan struct{})
		s.keep.Store(&answer)
		got := make(chan error)
		go func() { _, err := l.Acquire(background, 1); got <- err }()
		synctest.Wait() // it has asked, in vain
		require.NoError(t, r.Cancel(background))
		time.Sleep(1100 * time.Millisecond) // the batch is given up, and its caller waits for what r has left
		require.Equal(t, 1, look(l).Overdue)
		require.True(t, look(l).Waiting)
		whileStopped(l, func() { clock.Advance(5 * time.Second) })
		for served := false; !served; {
			synctest.Wait()
			select {
			case err := <-got:
				require.NoError(t, err)
				served = true
			default:
				clock.Advance(10 * time.Millisecond)
			}
		}
		close(answer)
		synctest.Wait()
		require.Zero(t, Waiting(l))
	})
}

// An error of a store that is another's lateness is an error like others: the batch has landed.
func TestErrorOfAnothersLateness(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l, err := NewSmoothBursty("x", 10, WithStore(lateness{fmt.Errorf("asked for leave: %w", transport.ErrLate)}), Logged(t))
		require.NoError(t, err)
		ctx, cancel := within(10 * time.Second)
		defer cancel()
		began := time.Now()
		_, err = l.State(ctx)
		require.ErrorIs(t, err, transport.ErrLate)
		_, err = l.TryAcquire(ctx, 1, 0)
		require.ErrorIs(t, err, ErrStoreUnavailable)
		require.Less(t, time.Since(began), 5*time.Second)
		require.Zero(t, look(l).Overdue)
	})
}

// lateness is a store that returns an error.
type lateness struct{ err error }

func (s lateness) Apply(context.Context, *Batch) error { return s.err }
