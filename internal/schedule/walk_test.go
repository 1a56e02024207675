package schedule

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// However many wait, of different sizes and for as many segments, each change costs a bounded number of steps; and what is left over
// at the end goes back soon.
func TestStepsAreBounded(t *testing.T) {
	const count, changes = 8000, 3000
	b, s := &bucket{next: interval}, new(Schedule[int])
	join := func(n int64) *Waiter[int] {
		b.grant(1) // another process
		w := &Waiter[int]{Permits: n, Until: Forever}
		s.Join(w)
		if !w.Covered() {
			s.Grant(w, b.grant(n), 0)
		}
		return w
	}
	var waiters []*Waiter[int]
	for i := range count {
		waiters = append(waiters, join(int64(1+i%3)))
	}
	before := s.walks.taken
	for i := range changes {
		s.Leave(waiters[(i*7919)%count], 0)
		_ = s.Refundable()
		_, _ = s.Next(0)
		waiters[(i*7919)%count] = join(int64(1 + i%2))
		_ = s.Refundable()
	}
	steps := float64(s.walks.taken-before) / changes
	t.Logf("%.0f steps a change, %d segments", steps, len(s.segments))
	require.LessOrEqual(t, steps, 4.0*perChange)

	if s.Refund() != nil {
		s.Refunded(true, true, 0)
	}
	s.walks.steps = 0
	s.Leave(join(2), 0)
	now := int64(0)
	for ; s.Refundable() == nil; now += 1000 {
		require.Less(t, now, int64(1_000_000))
		_, _ = s.Next(now)
	}
	require.Positive(t, now)
	require.GreaterOrEqual(t, s.Refund().Permits, int64(2))
}
