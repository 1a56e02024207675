package tokenbucket

import (
	"cmp"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// event is permits that fell due at a time in microseconds.
type event struct {
	at int64
	n  float64
}

// worst returns the largest excess of any window: max over windows of (permits in it − rate × its length), in one pass.
// It is the level of a leaky bucket that loses rate permits a second, just after each event.
func worst(events []event, rate float64) float64 {
	slices.SortFunc(events, func(a, b event) int { return cmp.Compare(a.at, b.at) })
	level, most := 0.0, 0.0
	for i, e := range events {
		if i > 0 {
			level = max(0, level-rate*float64(e.at-events[i-1].at)/1e6)
		}
		level += e.n
		most = max(most, level)
	}
	return most
}

// Worst is worst for the tests outside of the package.
func Worst(n int, at func(i int) (micros int64, permits float64), rate float64) float64 {
	events := make([]event, n)
	for i := range events {
		events[i].at, events[i].n = at(i)
	}
	return worst(events, rate)
}

// bound returns the documented bound of a window of length 0, with the microsecond and some float noise.
func bound(c config, most, largest float64) float64 {
	b := most + largest
	if c.Kind == warmingUp {
		b = largest
	} else if c.Payment == PayNow {
		b = max(most, largest)
	}
	return b + c.Rate*1e-6 + 1e-6*(1+largest)
}

// Requests that travel in one batch get what they would get one by one: the same grants, the same waits, the same bucket.
func TestBatchIsOneByOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := config{Kind: bursty, Rate: rapid.SampledFrom([]float64{0.3, 5, 7.7, 1000, 3e6}).Draw(t, "rate"), Floor: 1,
			Payment: rapid.SampledFrom([]Payment{PayNow, PayLater}).Draw(t, "payment"), Size: rapid.Float64Range(0, 100).Draw(t, "size")}
		if rapid.Bool().Draw(t, "warm-up") {
			c.Kind, c.Size, c.ColdFactor, c.WarmupMicros = warmingUp, 0, 3, rapid.Int64Range(1000, 10_000_000).Draw(t, "period")
		}
		ask := func(b *PermitBucket, now int64, requests ...permit.Request) []permit.Grant {
			asked := permit.Batch{Terms: termsOf(c), Initial: 1, Epoch: 7, Requests: requests}
			if err := b.apply(now, &asked, &asked.Outcome); err != nil {
				t.Fatal(err)
			}
			grants := make([]permit.Grant, len(requests))
			for i := range requests {
				grants[i] = requests[i].Grant
			}
			return grants
		}
		var combined, alone PermitBucket
		now := int64(1_000_000)
		for range rapid.IntRange(1, 20).Draw(t, "batches") {
			now += rapid.Int64Range(0, 3_000_000).Draw(t, "later")
			requests := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) permit.Request {
				return permit.Request{Op: permit.Take, Permits: rapid.Int64Range(1, 50).Draw(t, "permits"), MaxWaitMicros: rapid.Int64Range(0, 10_000_000).Draw(t, "wait")}
			}), 1, 20).Draw(t, "requests")
			together := ask(&combined, now, slices.Clone(requests)...)
			for i, r := range requests {
				require.Equal(t, together[i], ask(&alone, now, r)[0], "request %d", i)
			}
			require.Equal(t, string(alone.appendText(nil)), string(combined.appendText(nil)))
		}
	})
}

func TestWorst(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		events := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) event {
			return event{rapid.Int64Range(0, 5_000_000).Draw(t, "at"), float64(rapid.IntRange(1, 5).Draw(t, "n"))}
		}), 1, 40).Draw(t, "events")
		brute := 0.0
		for _, from := range events {
			for _, to := range events {
				n := 0.0
				for _, e := range events {
					if e.at >= from.at && e.at <= to.at {
						n += e.n
					}
				}
				if to.at >= from.at {
					brute = max(brute, n-5*float64(to.at-from.at)/1e6)
				}
			}
		}
		require.InDelta(t, brute, worst(events, 5), 1e-9)
	})
}

// bucketOf begins a bucket at a time.
func bucketOf(t require.TestingT, c config, initial float64, now int64) *PermitBucket {
	b := new(PermitBucket)
	require.NoError(t, c.validate())
	b.begin(now, &permit.Batch{Name: "b", Initial: initial, Epoch: 1}, newSetting(c))
	return b
}

// takeAt asks as a batch of one would.
func takeAt(t require.TestingT, b *PermitBucket, now, n, maxWait int64) permit.Grant {
	batch := &permit.Batch{Name: "b", Terms: &b.setting.terms, Epoch: b.Epoch + 1, Requests: []permit.Request{{Permits: n, MaxWaitMicros: maxWait}}}
	if err := b.apply(now, batch, &batch.Outcome); err != nil { // require, asked a million times, takes longer than Apply
		require.NoError(t, err)
	}
	return batch.Requests[0].Grant
}

func drawPlain(t *rapid.T) config {
	c := drawConfig(t, kind(rapid.IntRange(0, 1).Draw(t, "kind")))
	c.Version = 0
	if c.Kind == bursty {
		c.Size = rapid.SampledFrom([]float64{0, 0.5, 1, 5, 20, 1000, c.Rate}).Draw(t, "size")
	}
	return c
}

// In no window more permits fall due than the design states, at any rate, for both limiters and both policies.
func TestWindowBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawPlain(t)
		k := c.curve()
		b := bucketOf(t, c, rapid.Float64Range(0, k.max).Draw(t, "initial"), 0)
		now, largest := int64(0), 0.0
		var events []event
		for range 300 {
			now += int64(rapid.Float64Range(0, 4).Draw(t, "gap") * k.interval)
			n := rapid.Int64Range(1, 20).Draw(t, "permits")
			wait := int64(rapid.Float64Range(0, 50).Draw(t, "timeout") * k.interval)
			if g := takeAt(t, b, now, n, wait); g.OK {
				require.LessOrEqual(t, g.WaitMicros, wait)
				events = append(events, event{now + g.WaitMicros, float64(n)})
				largest = max(largest, float64(n))
			}
		}
		require.LessOrEqual(t, worst(events, c.Rate), bound(c, k.max, largest), "%+v", c)
	})
}

// At full demand, once warm, not less than rate × T − 1 permits fall due, at any rate. Demand is full both for those who
// reserve ahead and for those who poll.
func TestFullDemand(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawPlain(t)
		k := c.curve()
		b := bucketOf(t, c, 0, 0)
		for b.StoredPermits > 0 { // warm up
			require.True(t, takeAt(t, b, b.NextFreeTicketMicros, int64(math.Ceil(b.StoredPermits)), maxExact).OK)
		}
		start := b.NextFreeTicketMicros
		now, granted, last := start, 0, int64(0)
		for granted < 2000 {
			g := takeAt(t, b, now, 1, maxExact)
			require.True(t, g.OK)
			granted++
			last = now + g.WaitMicros
			if rapid.IntRange(0, 99).Draw(t, "catch up") == 0 {
				now = last // only ever to where the bucket owes nothing: demand stays full
			}
		}
		require.GreaterOrEqual(t, float64(granted), c.Rate*float64(last-start-1)/1e6-1) // due times are whole microseconds

		if c.Kind == warmingUp || k.max < 2 {
			return // what polling leaves in a warm-up bucket cools it, and a small bucket overflows between polls
		}
		b = bucketOf(t, c, 0, 0)
		now, granted = 0, 0
		for range 2000 {
			now += int64(rapid.Float64Range(0, 1).Draw(t, "poll") * k.interval)
			for takeAt(t, b, now, 1, 0).OK {
				granted++
			}
		}
		require.GreaterOrEqual(t, float64(granted), math.Floor(c.Rate*float64(now)/1e6)-1)
	})
}

// The algorithm that this library grew out of stored whole permits and dropped the fraction at every resync. Polled
// every 1.6 intervals it hands out 5/8 of the rate; this one hands out all of it.
func TestNoDrift(t *testing.T) {
	const interval, polls = 200_000, 10_000
	b := bucketOf(t, config{Rate: 5, Size: 5, Floor: 1}, 0, 0)
	var seedStored, seedNext, seedGranted, granted, now int64
	for range polls {
		now += interval * 8 / 5
		if now > seedNext {
			seedStored = min(5, seedStored+(now-seedNext)/interval)
			seedNext = now
		}
		for ; seedStored > 0; seedStored-- {
			seedGranted++
		}
		for takeAt(t, b, now, 1, 0).OK {
			granted++
		}
	}
	want := now / interval
	t.Logf("of %d permits: %d with the fraction dropped, %d with it kept", want, seedGranted, granted)
	require.Less(t, float64(seedGranted), 0.7*float64(want))
	require.InDelta(t, want, granted, 1)
}

// An existing permit is not delayed by a microsecond because of float noise: at each multiple of the interval the bucket has one. And the
// shortfall that is overlooked is carried over, so it does not add up.
func TestShortfall(t *testing.T) {
	for _, rate := range []float64{3, 7, 11, 13, 70, 0.7, 1.0 / 3} {
		c := config{Rate: rate, Size: 5, Floor: 1}
		b := bucketOf(t, c, 1, 0)
		var events []event
		for i := range 6000 {
			now := int64(math.Ceil(float64(i) * 1e6 / rate))
			require.True(t, takeAt(t, b, now, 1, 0).OK, "call %d at %v/s", i, rate)
			events = append(events, event{now, 1})
		}
		require.LessOrEqual(t, worst(events, rate), bound(c, 5, 1))
	}
	// Short by half of the tolerated shortfall, again and again: the first request passes, the next one pays the debt.
	b := bucketOf(t, config{Rate: 5, Size: 5, Floor: 1}, 1, 0)
	for range 1_000_000 {
		b.StoredPermits, b.NextFreeTicketMicros = 1-5e-10, 0
		takeAt(t, b, 0, 1, maxExact)
	}
	require.Greater(t, b.CarryMicros, -1e-9*b.IntervalMicros-1e-12)
}

// Ten million calls at rates that Guava's truncation gets wrong: 80,000/s would become 83,333, 3,000,000/s no limit.
func TestExactLongRun(t *testing.T) {
	for _, rate := range []float64{0.001, 3, 7, 80_000, 3e6, 1e7} {
		b := bucketOf(t, config{Rate: rate, Size: 1, Floor: 1}, 0, 0)
		batch := &permit.Batch{Name: "b", Terms: &b.setting.terms, Epoch: 2, Requests: make([]permit.Request, 1000)}
		for i := range batch.Requests {
			batch.Requests[i] = permit.Request{Permits: 1, MaxWaitMicros: maxExact}
		}
		const takes = 1_000_000
		for range takes / 1000 {
			err := b.apply(0, batch, &batch.Outcome)
			require.NoError(t, err)
			require.True(t, batch.Requests[999].Grant.OK)
		}
		require.InDelta(t, takes/rate*1e6, float64(b.NextFreeTicketMicros), 1.5, "rate %v", rate)
	}
}

// Two unversioned configurations that take batches hand out no more than the larger of each bound allows.
func TestNoMintingByTakingTurns(t *testing.T) {
	small, large := config{Rate: 100, Size: 10, Floor: 1}, config{Rate: 100, Size: 1000, Floor: 1}
	b := bucketOf(t, small, 1, 0)
	var events []event
	for now := int64(0); now < 10_000_000; now += 1000 {
		for i, c := range []config{large, small} {
			batch := &permit.Batch{Name: "b", Terms: termsOf(c), Epoch: now + int64(i) + 1, Requests: []permit.Request{{Permits: 1}}}
			err := b.apply(now, batch, &batch.Outcome)
			require.NoError(t, err)
			if batch.Requests[0].Grant.OK {
				events = append(events, event{now, 1})
			}
		}
	}
	require.InDelta(t, 1000, len(events), 2) // and not the 100,000 of permits scaled up at each turn
	require.LessOrEqual(t, worst(events, 100), 1000.0+1e-3)
}

// A clock that alternates within two seconds mints no permits, and delays no request for longer than two seconds. A clock that is set back
// by an hour does not refuse for longer either. One that is set forward grants one full bucket.
func TestClockSteps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := config{Rate: 50, Size: 10, Floor: 1, Payment: Payment(rapid.IntRange(0, 1).Draw(t, "payment"))}
		b := bucketOf(t, c, 1, 0)
		var events []event
		last, gap := int64(0), int64(0)
		for now := int64(0); now < 20_000_000; now += 5_000 {
			offset := int64(0)
			if now/100_000%2 == 1 {
				offset = rapid.Int64Range(-2_000_000, 0).Draw(t, "offset")
			}
			if takeAt(t, b, now+offset, 1, 0).OK {
				events = append(events, event{now, 1})
				gap = max(gap, now-last)
				last = now
			}
		}
		require.LessOrEqual(t, worst(events, c.Rate), bound(c, 10, 1))
		require.LessOrEqual(t, gap, int64(2_000_000))
	})
	for _, step := range []int64{-2_000_001, -3_600_000_000, -86_400_000_000 * 365} {
		b := bucketOf(t, config{Rate: 5, Size: 5, Floor: 1}, 1, 0)
		require.True(t, takeAt(t, b, 0, 1, 0).OK)
		require.Equal(t, int64(2_000_000), takeAt(t, b, 0, 10, maxExact).WaitMicros)
		require.Equal(t, int64(2_200_000), takeAt(t, b, step, 1, maxExact).WaitMicros, "the debt is what it was")
		require.False(t, takeAt(t, b, step+2_000_000, 1, 0).OK)
		require.True(t, takeAt(t, b, step+2_200_000, 1, 200_000).OK)
	}
	b := bucketOf(t, config{Rate: 5, Size: 5, Floor: 1}, 1, 0)
	require.False(t, takeAt(t, b, 3_600_000_000, 6, 0).OK)
	require.True(t, takeAt(t, b, 3_600_000_000, 5, 0).OK)
}

// A refund that is sent twice is accepted once. A late copy may find its place at the tail by then, and refund permits that the first could
// not; the window bound holds on the permits that were not cancelled.
func TestGiveBackTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := config{Rate: 10, Size: rapid.SampledFrom([]float64{0, 1, 5}).Draw(t, "size")}
		if c.Size > 0 {
			c.Floor = 1
		}
		c.Payment = Payment(rapid.IntRange(0, 1).Draw(t, "payment"))
		once, twice := bucketOf(t, c, c.Size, 0), bucketOf(t, c, c.Size, 0)
		late := rapid.Bool().Draw(t, "late copies")
		type held struct {
			g         permit.Grant
			due, now  int64
			n         float64
			cancelled bool
		}
		var all []*held
		var sent []permit.Refund
		now, epoch, largest := int64(0), int64(1), 0.0
		send := func(b *PermitBucket, backs []permit.Refund) {
			epoch++
			batch := &permit.Batch{Name: "b", Terms: termsOf(c), Epoch: epoch}
			for _, g := range backs {
				batch.Requests = append(batch.Requests, permit.Request{Op: permit.GiveBack, Back: g})
			}
			err := b.apply(now, batch, &batch.Outcome)
			require.NoError(t, err)
		}
		for range 200 {
			now += rapid.Int64Range(0, 300_000).Draw(t, "gap")
			n := rapid.Int64Range(1, 7).Draw(t, "permits")
			epoch++
			var g [2]permit.Grant
			for i, b := range []*PermitBucket{once, twice} {
				batch := &permit.Batch{Name: "b", Terms: termsOf(c), Epoch: epoch, Requests: []permit.Request{{Permits: n, MaxWaitMicros: 3_000_000}}}
				err := b.apply(now, batch, &batch.Outcome)
				require.NoError(t, err)
				g[i] = batch.Requests[0].Grant
			}
			if !late {
				require.Equal(t, g[0], g[1])
			}
			if g[1].OK {
				all = append(all, &held{g: g[1], due: now + g[1].WaitMicros, now: now, n: float64(n)})
			}
			if len(all) > 0 && rapid.Bool().Draw(t, "cancel") {
				h := all[max(0, len(all)-rapid.IntRange(1, 6).Draw(t, "which"))]
				if !h.cancelled { // also after its time: then it was not used
					h.cancelled = true
					p := h.g.Place
					back := permit.Refund{
						Epoch: p.Epoch, Tag: p.Tag, Tail: p.Prev, ID: p.Tag, To: p.Before, End: p.After.Next,
						Spent: p.Before.Stored - p.After.Stored, Level: p.After.Stored - p.Returned,
					}
					if !late {
						send(once, []permit.Refund{back})
					}
					sent = append(sent, back)
					send(twice, []permit.Refund{back, back})
				}
			}
			for late && len(sent) > 0 && rapid.IntRange(0, 2).Draw(t, "again") == 0 { // and once more, late
				send(twice, []permit.Refund{rapid.SampledFrom(sent).Draw(t, "copy")})
			}
			if !late {
				require.Equal(t, once.balance(), twice.balance())
			}
		}
		var events []event
		for _, h := range all {
			if !h.cancelled {
				events = append(events, event{h.due, h.n})
				largest = max(largest, h.n)
			}
		}
		require.LessOrEqual(t, worst(events, c.Rate), bound(c, c.Size, largest))
	})
}

// The short way of the memory store decides as Apply does, to the last bit.
func TestTakeNow(t *testing.T) {
	var granted, refused, left int
	rapid.Check(t, func(t *rapid.T) {
		c := drawPlain(t)
		k := c.curve()
		b, s := bucketOf(t, c, rapid.Float64Range(0, k.max).Draw(t, "initial"), 0), newSetting(c)
		b.Name = "b"
		now := int64(0)
		for range 100 {
			now = drawTime(t, now)
			if rapid.Bool().Draw(t, "soon") {
				now = b.SeenMicros + int64(rapid.Float64Range(0, 3).Draw(t, "gap")*k.interval)
			}
			n := rapid.Int64Range(1, 5).Draw(t, "permits")
			wait := int64(rapid.Float64Range(0, 3).Draw(t, "timeout") * k.interval)
			short, before := *b, *b
			_, ok, decided := short.takeNow(now, s, n, wait, nil)
			g := takeAt(t, b, now, n, wait)
			switch {
			case !decided:
				left++
			case ok:
				granted++
				require.True(t, g.OK)
				require.Zero(t, g.WaitMicros)
				if short.Epoch != before.Epoch { // named at random
					require.NotEqual(t, before.Epoch, b.Epoch)
					short.Epoch = b.Epoch
				}
				require.Zero(t, short.Tail)
				short.Tail = b.Tail // a tag, for which takeNow has no nonce
				require.Equal(t, *b, short)
			default:
				refused++
				require.False(t, g.OK)
				require.Equal(t, before, short)
			}
			if !g.OK {
				*b = before // as a store would
			}
		}
	})
	t.Logf("%d granted, %d refused, %d left to Apply", granted, refused, left)
	require.Greater(t, granted, 500)
	require.Greater(t, refused, 500)
}

// With penalties anywhere, the window bound holds for the times at which permits fall due in the end, and none of them falls
// into a penalty.
func TestWindowBoundWithHolds(t *testing.T) {
	var holds, takes int
	rapid.Check(t, func(rt *rapid.T) {
		c := drawPlain(rt)
		s := newSetting(c)
		now := int64(1_000_000_000)
		b := bucketOf(rt, c, rapid.Float64Range(0, s.max).Draw(rt, "initial"), now)
		var due []event
		largest := 0.0
		for range 200 {
			now += int64(rapid.Float64Range(0, 3).Draw(rt, "gap") * s.interval)
			r := permit.Request{Permits: rapid.Int64Range(1, 5).Draw(rt, "permits"), MaxWaitMicros: int64(20 * s.interval)}
			if rapid.IntRange(0, 9).Draw(rt, "hold") == 0 {
				r = permit.Request{Op: permit.Hold, HoldMicros: 1 + int64(rapid.Float64Range(0, 30).Draw(rt, "intervals")*s.interval)}
			}
			paused := b.PausedMicros
			batch := &permit.Batch{Terms: termsOf(c), Epoch: engine.NewEpoch(), Requests: []permit.Request{r}}
			var out permit.Outcome
			err := b.apply(now, batch, &out)
			require.NoError(rt, err)
			g := batch.Requests[0].Grant
			switch {
			case r.Op == permit.Hold && g.OK:
				holds++
				for i := range due {
					if due[i].at > now {
						due[i].at += b.PausedMicros - paused
						require.GreaterOrEqual(rt, due[i].at, now+r.HoldMicros)
					}
				}
			case g.OK:
				takes++
				largest = max(largest, float64(r.Permits))
				due = append(due, event{out.NowMicros + g.WaitMicros, float64(r.Permits)})
				require.GreaterOrEqual(rt, out.NowMicros+g.WaitMicros, b.HeldUntilMicros)
			}
		}
		require.LessOrEqual(rt, worst(due, c.Rate), bound(c, s.max, largest), "%+v", c)
	})
	t.Logf("%d holds, %d takes", holds, takes)
	require.Greater(t, holds, 500)
	require.Greater(t, takes, 3000)
}
