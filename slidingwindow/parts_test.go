package slidingwindow

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// Calls that are put back are sent before those that have arrived since, in their order.
func TestPutBackInFront(t *testing.T) {
	q := queue{most: 10}
	first, second, third := &call{n: 1, sent: true}, &call{n: 2, sent: true}, &call{n: 4}
	q.push(third)
	q.putBack([]*call{first, second})
	require.False(t, first.sent || second.sent)
	require.Equal(t, []*call{first, second, third}, []*call{q.next(), q.next(), q.next()})
	require.Nil(t, q.next())
}

// A clock that is set back stands still for the step, and goes on from there. The view is invalid after it, because the time that has passed
// is unknown.
func TestSteadyClock(t *testing.T) {
	hand := &handClock{micros: 5000}
	c := &coordinator{window: &window{clock: clock.New(hand)}}
	began := c.now()
	c.view.valid = true
	hand.micros = 6000
	require.Equal(t, began+1000, c.now())
	require.True(t, c.view.valid)
	hand.micros = 2000
	require.Equal(t, began+1000, c.now())
	require.False(t, c.view.valid)
	c.view.valid = true
	hand.micros = 2500
	require.Equal(t, began+1500, c.now())
	require.True(t, c.view.valid)
}

// A reply ends the pause of reports after an error that needed a repair.
func TestReplyAfterARepair(t *testing.T) {
	h := health{broken: true}
	require.Nil(t, h.replied())
	require.False(t, h.broken)
}

// Refunds that Redis does not have yet move with the clock, and lapse if Redis has lost the state that they would change.
func TestRefundsNotSent(t *testing.T) {
	r := &rule{window: 1000, resolution: 100, parts: 10}
	var a admitted
	a.counts.advance(r, 5000)
	require.True(t, a.counts.addAt(r, 5000, 3))
	a.refund(r, 5000, 2)
	require.Equal(t, []part{{5000, 2}}, a.refunds)
	a.shift(r, 200)
	require.Equal(t, []part{{5200, 2}}, a.refunds)
	a.lost(r, nil)
	require.Empty(t, a.refunds)
	require.Equal(t, []part{{5200, 1}}, a.unreported.list())
}

// The calls of a batch that ran too late are sent once more, with its refunds. The second time they fail.
func TestLateTwice(t *testing.T) {
	c := &coordinator{window: &window{name: "x"}, queue: queue{most: 10}}
	q := &call{n: 1, sent: true}
	c.queue.pending = 1
	again, err := c.resend(&flight{calls: []*call{q}, refunds: []part{{1, 2}}}, []string{"late", "1000"}, 1000)
	require.True(t, again)
	require.NoError(t, err)
	require.Equal(t, []part{{1, 2}}, c.admitted.refunds)
	require.Same(t, q, c.queue.next())
	again, err = c.resend(&flight{calls: []*call{q}}, []string{"late", "1000"}, 1000)
	require.False(t, again)
	require.ErrorIs(t, err, ErrStoreTimeout)
	require.Nil(t, c.queue.next())
}

// A failed batch was not the first request of its sub-interval: the next one is sent although the view refuses it.
func TestFailedBatchAsksAgain(t *testing.T) {
	c := &coordinator{window: &window{name: "x", clock: clock.New(&handClock{micros: 5000})}, queue: queue{most: 10}, asked: 7}
	q := &call{n: 1, sent: true}
	landed := c.settle(&flight{calls: []*call{q}}, nil, errors.New("WRONGTYPE"))
	require.ErrorIs(t, landed.err, ErrCorruptState)
	require.ErrorIs(t, q.err, ErrCorruptState)
	require.Zero(t, c.asked)
}
