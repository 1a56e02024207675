package group

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// slow returns a shop of two buckets, whose parts take a round trip of a millisecond.
func slow() *shop {
	s := shopOf(bucketOf("fast", 50*time.Millisecond, 5), bucketOf("slow", 100*time.Millisecond, 5))
	s.before = func(int) { time.Sleep(time.Millisecond) }
	return s
}

// Callers are served in order, at the rate of the slowest member.
func TestParticipantInOrder(t *testing.T) {
	for _, choice := range []permit.Choice{permit.All, permit.Any} {
		bubble(t, func(t *testing.T) {
			p := open(slow(), choice)
			began := time.Now()
			var mu sync.Mutex
			var order []int
			var callers sync.WaitGroup
			for i := range 60 {
				callers.Go(func() {
					r := try(t.Context(), p, 1, time.Minute)
					require.NoError(t, r.Err)
					require.True(t, r.Granted)
					mu.Lock()
					defer mu.Unlock()
					order = append(order, i)
				})
				time.Sleep(100 * time.Microsecond)
			}
			callers.Wait()
			for i := range order {
				if choice == permit.All { // for permit.Any a later caller may get the other member's permits
					require.Equal(t, i, order[i])
				}
			}
			rate := 10.0 // a second
			if choice == permit.Any {
				rate += 20
			}
			require.InDelta(t, 60/rate, time.Since(began).Seconds(), 0.7, choice)
			require.Zero(t, p.Lost.Load())
		})
	}
}

// A caller whose stores do not reply fails within the store timeout, with the member that was asked. A late reply's permits go back.
func TestParticipantLateReply(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := slow()
		var hangs atomic.Bool
		hangs.Store(true)
		s.before = func(part int) {
			if part == 1 && hangs.Load() {
				time.Sleep(3 * time.Second)
			}
		}
		p := open(s, permit.All, []int{0}, []int{1})
		began := time.Now()
		r := try(t.Context(), p, 1, time.Minute)
		require.ErrorIs(t, r.Err, permit.ErrStoreTimeout)
		require.ErrorContains(t, r.Err, "member 1")
		require.InDelta(t, 1, time.Since(began).Seconds(), 0.01)
		hangs.Store(false)
		time.Sleep(10 * time.Second)
		require.Equal(t, []int64{1, 1}, s.given())
		require.Zero(t, p.Lost.Load())
		require.True(t, try(t.Context(), p, 1, time.Minute).Granted)
	})
}

// What falls behind permits of another process cannot go back. It is counted once, by the member's weight.
func TestParticipantLoses(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := slow()
		s.buckets[1].weight = 2
		p := open(s, permit.All)
		q, _ := reserve(t, p, 2)
		s.mu.Lock()
		s.buckets[1].seq++
		s.mu.Unlock()
		require.NoError(t, p.Cancel(t.Context(), q))
		require.Equal(t, int64(4), p.Lost.Load())
		require.Equal(t, []int64{2, 0}, s.given())
		require.NoError(t, p.Cancel(t.Context(), q))
		require.False(t, p.Claim(q))
		require.Equal(t, int64(4), p.Lost.Load())
	})
}

// A caller that gives up leaves its permits to the waiters behind it, which are served sooner.
func TestParticipantCallerLeaves(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := slow()
		p := open(s, permit.All)
		began := time.Now()
		c, cancel := context.WithCancel(t.Context())
		var callers sync.WaitGroup
		callers.Go(func() { require.ErrorIs(t, try(c, p, 1, time.Minute).Err, context.Canceled) })
		time.Sleep(2 * time.Millisecond)
		callers.Go(func() { require.True(t, try(t.Context(), p, 1, time.Minute).Granted) })
		time.Sleep(20 * time.Millisecond)
		cancel()
		callers.Wait()
		require.Less(t, time.Since(began), 110*time.Millisecond, "it has the permits that were due at 100 ms")
		time.Sleep(time.Second)
		require.Equal(t, []int64{1, 1}, s.given(), "its own have gone back")
		require.Zero(t, p.Lost.Load())
	})
}

// A timeout ends a wait when the stores have refused the call and it can be in time no more.
func TestParticipantTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		p := open(slow(), permit.All)
		began := time.Now()
		r := try(t.Context(), p, 20, time.Second)
		assert.False(t, r.Granted)
		assert.NoError(t, r.Err)
		assert.Equal(t, 1, r.Member)
		assert.Less(t, time.Since(began), 10*time.Millisecond, "it is known at once")
		for range 30 {
			go try(t.Context(), p, 1, time.Minute)
		}
		time.Sleep(10 * time.Millisecond)
		began = time.Now()
		r = try(t.Context(), p, 1, 2*time.Second)
		assert.False(t, r.Granted, "30 wait ahead")
		assert.LessOrEqual(t, time.Since(began), 2*time.Second)
	})
}

// A participant that owns permits reads its buckets, and moves the permits when a member has been penalized.
func TestParticipantHearsOfPenalties(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := slow()
		p := open(s, permit.All, []int{0}, []int{1})
		began := time.Now()
		q, r := reserve(t, p, 20) // due in 2 s
		require.InDelta(t, 2*second, r.Wait, float64(10*ms))
		time.Sleep(time.Second)
		s.mu.Lock()
		s.buckets[0].HeldUntilMicros, s.buckets[0].PausedMicros = s.clock()+5*second, 5*second
		s.mu.Unlock()
		<-q.Ready()
		require.InDelta(t, 6, time.Since(began).Seconds(), 0.01)
		require.InDelta(t, 6*second, p.Delay(q), float64(10*ms))
	})
}

// Stores that decide at once need no goroutine and no round trip, and the caller's permits are there when Submit returns.
func TestParticipantImmediate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := shopOf(bucketOf("a", 100*time.Millisecond, 5), bucketOf("b", 100*time.Millisecond, 5))
		p := New(s.config(permit.All))
		s.clock = func() int64 { return time.Now().UnixMicro() }
		s.empty()
		for m := range s.buckets {
			s.buckets[m].Stored = 1
		}
		q := NewCall(1, 0, 0, false)
		select {
		case <-p.Submit(t.Context(), q):
		default:
			require.Fail(t, "it waits")
		}
		require.True(t, q.result().Granted)
		p.Recycle(q)
		began := time.Now()
		require.True(t, try(t.Context(), p, 1, time.Minute).Granted)
		require.Equal(t, 100*time.Millisecond, time.Since(began))
	})
}

// A settlement charges the members that the reservation has permits of, each by its weight.
func TestParticipantSettles(t *testing.T) {
	for choice, charged := range map[permit.Choice][]int64{permit.All: {7, 14}, permit.Any: {7, 0}} {
		bubble(t, func(t *testing.T) {
			s := slow()
			s.buckets[1].weight = 2
			p := open(s, choice)
			q, _ := reserve(t, p, 1)
			<-q.Ready()
			settles := p.NewSettlement(q, 7, 0)
			require.NoError(t, p.Wait(t.Context(), settles, p.Submit(t.Context(), settles)).Err)
			require.Equal(t, charged, s.charged(), choice)
		})
	}
}

// Permits of a reservation that were due at once can go back, once.
func TestParticipantReturn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := slow()
		p := open(s, permit.All)
		time.Sleep(200 * time.Millisecond) // two permits and one
		q, r := reserve(t, p, 1)
		require.Zero(t, r.Wait)
		require.NoError(t, p.Return(t.Context(), q))
		require.Equal(t, []int64{1, 1}, s.given())
		require.NoError(t, p.Return(t.Context(), q))
		require.Equal(t, []int64{1, 1}, s.given())
		require.Zero(t, p.Lost.Load())
	})
}

// The callers that wait for the next batch, behind one that hangs, fail within the store timeout too. Waiters whose permits are owned do not.
func TestParticipantHangs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := slow()
		var hangs atomic.Bool
		s.before = func(int) {
			if time.Sleep(time.Millisecond); hangs.Load() {
				time.Sleep(30 * time.Second)
			}
		}
		p := open(s, permit.All)
		owner, _ := reserve(t, p, 15) // due in 1.5 s
		hangs.Store(true)
		began := time.Now()
		var callers sync.WaitGroup
		for i := range 5 {
			callers.Go(func() {
				time.Sleep(time.Duration(i) * 100 * time.Millisecond)
				came := time.Now()
				require.ErrorIs(t, try(t.Context(), p, 1, time.Minute).Err, permit.ErrStoreTimeout)
				require.InDelta(t, 1, time.Since(came).Seconds(), 0.02)
			})
		}
		callers.Wait()
		<-owner.Ready()
		require.InDelta(t, 1.5, time.Since(began).Seconds(), 0.01)
	})
}

// After a failure that starts an outage, callers fail at once and the store is not asked for them.
func TestParticipantDuringAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := slow()
		p := open(s, permit.All)
		s.breaks(0, errDown)
		require.ErrorIs(t, try(t.Context(), p, 1, time.Minute).Err, errDown)
		time.Sleep(5 * time.Second)
		asked := len(s.asked)
		r := try(t.Context(), p, 1, time.Minute)
		require.ErrorIs(t, r.Err, permit.ErrStoreUnavailable)
		require.ErrorContains(t, r.Err, "member 0")
		require.Equal(t, asked, len(s.asked))
		s.breaks(0, nil)
		time.Sleep(time.Minute)
		require.True(t, try(t.Context(), p, 1, time.Minute).Granted)
	})
}

// A reservation that was granted survives an outage: if its permits have lapsed, it asks again later. The calls behind it fail, those of
// permit.Any too: the other members are asked without the one that is away.
func TestReservationDuringAnOutage(t *testing.T) {
	for _, choice := range []permit.Choice{permit.All, permit.Any} {
		bubble(t, func(t *testing.T) {
			d := two(choice, []int{0}, []int{1})
			d.monitor()
			d.config.Immediate = false
			q, caller := d.reserve(1, permit.MaxExact), d.call(1, permit.MaxExact)
			q.promise()
			d.queue.failDown(d.now)
			require.Equal(t, asking, caller.state)
			d.breaks(0, errDown)
			defer d.breaks(0, nil)
			of := d.members[1].Limiter.Coordinator
			of.Health.Suspect(of)
			time.Sleep(3 * time.Second)
			require.NotNil(t, of.Down())
			d.queue.failDown(d.now)
			require.Equal(t, asking, q.state)
			require.ErrorIs(t, caller.err, permit.ErrStoreUnavailable)
			require.ErrorContains(t, caller.err, "member 1")
			require.Equal(t, start+retryMicros, d.queue.askAt)
		})
	}
}

// The snapshot refuses what cannot be in time, by the member that is the reason, and for permit.Any only if no member can grant it.
func TestParticipantRefuses(t *testing.T) {
	for _, choice := range []permit.Choice{permit.All, permit.Any} {
		bubble(t, func(t *testing.T) {
			s := slow()
			s.buckets[1].weight = 2
			p := open(s, choice)
			_, _, refused := p.Refuses(1, 0)
			require.False(t, refused, "nothing is known")
			reserve(t, p, 10)
			member, wait, refused := p.Refuses(5, 800*ms)
			if choice == permit.Any {
				require.False(t, refused, "the other member owes nothing")
				return
			}
			require.True(t, refused)
			require.Equal(t, 1, member)
			require.InDelta(t, 3*second, wait, float64(5*ms), "2 s of debt, and 10 permits")
			require.NotNil(t, p.Seen(1).Terms)
			_, _, refused = p.Refuses(5, 3*second)
			require.False(t, refused)
			time.Sleep(100 * time.Millisecond)
			_, _, refused = p.Refuses(5, 800*ms)
			require.False(t, refused, "it is too old")
		})
	}
}
