package tokenbucket

import (
	"context"
	"math"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// worstNet returns the largest excess of any window over the rate, less the permits given back since the first grant of the window. The
// events are in the order of the decisions; those that give permits back have no due time.
func worstNet(events []event, rate float64) float64 {
	level, most, last := 0.0, 0.0, int64(0)
	for _, e := range events {
		if e.n > 0 { // the window that began earlier, or a new one
			level = max(0, level-rate*float64(e.at-last)/1e6)
			last = e.at
		}
		level += e.n
		most = max(most, level)
	}
	return most
}

// A million settlements in full size, a tenth elsewhere. A bucket is charged exactly what its reservations have used, except for permits
// that come back to one that is full, or was since. In any window no more falls due than the bound, plus the permits given back since the first grant of the
// window.
func TestSettlements(t *testing.T) {
	redistest.InOneGoroutine(t)
	rounds := sized(30_000, 3_000) // × rapid's 100 checks; every other round settles
	var settled, clipped, full int
	rapid.Check(t, func(rt *rapid.T) {
		c := drawPlain(rt)
		c.Kind, c.WarmupMicros, c.ColdFactor = bursty, 0, 0
		c.Rate = rapid.SampledFrom([]float64{0.3, 5, 7.7, 1000, 80_000}).Draw(rt, "rate")
		c.Size, c.Floor = rapid.SampledFrom([]float64{0.5, 1, 20, 1000, 1e6}).Draw(rt, "size"), 0
		s := newSetting(c)
		now := int64(1_000_000_000)
		b := bucketOf(rt, c, 0, now)
		seed := rapid.Uint64().Draw(rt, "seed")
		draw := func(n uint64) int64 { // rapid takes longer than the bucket
			seed = seed*6364136223846793005 + 1442695040888963407
			return int64(seed >> 33 % n)
		}
		spread := uint64(rapid.SampledFrom([]int{10, 25, 40}).Draw(rt, "spread"))
		type reserved struct {
			n  int64
			of permit.Origin
		}
		var open []reserved
		var events []event
		largest := 0.0
		apply := func(requests ...permit.Request) {
			batch := &permit.Batch{Terms: &s.terms, Epoch: draw(1<<31)<<22 + draw(1<<22) + 1, Requests: requests}
			if err := b.apply(now, batch, &batch.Outcome); err != nil {
				require.NoError(rt, err)
			}
		}
		decide := func(r permit.Request) permit.Grant {
			requests := []permit.Request{r}
			apply(requests...)
			return requests[0].Grant
		}
		// account is the permits charged so far, less those earned: it moves by charges only, until the bucket overflows.
		account := func() float64 {
			return (float64(b.NextFreeTicketMicros-1_000_000_000)-b.CarryMicros)/s.interval - b.StoredPermits
		}
		for range rounds {
			now += int64(float64(draw(spread)) * s.interval)
			if draw(2) == 0 || len(open) == 0 {
				n := draw(50) + 1
				if g := decide(permit.Request{Permits: n, MaxWaitMicros: int64(200 * s.interval)}); g.OK {
					open, largest = append(open, reserved{n, g.Place.Origin()}), max(largest, float64(n))
					events = append(events, event{now + g.WaitMicros, float64(n)})
				}
			} else {
				i := int(draw(uint64(len(open))))
				n, of := open[i].n, open[i].of
				actual := draw(uint64(2*n + 1))
				open = slices.Delete(open, i, i+1)
				apply()
				before, at := b.Epoch, account()
				g := decide(permit.Request{Op: permit.Settle, Permits: actual - n, Origin: of})
				settled++
				if actual <= n && of.Epoch != before { // it was full since, and would have been without the reservation
					require.False(rt, g.OK)
					require.Equal(rt, at, account())
					full++
					continue
				}
				require.True(rt, g.OK)
				events = append(events, event{now + g.WaitMicros, float64(actual - n)})
				largest = max(largest, float64(actual-n))
				if b.Epoch != before {
					clipped++
					require.Equal(rt, b.MaxPermits, b.StoredPermits)
				} else {
					require.InDelta(rt, float64(actual-n), account()-at, 1e-5+math.Abs(at)*1e-12)
				}
			}
			require.True(rt, b.sound())
		}
		require.LessOrEqual(rt, worstNet(events, c.Rate), bound(c, s.max, largest)+1e-6*float64(len(events)), "%+v", c)
	})
	t.Logf("%d settlements, %d came back to a full bucket, %d to one that was full since", settled, clipped, full)
	require.Greater(t, settled, 20*rounds)
	require.Greater(t, clipped, rounds/8)
	require.Greater(t, full, rounds/2)
}

// settles returns how many permits a bucket is short of where it began.
func settles(t *testing.T, l *RateLimiter) float64 {
	b, err := l.State(background)
	require.NoError(t, err)
	return float64(b.NextFreeTicketMicros-b.SeenMicros)/b.IntervalMicros - b.StoredPermits
}

func TestSettle(t *testing.T) {
	clock := clockwork.NewFakeClock()
	open := func(opts ...Option) *RateLimiter {
		l, err := NewSmoothBursty("x", 10, append(opts, WithClock(clock), WithMaxPermits(100), WithInitialPermits(50))...)
		require.NoError(t, err)
		return l
	}
	l := open()
	reserve := func(n int) *Reservation {
		r, err := l.Reserve(background, n)
		require.NoError(t, err)
		return r
	}
	less, more, same, later := reserve(20), reserve(20), reserve(10), reserve(10)
	require.Equal(t, 10.0, settles(t, l), "in debt")
	require.NoError(t, less.Settle(background, 5))
	require.Equal(t, -5.0, settles(t, l), "the debt is gone, and five are stored")
	require.NoError(t, less.Settle(background, 5))
	require.NoError(t, less.Settle(background, 100))
	require.NoError(t, less.Cancel(background))
	require.NoError(t, less.Return(background))
	require.Equal(t, -5.0, settles(t, l), "once")
	require.NoError(t, more.Settle(background, 40))
	require.Equal(t, 15.0, settles(t, l))
	require.NoError(t, same.Settle(background, 10))
	require.Equal(t, 15.0, settles(t, l))
	require.Zero(t, later.Delay(), "it moved up")
	require.NoError(t, later.Cancel(background), "too late: they are used")
	require.NoError(t, later.Settle(background, 0), "so they may be settled")
	require.Equal(t, 5.0, settles(t, l))
	require.NoError(t, reserve(10).Cancel(background))
	require.Equal(t, 5.0, settles(t, l))

	due := reserve(5)
	clock.Advance(time.Hour)
	<-due.Ready()
	require.NoError(t, due.Cancel(background), "too late: they are used")
	before := settles(t, l)
	require.NoError(t, due.Settle(background, 7))
	require.Equal(t, before+2, settles(t, l), "so they may be settled")
	require.NoError(t, reserve(1).Settle(background, 0))
	require.NoError(t, reserve(98).Settle(background, 0), "no room for more")
	require.Equal(t, -98.0, math.Round(settles(t, l)))

	refused, err := l.TryReserve(background, 100, time.Millisecond)
	require.NoError(t, err)
	require.False(t, refused.OK())
	require.NoError(t, refused.Settle(background, 50))
	refused.SettleLater(50)
	require.Equal(t, -98.0, math.Round(settles(t, l)), "a refusal counts nothing")
	require.NoError(t, new(Reservation).Settle(background, 3))
	new(Reservation).SettleLater(3)

	r := reserve(1)
	require.ErrorIs(t, r.Settle(background, -1), ErrInvalidPermits)
	ended, cancel := context.WithCancel(background)
	cancel()
	require.ErrorIs(t, r.Settle(ended, 2), context.Canceled)
	if strconv.IntSize == 64 {
		require.ErrorIs(t, r.Settle(background, min(maxExact, math.MaxInt)), ErrInvalidPermits, "beyond exact times")
	}

	off := open(WithSwitch(func() bool { return false }))
	passed, err := off.Reserve(background, 1)
	require.NoError(t, err)
	require.NoError(t, passed.Settle(background, 1000))
	passed.SettleLater(1000)
}

// A settlement does not end a penalty.
func TestSettleInAPenalty(t *testing.T) {
	clock := clockwork.NewFakeClock()
	l, err := NewSmoothBursty("x", 10, WithClock(clock))
	require.NoError(t, err)
	r, err := l.Reserve(background, 100)
	require.NoError(t, err)
	clock.Advance(time.Minute) // they are due: permits given back would shorten the penalty
	require.NoError(t, l.Penalize(background, time.Minute))
	require.NoError(t, r.Settle(background, 0))
	next, err := l.Reserve(background, 1)
	require.NoError(t, err)
	require.GreaterOrEqual(t, next.Delay(), time.Minute)
}

// mute is a store that applies a batch and then loses the reply, while loses is set.
type mute struct {
	MemoryStore
	loses atomic.Bool
}

func (s *mute) Apply(ctx context.Context, b *Batch) error {
	err := s.MemoryStore.Apply(ctx, b)
	if s.loses.Load() {
		return ErrStoreTimeout
	}
	return err
}

// A settlement whose reply is lost is an error, and is not sent again.
func TestSettlementOfALostReply(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := &mute{}
		l, err := NewSmoothBursty("x", 10, WithStore(store), WithMaxPermits(100), WithInitialPermits(100), Logged(t))
		require.NoError(t, err)
		r, err := l.Reserve(background, 10)
		require.NoError(t, err)
		store.loses.Store(true)
		require.ErrorIs(t, r.Settle(background, 30), ErrStoreTimeout)
		store.loses.Store(false)
		time.Sleep(time.Second) // a probe finds the store
		require.NoError(t, r.Settle(background, 30))
		require.InDelta(t, -80, settles(t, l), 1e-9, "30 of 100, and 10 were stored meanwhile")
	})
}

// Close waits for settlements in the background.
func TestSettleLater(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := &sick{}
		store.trip.Store(int64(300 * time.Millisecond))
		l, err := NewSmoothBursty("x", 10, WithStore(store), WithMaxPermits(1000), WithInitialPermits(1000), Logged(t))
		require.NoError(t, err)
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				r, err := l.Reserve(background, 10)
				require.NoError(t, err)
				began := time.Now()
				r.SettleLater(1)
				r.SettleLater(1)
				require.Zero(t, time.Since(began))
			})
		}
		all.Wait()
		soon, cancel := context.WithTimeout(background, time.Millisecond)
		defer cancel()
		require.ErrorIs(t, l.Close(soon), context.DeadlineExceeded)
		require.NoError(t, l.Close(background))
		require.InDelta(t, -1000+20, settles(t, l), 25, "20 of 1000, and what was stored meanwhile")
		require.NoError(t, l.Close(background))
	})
}

// A settlement in the background is claimed at once, so a Cancel that follows gives nothing back.
func TestCancelAfterSettleLater(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l, err := NewSmoothBursty("x", 10, WithStore(&sick{}), WithMaxPermits(0), Logged(t))
		require.NoError(t, err)
		r, err := l.Reserve(background, 10)
		require.NoError(t, err)
		r.SettleLater(4)
		require.NoError(t, r.Cancel(background))
		require.NoError(t, l.Close(background))
		state, err := l.State(background)
		require.NoError(t, err)
		require.Equal(t, 400*time.Millisecond, time.Duration(state.NextFreeTicketMicros-time.Now().UnixMicro())*time.Microsecond, "four permits of debt")
	})
}
