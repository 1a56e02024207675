package schedule

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// However many wait, with different sizes and for many segments, each change costs a bounded number of steps. Spare permits at the end are
// refunded soon.
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
	before := s.walks.total
	for i := range changes {
		s.Leave(waiters[(i*7919)%count], 0)
		_ = s.Refundable()
		_, _ = s.Next(0)
		waiters[(i*7919)%count] = join(int64(1 + i%2))
		_ = s.Refundable()
	}
	steps := float64(s.walks.total-before) / changes
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

// manySegments returns a queue of many waiters with as many segments, since other processes take permits in between.
func manySegments(count int, permits func(i int) int64) (s *Schedule[int], waiters []*Waiter[int]) {
	b := &bucket{next: interval}
	s = new(Schedule[int])
	for i := range count {
		b.grant(1)
		w := &Waiter[int]{Permits: permits(i), Until: Forever}
		s.Join(w)
		s.Grant(w, b.grant(w.Permits), 0)
		waiters = append(waiters, w)
	}
	return s, waiters
}

// However often callers look for their due times, spare permits are refunded no later, and however many leave, a look returns the due times
// of the others.
func TestALookCostsNothing(t *testing.T) {
	for name, permits := range map[string]func(i int) int64{
		"one size":   func(int) int64 { return 1 },
		"many sizes": func(i int) int64 { return int64(1 + i%3) },
	} {
		t.Run(name, func(t *testing.T) {
			const count = 4000
			s, waiters := manySegments(count, permits)
			steps := s.walks.total
			for i := 0; i < count; i += 2 {
				s.Leave(waiters[i], 0)
				before := s.walks
				last, ok := s.DueOf(waiters[count-1])
				require.True(t, ok)
				require.LessOrEqual(t, last, s.Last())
				require.Equal(t, before.steps, s.walks.steps)
			}
			require.Equal(t, steps, s.walks.total)
			if name == "many sizes" {
				return
			}
			due := map[*Waiter[int]]int64{}
			s.walk(func(w *Waiter[int], g *segment) bool { due[w] = g.due(w.Permits); return true })
			for w := s.head; w != nil; w = w.next {
				at, ok := s.DueOf(w)
				require.True(t, ok)
				require.Equal(t, due[w], at)
			}
		})
	}
}

// The time of a look, with 10,000 who wait.
func BenchmarkLook(b *testing.B) {
	for _, bench := range []struct {
		name    string
		permits func(i int) int64
		others  bool
	}{
		{"one size and segment", func(int) int64 { return 1 }, false},
		{"one size", func(int) int64 { return 1 }, true},
		{"many sizes", func(i int) int64 { return int64(1 + i%3) }, true},
	} {
		b.Run(bench.name, func(b *testing.B) {
			s, waiters := manySegments(10_000, bench.permits)
			if !bench.others {
				s, waiters = new(Schedule[int]), nil
				own := &bucket{}
				for range 10_000 {
					waiters = append(waiters, granted(s, own, 1))
				}
			}
			for i := 0; b.Loop(); i++ {
				s.changes++
				_, _ = s.DueOf(waiters[i%len(waiters)])
			}
		})
	}
}
