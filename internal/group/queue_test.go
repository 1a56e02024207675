package group

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// two returns the parts of a participant of two buckets: 10 and 5 permits a second, none of them stored.
func two(choice permit.Choice, parts ...[]int) *desk {
	return deskOf(shopOf(bucketOf("fast", 100*time.Millisecond, 5), bucketOf("slow", 200*time.Millisecond, 5)), choice, parts...)
}

// A freed grant goes to the first call that it serves sooner. That call's own goes to the next such one, and the last grant goes to a waiter without one.
func TestFreedGrantMovesUp(t *testing.T) {
	d := two(permit.All)
	var calls []*Call
	for i := range int64(4) {
		q := d.call(1, 60*second)
		calls = append(calls, q)
		d.give(q, start+(i+1)*second)
	}
	waiter := d.call(1, 60*second)
	d.queue.abandon(calls[1], nil, d.now)
	assert.Equal(t, left, calls[1].state)
	assert.Equal(t, start+second, calls[0].due, "it is ahead")
	assert.Equal(t, start+2*second, calls[2].due)
	assert.Equal(t, start+3*second, calls[3].due)
	assert.Equal(t, owned, waiter.state)
	assert.Equal(t, start+4*second, waiter.due)
	assert.Empty(t, d.queue.asking)
	assert.Equal(t, 4, d.queue.count)
	assert.Zero(t, d.refunds(0)+d.refunds(1), "nothing goes back")
}

// A call for another number of permits keeps its grant.
func TestFreedGrantOfAnotherSize(t *testing.T) {
	d := two(permit.All)
	small, large := d.call(1, 60*second), d.call(2, 60*second)
	d.give(small, start+second)
	d.give(large, start+2*second)
	d.queue.abandon(small, nil, d.now)
	require.Equal(t, start+2*second, large.due)
	require.Equal(t, int64(1), d.refunds(0))
}

// What the stores have found in time stays so, though the limiter's clock is a little behind. Each end is counted once.
func TestGrantInTime(t *testing.T) {
	d := two(permit.All)
	q := d.call(1, second)
	d.give(q, start+second+1)
	d.queue.expireTimeouts(start + second)
	require.Equal(t, owned, q.state)
	require.Equal(t, []int64{100 * ms, 200 * ms}, []int64{d.queue.ahead(0, start), d.queue.ahead(1, start)}, "the time of the bucket that the call takes")
	require.Equal(t, 1+ms, d.queue.ahead(0, start+second-ms), "as far as it is ahead")
	d.queue.release(start + second + 1)
	d.queue.refuse(q, 1)
	d.queue.fail(q, errDown)
	require.Equal(t, done, q.state)
	require.Zero(t, d.queue.count)
}

// A reservation reads its outcomes without the lock, so they are replaced, not changed.
func TestOutcomesAreReplaced(t *testing.T) {
	d := two(permit.Any)
	q := d.reserve(1, 60*second)
	d.queue.asking = nil
	g := newGrant(1, 2)
	g.parts[0].taken = true
	d.queue.give(q, g, d.now-1)
	before := q.result().Members
	require.True(t, before[0].Taken)
	g.parts[0].taken, g.parts[1].taken = false, true
	q.grant = g
	d.queue.noteDue(q)
	require.True(t, before[0].Taken)
	require.True(t, q.result().Members[1].Taken)
	require.Equal(t, 1, q.member)
}

// Which waiter without a grant gets a freed one that is due in a second. Otherwise it goes back to all members.
func TestFreedGrantOfAWaiter(t *testing.T) {
	for name, test := range map[string]struct {
		waiter func(*desk) *Call
		gets   bool
	}{
		"a waiter":                     {func(d *desk) *Call { return d.call(1, 60*second) }, true},
		"in time to the microsecond":   {func(d *desk) *Call { return d.call(1, second) }, true},
		"too late":                     {func(d *desk) *Call { return d.call(1, second-1) }, false},
		"for more permits":             {func(d *desk) *Call { return d.call(2, 60*second) }, false},
		"a reservation that has none":  {func(d *desk) *Call { return d.reserve(1, 60*second) }, false},
		"a settlement":                 {func(d *desk) *Call { q := d.call(1, 60*second); q.settles = []int64{1, 1}; return q }, false},
		"came after it was due":        {func(d *desk) *Call { q := d.call(1, 60*second); q.came = start + second + 1; return q }, false},
		"a granted one that is lapsed": {func(d *desk) *Call { q := d.reserve(1, 60*second); q.promise(); return q }, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := two(permit.All)
			d.members[1].Weight = 3
			first := d.call(1, 60*second)
			d.give(first, start+second)
			waiter := test.waiter(d)
			d.queue.abandon(first, nil, d.now)
			require.Equal(t, test.gets, waiter.state == owned)
			if test.gets {
				assert.Zero(t, d.refunds(0)+d.refunds(1))
			} else {
				assert.Equal(t, int64(1), d.refunds(0))
				assert.Equal(t, int64(3), d.refunds(1), "by its weight")
			}
		})
	}
}

// A grant that fell due more than 100 ms ago is given back, and serves no waiter.
func TestFreedGrantIsOverdue(t *testing.T) {
	for _, late := range []int64{100 * ms, 100*ms + 1} {
		d := two(permit.All)
		waiter := d.call(1, 60*second)
		waiter.came = start - second
		d.queue.free(d.grant(1, start-late), d.now)
		require.Equal(t, late == 100*ms, d.refunds(0) == 0)
	}
}

// For permit.Any the member of a reservation is fixed: its grant is of that member, and no other takes its place.
func TestFreedGrantOfAny(t *testing.T) {
	d := two(permit.Any)
	grants := func(member int, due int64) *grant {
		g := newGrant(1, 2)
		g.parts[member] = part{taken: true, terms: d.members[member].Limiter.Own, due: due}
		g.settle()
		return g
	}
	reservation, waiter, first := d.reserve(1, 60*second), d.call(1, 60*second), d.call(1, 60*second)
	for i, q := range []*Call{first, reservation, waiter} {
		d.queue.keep(func(o *Call) bool { return o != q })
		d.queue.give(q, grants(i%2, start+int64(i+1)*second), d.now)
	}
	require.Equal(t, 0, waiter.member)
	first.grant.parts[0], first.grant.parts[1] = first.grant.parts[1], first.grant.parts[0]
	d.queue.abandon(first, nil, d.now)
	assert.Equal(t, start+2*second, reservation.due)
	assert.Equal(t, start+second, waiter.due)
	assert.Equal(t, 1, waiter.member, "the member of its new grant")
	assert.Equal(t, int64(1), d.refunds(0), "the last grant goes back")
}

// Calls end when they are due. Permits that are overdue by more than 100 ms lapse: they go back, and their calls ask again before all others, at once.
func TestRelease(t *testing.T) {
	d := two(permit.All)
	var calls []*Call
	for i := range int64(4) {
		q := d.call(1, 60*second)
		calls = append(calls, q)
		d.give(q, start+(i+1)*second)
	}
	waiter := d.call(1, 60*second)
	d.queue.askAt = start + 60*second
	d.queue.release(start + second - 1)
	require.Equal(t, owned, calls[0].state)
	d.queue.release(start + 3*second)
	assert.Equal(t, []state{asking, asking, done, owned}, []state{calls[0].state, calls[1].state, calls[2].state, calls[3].state})
	assert.Equal(t, []*Call{calls[0], calls[1], waiter}, d.queue.asking, "in the order of their arrival")
	assert.Zero(t, d.queue.askAt, "they ask at once")
	assert.Equal(t, int64(2), d.refunds(0))
	assert.Equal(t, start+4*second, d.queue.nextDue)
	assert.Equal(t, 4, d.queue.count)
}

// By the clock of a test nothing lapses.
func TestReleaseByAnotherClock(t *testing.T) {
	d := two(permit.All)
	d.queue.strict = false
	q := d.call(1, 60*second)
	d.give(q, start+second)
	d.queue.release(start + 30*second)
	require.Equal(t, done, q.state)
}

// A reservation that was granted and whose permits lapse is still granted: it asks again until it has others, whatever its timeout was.
func TestReservationLapses(t *testing.T) {
	d := two(permit.All)
	q := d.reserve(1, second)
	d.give(q, start+second/2)
	require.True(t, q.result().Granted)
	d.queue.release(start + 2*second)
	require.Equal(t, asking, q.state)
	d.queue.failOrRetry(q, errDown, start+2*second)
	require.True(t, q.result().Granted)
	require.Equal(t, start+2*second+retryMicros, d.queue.askAt)
	d.queue.release(start + 60*second)
	require.Equal(t, asking, q.state, "its timeout no longer counts")
}

// The timeout of a waiter ends its wait once the stores have refused it. A newcomer with a timeout of 0 is asked for.
func TestTimeouts(t *testing.T) {
	d := two(permit.All)
	short, long, newcomer := d.call(1, second), d.call(1, 3*second), d.call(1, 0)
	d.queue.refuser = 1
	for _, q := range []*Call{short, long} {
		q.decided = start
	}
	d.queue.release(start + second - 1)
	require.Equal(t, asking, short.state)
	d.queue.release(start + second)
	assert.Equal(t, refused, short.state)
	assert.Equal(t, Result{Wait: second, Member: 1}, short.result(), "the member that refused the waiters last")
	assert.Equal(t, asking, newcomer.state)
	assert.Equal(t, asking, long.state)
	assert.Equal(t, start+3*second, d.queue.nextEnd)
	assert.Equal(t, []*Call{long, newcomer}, d.queue.asking)
}

// A penalty moves the permits of its member. A call is due with the last of its members, so not all calls move.
func TestShift(t *testing.T) {
	d := two(permit.All)
	near, far := d.call(1, 60*second), d.call(1, 60*second)
	d.give(near, start+second).parts[1].due = start + second/2
	d.give(far, start+20*second)
	d.queue.shift(1, shift{longer: 5 * second, until: start + 5*second}, d.now)
	assert.Equal(t, start+5*second+second/2, near.due)
	assert.Equal(t, start+25*second, far.due)
	assert.Equal(t, start+5*second+second/2, d.queue.nextDue)
	d.queue.shift(1, shift{shorter: 4 * second, until: math.MinInt64}, start+second)
	assert.Equal(t, start+second+second/2, near.due, "the penalty has ended early")
	assert.Equal(t, start+21*second, far.due)
	d.queue.shift(0, shift{longer: 10 * second, until: start + 30*second}, start+second)
	assert.Equal(t, start+30*second, near.due, "nothing is due before the end of a penalty")
	assert.Equal(t, start+30*second, d.queue.nextDue)
}

// A waiter whose permits a penalty has moved beyond its timeout is refused. Its grant serves a more patient one.
func TestShiftBeyondATimeout(t *testing.T) {
	d := two(permit.All)
	q, patient := d.call(1, 2*second), d.call(1, 60*second)
	d.give(q, start+second)
	d.queue.shift(0, shift{longer: 5 * second, until: start + 5*second}, d.now)
	d.queue.release(d.now)
	assert.Equal(t, refused, q.state)
	assert.Equal(t, 6*second, q.result().Wait)
	assert.Equal(t, owned, patient.state)
	assert.Equal(t, start+6*second, patient.due)
}

// What joins the queue: not more calls than there is room for, and no call that cannot be in time behind those that wait.
func TestJoin(t *testing.T) {
	d := two(permit.All)
	d.config.MaxWaiters = 3
	for range 3 {
		d.call(1, permit.MaxExact)
	}
	q := d.call(1, permit.MaxExact)
	require.ErrorIs(t, q.err, permit.ErrTooManyWaiters)
	require.Equal(t, 3, d.queue.count)

	d = two(permit.All)
	d.members[0].stored, d.members[1].stored = 0, 0
	d.members[0].free, d.members[1].free = start, start+second
	for range 5 {
		d.call(1, permit.MaxExact)
	}
	d.queue.at, d.queue.askAt = start, start+second/2
	q = d.call(1, 2200*ms-1) // after a second of debt, 6 permits of 200 ms
	require.Equal(t, refused, q.state)
	require.Equal(t, Result{Wait: 2200 * ms, Member: 1}, q.result())
	q = d.call(1, 2200*ms)
	require.Equal(t, asking, q.state)
	require.Equal(t, start, q.decided, "it counts as refused with those ahead")
	d.queue.at = start - 100*ms // too old to refuse by
	q = d.call(1, 1)
	require.Equal(t, asking, q.state)
	require.Zero(t, q.decided)
	require.Zero(t, d.queue.askAt, "the next reply shows whether it can be in time")
}

// For permit.Any a call is hopeless if it is with every member, even if other members serve those ahead of it.
func TestJoinAny(t *testing.T) {
	d := two(permit.Any)
	d.members[0].stored, d.members[1].stored = 0, 0
	d.members[0].free, d.members[1].free = start+60*second, start+second
	d.call(1, permit.MaxExact)
	d.queue.at, d.queue.askAt = start, start+second/2
	require.Equal(t, asking, d.call(1, 2*second).state)
	require.Equal(t, asking, d.call(1, 1200*ms).state)
	q := d.call(1, 1200*ms-1)
	require.Equal(t, refused, q.state)
	require.Equal(t, Result{Wait: 1200 * ms, Member: 1}, q.result())
}

// What is sent while the waiters pause: reservations and settlements, wherever they stand.
func TestSends(t *testing.T) {
	for name, test := range map[string]struct {
		join  func(*desk)
		sends bool
	}{
		"nothing": {func(d *desk) {}, false},
		"waiters": {func(d *desk) { d.call(1, permit.MaxExact).decided = start }, false},
		"a reservation behind them": {func(d *desk) {
			d.call(1, permit.MaxExact).decided = start
			d.reserve(1, permit.MaxExact)
		}, true},
		"a reservation between them": {func(d *desk) {
			d.call(1, permit.MaxExact).decided = start
			d.reserve(1, permit.MaxExact)
			d.call(1, permit.MaxExact)
		}, true},
		"a settlement behind them": {func(d *desk) {
			d.call(1, permit.MaxExact).decided = start
			q := NewCall(0, permit.MaxExact, 0, false)
			q.settles = []int64{1, 0}
			d.queue.join(q, start, 0)
		}, true},
		"a granted reservation": {func(d *desk) {
			d.call(1, permit.MaxExact).decided = start
			d.reserve(1, permit.MaxExact).promise()
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			d := two(permit.All)
			test.join(d)
			d.queue.askAt = start + second
			assert.Equal(t, test.sends, d.queue.sends(start))
			assert.Equal(t, len(d.queue.asking) > 0, d.queue.sends(start+second))
			assert.Equal(t, len(d.queue.asking) > 0, d.queue.next(true) == 0 && d.queue.next(false) > 0, "a batch in flight is waited for")
		})
	}
}

// A spare grant behind which another process has taken permits is kept: a newcomer has it if it would not be due sooner without. Otherwise it lapses once it is
// due, and counts as lost.
func TestSpareGrant(t *testing.T) {
	for _, choice := range []permit.Choice{permit.All, permit.Any} {
		d := two(choice)
		first := d.call(1, permit.MaxExact)
		d.trip()
		require.Equal(t, owned, first.state)
		for _, b := range d.buckets { // another process
			b.take(&permit.Request{Permits: 1})
		}
		d.queue.abandon(first, nil, d.now)
		require.True(t, d.queue.returns(d.now), "no reply has shown the other process yet")
		d.trip()
		require.Len(t, d.queue.spare, 1, "it was refused, and is not lost")
		require.False(t, d.queue.returns(d.now))
		require.Zero(t, d.members[0].lost.Load())

		for name, q := range map[string]*Call{"for other permits": d.call(2, permit.MaxExact), "too late": d.call(1, 50*ms-1)} {
			require.NotEqual(t, owned, q.state, name)
			d.queue.abandon(q, nil, d.now)
		}
		second := d.reserve(1, permit.MaxExact)
		require.Equal(t, owned, second.state)
		require.Equal(t, first.due, second.due)
		require.Equal(t, d.members[0].terms, second.result().Members[0].Seen.Terms)

		d.queue.abandon(second, nil, d.now)
		d.now = first.due + 1
		require.Equal(t, asking, d.call(1, permit.MaxExact).state, "no call may use permits that were due before it came")
		require.True(t, d.queue.returns(d.now), "it goes back out of turn")
		d.trip()
		require.Empty(t, d.queue.spare)
		require.Equal(t, int64(1), d.members[0].lost.Load(), "that was refused, too")
	}
}

// Two processes take turns, so what one gives back is never at the tail: by the last reply it is known not to be, and is not sent.
func TestSpareGrantBehindOthers(t *testing.T) {
	d := two(permit.All)
	first := d.call(1, permit.MaxExact)
	d.trip()
	for _, b := range d.buckets {
		b.take(&permit.Request{Permits: 1})
	}
	d.call(1, permit.MaxExact)
	d.trip()
	d.queue.keep(func(*Call) bool { return false })
	last := d.queue.owned[len(d.queue.owned)-1]
	d.queue.abandon(first, nil, d.now)
	require.True(t, d.queue.returns(d.now), "the last call has moved up, and its grant is at the tail")
	d.queue.abandon(last, nil, d.now)
	d.queue.returnSpare(d.now)
	require.Len(t, d.queue.spare, 1)
	require.Equal(t, int64(1), d.refunds(0))
}

// Calls that leave a crowd are removed in few steps: a call that joins or leaves does not walk the queue.
func TestCrowdOfAGroup(t *testing.T) {
	d := two(permit.All)
	d.config.MaxWaiters = math.MaxInt
	var crowd []*Call
	for range 10_000 {
		crowd = append(crowd, d.call(1, permit.MaxExact))
	}
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(crowd)/2, func(i, j int) { crowd[i], crowd[j] = crowd[j], crowd[i] })
	steps := 0
	for i, q := range crowd {
		before, gone := len(d.queue.asking), d.queue.gone
		d.queue.abandon(q, nil, d.now)
		if removed := before - len(d.queue.asking); gone+1 > before/2 { // the others were moved up
			steps += before
		} else {
			steps += removed
		}
		require.Equal(t, int64(len(crowd)-i-1), d.queue.wanted)
		if n := len(d.queue.asking); n > 0 {
			require.NotEqual(t, left, d.queue.asking[0].state, "a look for the first walks the queue")
			require.NotEqual(t, left, d.queue.asking[n-1].state, "a look for the last walks the queue")
		}
	}
	require.Empty(t, d.queue.asking)
	require.Less(t, steps, 3*len(crowd))
}

// Calls that have left are asked for no more, so their time to ask rings no alarm: it would ring again at once.
func TestNoAlarmForThoseWhoLeft(t *testing.T) {
	l := queue{asking: []*Call{{state: left}, {state: left}}, gone: 2, askAt: 5}
	require.Zero(t, l.next(false))
	l.asking = append(l.asking, new(Call))
	require.EqualValues(t, 5, l.next(false))
}
