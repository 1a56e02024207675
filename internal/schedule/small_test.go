package schedule

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The head is not served beside the schedule while a refund is prepared or in flight: that may still come back.
func TestServeWaitsForTheRefund(t *testing.T) {
	b := &bucket{}
	s := new(Schedule[int])
	s.Leave(granted(s, b, 2), 0)
	require.NotNil(t, s.Refundable())
	w := join(s, 1, 0)
	s.Leave(w, 0)
	require.NotNil(t, s.Refund())
	require.Zero(t, s.owned)
	w = join(s, 1, 0)
	require.False(t, s.Serve(w))
	s.Refunded(true, true, 0)
	require.True(t, s.Serve(w))
}

// Permits that were due before a newcomer arrived at an empty queue are refunded, if they are at the bucket's tail.
func TestBeginRefunds(t *testing.T) {
	s := new(Schedule[int])
	s.Strict = true
	w := granted(s, &bucket{}, 3)
	other := granted(s, &bucket{next: 3 * interval, tag: 1}, 1)
	s.Leave(w, 0)
	got, _ := s.Next(interval)
	require.Same(t, other, got)
	require.Nil(t, s.refund)
	join(s, 1, 2*interval+1)
	require.NotNil(t, s.Refundable())
	require.EqualValues(t, interval, s.Refund().To.Next)
}

// Due times move with a pause, those too that were computed before.
func TestDueMovesWithAPause(t *testing.T) {
	b := &bucket{}
	var permits []int64
	for i := range 2 * maxExactWalk {
		permits = append(permits, int64(1+i%2))
	}
	s, waiters := line(b, permits...)
	b.grant(1) // of another process, so the next grant is a segment of its own
	waiters = append(waiters, granted(s, b, 2))
	last := waiters[len(waiters)-1]
	before, ok := s.DueOf(last)
	require.True(t, ok)
	s.Pause(1000, 1000, 0)
	after, ok := s.DueOf(last)
	require.True(t, ok)
	require.EqualValues(t, 1000, after-before)
}

// Processes that were refused at the same time ask again at different times.
func TestRetriesAreSpread(t *testing.T) {
	at := func(chance float64) int64 {
		s := new(Schedule[int])
		join(s, 1, 0)
		s.Refused(0, 1_000_000, 0, chance)
		at, ok := s.AskAt()
		require.True(t, ok)
		return at
	}
	require.EqualValues(t, retryLeast/2, at(0))
	require.EqualValues(t, retryLeast, at(0.5))
	require.EqualValues(t, retryLeast*3/2, at(1))
}
