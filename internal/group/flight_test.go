package group

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// sizes returns the permits of the joint requests that a member is asked for.
func sizes(f *flight, member int) (permits []int64) {
	for _, r := range f.batch[member].Requests[len(f.own[member]):] {
		permits = append(permits, r.Permits)
	}
	return permits
}

// A batch has the refunds of a member first, the newest ahead, then its settlements, and then the joint requests by arrival.
func TestFlightOrder(t *testing.T) {
	d := two(permit.All)
	d.members[1].Weight = 10
	for _, id := range []int64{4, 9, 2} {
		d.members[1].giveBack(&refund{give: permit.Refund{ID: id}})
	}
	d.call(3, permit.MaxExact)
	settles := NewCall(0, permit.MaxExact, 0, false)
	settles.settles = []int64{0, -7}
	d.queue.join(settles, d.now, 0)
	d.reserve(5, permit.MaxExact)
	f := d.build()
	require.Equal(t, []int64{3, 5}, sizes(f, 0))
	require.Equal(t, []int64{30, 50}, sizes(f, 1))
	own := f.batch[1].Requests[:4]
	assert.Equal(t, []int64{9, 4, 2}, []int64{own[0].Back.ID, own[1].Back.ID, own[2].Back.ID})
	assert.Equal(t, permit.Settle, own[3].Op)
	assert.Equal(t, int64(-7), own[3].Permits)
	assert.Empty(t, f.own[0], "it owes the first member nothing")
	assert.Empty(t, d.queue.asking)
	assert.Empty(t, d.members[1].refunds)
}

// Waiters ask within the look-ahead of each member, and the refusal of a member is final only if the caller's timeout is within it. A reservation asks for
// what its caller allows.
func TestFlightLooksAhead(t *testing.T) {
	d := two(permit.All)
	d.members[0].stored, d.members[1].stored = 0, 0
	d.call(1, 950*ms)
	d.call(1, permit.MaxExact)
	d.reserve(1, permit.MaxExact)
	f := d.build()
	require.Len(t, f.rows, 3)
	wait := func(member, row int) int64 { return f.batch[member].Requests[row].MaxWaitMicros }
	assert.Equal(t, []int64{950 * ms, 950 * ms}, []int64{wait(0, 0), wait(1, 0)}, "its own timeout")
	assert.Equal(t, second-50*ms, wait(0, 1), "a horizon less an interval, plus the cost of the request, less half of the time of the one ahead")
	assert.Equal(t, second-100*ms, wait(1, 1))
	assert.Equal(t, int64(permit.MaxExact), wait(0, 2))
	assert.Equal(t, []uint64{3, 0, 3}, f.ends)
}

// Beyond two horizons of a member's time no more waiters are asked for. They stay in the queue; a reservation behind them does not.
func TestFlightStopsAskingForWaiters(t *testing.T) {
	d := two(permit.All)
	d.members[0].stored, d.members[1].stored = 0, 0
	for range 20 {
		d.call(1, permit.MaxExact)
	}
	reservation := d.reserve(1, permit.MaxExact)
	f := d.build()
	require.Len(t, f.rows, 12, "2 s of 200 ms each, the first one beyond, and the reservation")
	require.Equal(t, reservation, f.rows[11])
	require.Len(t, d.queue.asking, 9)
}

// run decides a flight by the parts of a shop.
func (d *desk) run(f *flight) { f.run(&d.config) }

// Later parts are asked for what the earlier ones have granted.
func TestFlightParts(t *testing.T) {
	d := two(permit.All, []int{1}, []int{0})
	for range 3 {
		d.reserve(1, 450*ms) // the slow member grants two
	}
	f := d.build()
	d.run(f)
	require.Equal(t, []int{0, 1}, d.asked)
	require.Equal(t, []int{3, 2}, d.joint)
	var members []int
	for m, r := range f.decided(1) {
		members = append(members, m)
		require.True(t, r.Grant.OK)
	}
	require.Equal(t, []int{1, 0}, members)
	members = nil
	for m := range f.decided(2) {
		members = append(members, m)
	}
	require.Equal(t, []int{1}, members, "the fast member was not asked")
}

// If the first part refuses all, the second is asked only for requests of its own, or if grants wait that a penalty would move.
func TestFlightAsksTheOthers(t *testing.T) {
	for name, test := range map[string]struct {
		prepare func(*desk)
		asked   []int
	}{
		"nothing to ask":     {func(*desk) {}, []int{0}},
		"a refund":           {func(d *desk) { d.members[0].giveBack(&refund{give: permit.Refund{Tag: 99}}) }, []int{0, 1}},
		"a refund of others": {func(d *desk) { d.members[1].giveBack(&refund{give: permit.Refund{Tag: 99}}) }, []int{0}},
		"grants that wait":   {func(d *desk) { d.give(d.call(1, permit.MaxExact), start+second) }, []int{0, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			d := two(permit.All, []int{1}, []int{0})
			test.prepare(d)
			d.reserve(1, ms)
			d.run(d.build())
			require.Equal(t, test.asked, d.asked)
			require.Zero(t, append(d.joint, 0)[1])
		})
	}
}

// A part that fails keeps the later ones from being asked for joint requests, for permit.All. Another member may grant them, for permit.Any.
func TestFlightOfAPartThatFails(t *testing.T) {
	for choice, joint := range map[permit.Choice][]int{permit.All: {1, 0}, permit.Any: {1, 1}} {
		d := two(choice, []int{0}, []int{1})
		d.fail[0] = errDown
		d.members[1].giveBack(&refund{give: permit.Refund{Tag: 99}})
		d.reserve(1, permit.MaxExact)
		f := d.build()
		d.run(f)
		require.Equal(t, joint, d.joint, choice)
		require.ErrorIs(t, f.parts[0].err, errDown)
		require.True(t, f.parts[1].decided)
	}
}

// For permit.Any a later part is asked for what is not due yet, if it is due sooner there.
func TestFlightOfAnyWantsItSooner(t *testing.T) {
	d := two(permit.Any, []int{1}, []int{0})
	d.buckets[1].Balance = permit.Balance{Next: start, Stored: 1} // due at once
	d.reserve(1, permit.MaxExact)
	d.reserve(1, permit.MaxExact) // due in 200 ms
	d.reserve(2, 500*ms)          // due in 600 ms: refused
	d.run(d.build())
	require.Equal(t, []int{3, 2}, d.joint)
	asked := d.rows[1][0]
	require.Equal(t, []int64{200*ms - 1, 500 * ms}, []int64{asked[0].MaxWaitMicros, asked[1].MaxWaitMicros})
}

// A batch is decided no later than its last caller needs it, and with requests of members alone within the store timeout.
func TestFlightLimit(t *testing.T) {
	d := two(permit.All)
	for i, wait := range []time.Duration{100 * time.Millisecond, 300 * time.Millisecond} {
		q := NewCall(1, permit.MaxExact, time.Hour+wait, false)
		d.queue.join(q, d.now, time.Hour)
		require.Len(t, d.queue.asking, i+1)
	}
	f := newFlight(&d.config)
	f.local, f.began = d.now, time.Hour
	f.fill(&d.queue, time.Hour)
	require.Equal(t, time.Hour+300*time.Millisecond, f.until)
	f.own[1] = append(f.own[1], own{refund: &refund{}})
	f.limit(time.Second)
	require.Equal(t, time.Hour+time.Second, f.until)
}
