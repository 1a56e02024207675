package group

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// A call is due when the last of its members is. What is due at once ends its call.
func TestReplyGrants(t *testing.T) {
	d := two(permit.All)
	d.buckets[0].Balance = permit.Balance{Next: start, Stored: 5}
	d.buckets[1].Balance = permit.Balance{Next: start, Stored: 1}
	once, later := d.call(1, permit.MaxExact), d.call(2, permit.MaxExact)
	d.trip()
	assert.Equal(t, done, once.state)
	assert.Equal(t, Result{Granted: true, Member: -1}, once.result())
	assert.Equal(t, owned, later.state)
	assert.Equal(t, start+400*ms, later.due, "by the slow member")
	d.queue.release(start + 400*ms)
	assert.Equal(t, 400*ms, later.result().Wait)
	assert.Zero(t, d.queue.count)
}

// What one part has granted goes back if a later one refuses. The call is refused by that member, and nothing is lost.
func TestReplyGivesBackOnARefusal(t *testing.T) {
	d := two(permit.All, []int{0}, []int{1})
	d.members[0].Weight = 2
	q := d.reserve(1, 300*ms)
	d.buckets[1].Balance = permit.Balance{Next: start + second}
	d.trip()
	require.Equal(t, refused, q.state)
	require.Equal(t, 1, q.result().Member)
	require.Equal(t, second+200*ms, q.result().Wait)
	require.True(t, q.members[0].Taken, "as it was decided")
	require.True(t, q.members[1].Refused)
	require.Equal(t, int64(2), d.refunds(0))
	require.Zero(t, d.refunds(1))
	d.trip()
	require.Equal(t, int64(2), d.buckets[0].given)
	require.Zero(t, d.members[0].lost.Load())
}

// The same if a later part fails. The call fails with the error of that part's member.
func TestReplyGivesBackOnAFailure(t *testing.T) {
	d := two(permit.All, []int{0}, []int{1})
	q := d.call(1, permit.MaxExact)
	d.fail[1] = errDown
	d.trip()
	require.Equal(t, failed, q.state)
	require.ErrorIs(t, q.err, errDown)
	require.ErrorContains(t, q.err, "member 1")
	require.Equal(t, int64(1), d.refunds(0))
	require.Zero(t, d.refunds(1))
}

// For permit.Any the others count if a part fails. If all fail, the call does.
func TestReplyOfAnyWithoutAPart(t *testing.T) {
	d := two(permit.Any, []int{0}, []int{1})
	d.fail[0] = errDown
	q := d.call(1, permit.MaxExact)
	d.trip()
	require.Equal(t, owned, q.state)
	require.Equal(t, 1, q.result().Member)
	d.fail[1] = errDown
	q = d.call(1, permit.MaxExact)
	d.trip()
	require.ErrorContains(t, q.err, "member 0")
}

// For permit.Any permits that a later part has sooner are taken, and the first ones go back.
func TestReplyOfAnySooner(t *testing.T) {
	d := two(permit.Any, []int{1}, []int{0})
	q := d.call(1, permit.MaxExact)
	d.trip()
	require.Equal(t, 0, q.result().Member)
	require.Equal(t, start+100*ms, q.due)
	require.Equal(t, int64(1), d.refunds(1))
	require.Zero(t, d.refunds(0))
}

// A caller that left while its batch was in flight leaves its permits to the first waiter that wants as many, or they go back.
func TestReplyToACallerThatLeft(t *testing.T) {
	d := two(permit.All)
	first := d.call(1, permit.MaxExact)
	f := d.build()
	other, waiter := d.call(2, permit.MaxExact), d.call(1, permit.MaxExact)
	d.run(f)
	d.queue.abandon(first, nil, d.now)
	d.land(f)
	assert.Equal(t, left, first.state)
	assert.Equal(t, asking, other.state)
	assert.Equal(t, owned, waiter.state)
	assert.Equal(t, []*Call{other}, d.queue.asking)

	d.queue.abandon(other, nil, d.now)
	last := d.call(1, permit.MaxExact)
	f = d.build()
	d.run(f)
	d.queue.abandon(last, nil, d.now)
	d.land(f)
	require.Equal(t, int64(1), d.refunds(0))
	require.Equal(t, int64(1), d.refunds(1))
}

// A late reply ends no call and shows nothing of the members. What it has granted goes back, though waiters want it.
func TestReplyLate(t *testing.T) {
	d := two(permit.All)
	q := d.call(1, permit.MaxExact)
	f := d.build()
	d.run(f)
	late := deadlines{config: &d.config, queue: &d.queue, inFlight: &inFlight{config: &d.config}}
	late.expireFlight(f, d.now)
	require.ErrorIs(t, q.err, permit.ErrStoreTimeout)
	waiter := d.call(1, permit.MaxExact)
	d.land(f)
	require.Equal(t, asking, waiter.state)
	require.Equal(t, int64(1), d.refunds(0))
	require.Equal(t, int64(1), d.refunds(1))
	require.Nil(t, d.members[0].terms)
}

// Refunds without a reply by the deadline are lost, once: the late reply may have carried them out. Settlements fail.
func TestDeadlineOfRefunds(t *testing.T) {
	d := two(permit.All)
	c := &confirm{done: make(chan struct{})}
	d.members[1].Weight = 2
	g := d.grant(3, d.now)
	g.confirm = c.await()
	d.queue.giveBack(g, inTurn, d.now)
	settles := NewCall(0, permit.MaxExact, 0, false)
	settles.settles = []int64{1, 0}
	d.queue.join(settles, d.now, 0)
	f := d.build()
	late := deadlines{config: &d.config, queue: &d.queue, inFlight: &inFlight{config: &d.config}}
	late.expireFlight(f, d.now)
	<-c.done
	require.ErrorIs(t, c.err, permit.ErrStoreTimeout)
	require.ErrorIs(t, settles.err, permit.ErrStoreTimeout)
	d.run(f)
	d.land(f)
	require.Equal(t, int64(3), d.members[0].lost.Load())
	require.Equal(t, int64(6), d.members[1].lost.Load())
}

// Refunds that the bucket refuses once they are due, or whose part fails, are lost. Those of a part that was not asked wait for the next batch.
func TestReplyToRefunds(t *testing.T) {
	d := two(permit.All, []int{0}, []int{1})
	for _, b := range d.buckets {
		b.seq = 1
	}
	giveBack := func() {
		g := d.grant(3, d.now)
		for m := range g.parts {
			g.parts[m].place.Tag = 99
		}
		d.queue.giveBack(g, inTurn, d.now)
	}
	giveBack()
	d.trip()
	d.trip() // out of turn
	assert.Equal(t, []int64{3, 3}, []int64{d.members[0].lost.Load(), d.members[1].lost.Load()}, "another process has taken permits behind them")

	giveBack()
	d.fail[1] = errDown
	d.trip()
	assert.Equal(t, int64(6), d.members[1].lost.Load())

	f := d.build()
	f.own[1] = append(f.own[1], own{refund: &refund{give: permit.Refund{Permits: 5}}})
	f.batch[1].Requests = append(f.batch[1].Requests, permit.Request{Op: permit.GiveBack})
	d.land(f) // no part was asked
	assert.Equal(t, int64(5), d.refunds(1))
	assert.Equal(t, int64(6), d.members[1].lost.Load())
}

// A settlement ends when all of its members were charged. One that cannot be carried out fails.
func TestReplyToSettlements(t *testing.T) {
	settlement := func(d *desk, n ...int64) *Call {
		q := NewCall(0, permit.MaxExact, 0, false)
		q.settles = n
		d.queue.join(q, d.now, 0)
		return q
	}
	d := two(permit.All, []int{0}, []int{1})
	q := settlement(d, 4, -2)
	d.trip()
	require.Equal(t, done, q.state)
	require.Equal(t, []int64{4, -2}, []int64{d.buckets[0].charged, d.buckets[1].charged})

	q = settlement(d, 4, 2)
	f := d.build()
	f.run(&Config{Parts: d.config.Parts[:1], Decide: d.decide})
	f.parts[1] = leg{members: []int{1}} // it was not asked
	d.land(f)
	require.Equal(t, asking, q.state)
	require.Equal(t, []int64{0, 2}, q.settles, "the first member has been charged")
	d.trip()
	require.Equal(t, done, q.state)
	require.Equal(t, int64(8), d.buckets[0].charged)

	d.buckets[1].unsettled = true
	q = settlement(d, 0, 1)
	d.trip()
	require.ErrorIs(t, q.err, permit.ErrInvalidPermits)
}

// Waiters beyond the look-ahead wait, in front of the newcomers, in order, and ask again after a pause. One whose timeout lies within it is refused.
func TestReplyKeepsWaiters(t *testing.T) {
	d := two(permit.All)
	d.buckets[1].Balance = permit.Balance{Next: start + 2*second}
	impatient, first, last := d.call(1, 500*ms), d.call(1, permit.MaxExact), d.call(1, permit.MaxExact)
	f := d.build()
	newcomer := d.call(1, permit.MaxExact)
	d.run(f)
	d.land(f)
	assert.Equal(t, refused, impatient.state)
	assert.Equal(t, Result{Wait: 2200 * ms, Member: 1}, impatient.result())
	assert.Equal(t, []*Call{first, last, newcomer}, d.queue.asking)
	assert.Equal(t, 1, d.queue.refuser)
	assert.Equal(t, start, newcomer.decided, "it counts as refused with those ahead")
	assert.GreaterOrEqual(t, d.queue.askAt, start+50*ms)
	assert.LessOrEqual(t, d.queue.askAt, start+retryMost)
	assert.False(t, d.queue.sends(start))
}

// A reply by which the first waiter's permits lie within the look-ahead makes the waiters ask at once.
func TestReplyAsksSooner(t *testing.T) {
	for choice, free := range map[permit.Choice][2]int64{permit.All: {0, 0}, permit.Any: {60 * second, 0}} {
		for _, debt := range []int64{800 * ms, 801 * ms} {
			d := two(choice)
			d.buckets[1].Balance = permit.Balance{Next: start + 2*second}
			d.buckets[0].Balance = permit.Balance{Next: start + 60*second}
			d.call(1, permit.MaxExact)
			d.trip()
			require.Len(t, d.queue.asking, 1)
			d.buckets[1].Balance.Next, d.buckets[0].Balance.Next = start+debt, start+free[0]
			d.reserve(1, 0)
			f := d.build()
			d.run(f)
			require.Len(t, f.rows, 1, "the reservation alone")
			d.land(f)
			require.Equal(t, debt == 800*ms, d.queue.askAt == 0, "%v %d: the look-ahead is a second with the cost of the request", choice, debt)
		}
	}
}

// A request whose debt would leave the range of exact numbers fails.
func TestReplyOverflow(t *testing.T) {
	d := two(permit.All)
	d.buckets[0].Balance = permit.Balance{Next: permit.MaxExact}
	q := d.call(1, permit.MaxExact)
	d.trip()
	require.ErrorIs(t, q.err, permit.ErrInvalidPermits)
	require.ErrorContains(t, q.err, `"fast"`)
}

// A penalty in a reply moves what was granted before, and what the reply grants is not moved again.
func TestReplyWithAPenalty(t *testing.T) {
	d := two(permit.All)
	before := d.call(1, permit.MaxExact)
	d.trip()
	require.Equal(t, start+200*ms, before.due)
	d.buckets[0].HeldUntilMicros, d.buckets[0].PausedMicros = start+700*ms, 700*ms
	after := d.call(1, permit.MaxExact)
	d.trip()
	assert.Equal(t, start+800*ms, before.due)
	assert.Equal(t, start+700*ms, after.due)
	assert.Equal(t, start+700*ms, d.queue.nextDue)
}

// The clocks of a store and of the limiter differ. Due times are by the limiter's.
func TestReplyOfAnotherClock(t *testing.T) {
	d := two(permit.All)
	d.shop.clock = func() int64 { return d.now + 3600*second }
	d.empty()
	q := d.call(1, permit.MaxExact)
	d.trip()
	require.Equal(t, start+200*ms, q.due)
}

// A reply in which a request would wait refuses hopeless ones for 100 ms without the stores, unless permits go back.
func TestReplyShowsASnapshot(t *testing.T) {
	show := func(d *desk) {
		f := d.build()
		d.run(f)
		d.config.Immediate = false
		d.land(f)
	}
	d := two(permit.All)
	d.buckets[1].Balance = permit.Balance{Next: start + 60*second}
	d.reserve(1, 0)
	show(d)
	s := d.view.snapshot.Load()
	require.NotNil(t, s)
	require.Equal(t, engine.Seen{Terms: d.buckets[1].terms, Balance: d.buckets[1].Balance, Now: start}, d.view.seen(1))
	d.queue.giveBack(d.grant(1, start), inTurn, start)
	require.Nil(t, d.view.snapshot.Load())
	d.reserve(1, 0)
	show(d)
	require.NotNil(t, d.view.snapshot.Load(), "the refunds have left with that batch")
	d.queue.giveBack(d.grant(1, start), inTurn, start)
	f := d.build()
	d.run(f)
	d.queue.giveBack(d.grant(1, start), inTurn, start)
	d.land(f)
	require.Nil(t, d.view.snapshot.Load())
}
