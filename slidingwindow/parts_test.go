package slidingwindow

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/waiting"
)

// A clock that is set back stands still for the step, and goes on from there. The view is invalid after it, because the time that has passed
// is unknown.
func TestSteadyClock(t *testing.T) {
	m := new(machine)
	began := m.now(5000)
	m.view.valid = true
	require.Equal(t, began+1000, m.now(6000))
	require.True(t, m.view.valid)
	require.Equal(t, began+1000, m.now(2000))
	require.False(t, m.view.valid)
	m.view.valid = true
	require.Equal(t, began+1500, m.now(2500))
	require.True(t, m.view.valid)
}

// A reply ends the pause of reports after an error that needed a repair.
func TestReplyAfterARepair(t *testing.T) {
	m := &machine{config: config{rule: rule{1000, 100, 10}}, broken: true}
	m.Settle(new(flight), []string{"5000 5000", "", ""}, waiting.Replied, nil, waiting.Moment{}, new(waiting.Out))
	require.False(t, m.broken)
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
	m := &machine{config: config{rule: rule{1000, 100, 10}}}
	q := &call{n: 1, sent: true}
	m.queue.pending = 1
	late := func(b *flight) {
		m.Settle(b, []string{"late", "1000"}, waiting.Replied, nil, waiting.Moment{Local: 1000}, new(waiting.Out))
	}
	late(&flight{calls: []*call{q}, refunds: []part{{1, 2}}})
	require.False(t, q.Ended())
	require.Equal(t, []part{{1, 2}}, m.admitted.refunds)
	require.Same(t, q, m.queue.next())
	late(&flight{calls: []*call{q}})
	require.True(t, q.Ended())
	require.ErrorIs(t, q.err, ErrStoreTimeout)
	require.Nil(t, m.queue.next())
	require.Zero(t, m.queue.pending)
}

// A failed batch was not the first request of its sub-interval: the next one is sent although the view refuses it.
func TestFailedBatchAsksAgain(t *testing.T) {
	m := &machine{asked: 7}
	q := &call{n: 1, sent: true}
	m.Settle(&flight{calls: []*call{q}}, nil, waiting.Unusable, ErrCorruptState, waiting.Moment{Local: 5000}, new(waiting.Out))
	require.ErrorIs(t, q.err, ErrCorruptState)
	require.Zero(t, m.asked)
}
