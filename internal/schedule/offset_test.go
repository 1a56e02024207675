package schedule

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// every are terms under which each permit takes the given number of microseconds.
type every int64

func (e every) After(b permit.Balance, n int64) (permit.Balance, bool) {
	b.Next += n * int64(e)
	return b, true
}

func (every) PayLater() bool { return false }

// Permits that are granted later, by a clock that seems to be ahead of its earlier estimate, are still used later, and no waiter loses a
// permit: a late reply only makes its grant seem late.
func TestBetterOffset(t *testing.T) {
	const interval = every(500)
	s := new(Schedule[int])
	for i := range 3 {
		s.Join(&Waiter[int]{Value: i, Permits: 1, Until: Forever})
	}
	join := func(w *Waiter[int], permits, before, tag, offset int64) {
		s.Grant(w, &Grant{Terms: interval, Before: permit.Balance{Next: before}, Permits: permits, Epoch: 1, Tag: tag, Prev: tag - 1, Offset: offset}, 0)
	}
	first := s.Head()
	join(first, 2, 0, 1, 5000)
	w, at := s.Next(4900)
	require.Nil(t, w)
	require.EqualValues(t, 5500, at)
	join(first.Following().Following(), 1, 1500, 3, 2000) // behind another process's, by a reply that was 3 ms faster
	var order []int
	for now := int64(5600); now < 7000; now += 700 { // the process is late
		for w, at := s.Next(now); w != nil; w, at = s.Next(now) {
			require.LessOrEqual(t, at, now)
			order = append(order, w.Value)
		}
	}
	require.Equal(t, []int{0, 1, 2}, order)
	require.Zero(t, s.owned, "nothing has lapsed")
}

// An offset of a clock that was set forward does not apply to earlier grants.
func TestOffsetOfAnotherTime(t *testing.T) {
	s := new(Schedule[int])
	for i := range 2 {
		w := &Waiter[int]{Value: i, Permits: 1, Until: Forever}
		s.Join(w)
		s.Grant(w, &Grant{Terms: every(500), Before: permit.Balance{Next: int64(i) * 1_000_000}, Permits: 1, Epoch: 1, Tag: int64(3 * i), Prev: int64(3*i - 1),
			Offset: int64(1-i) * 1_000_000}, 0)
	}
	for _, g := range s.segments {
		require.EqualValues(t, 1_000_500, g.ends())
	}
}
