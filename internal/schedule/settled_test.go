package schedule

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// saving are steady terms of a bucket that stores permits, which take no time.
type saving struct{ steady }

func (saving) After(b permit.Balance, n int64) (permit.Balance, bool) {
	stored := min(float64(n), b.Stored)
	b.Stored -= stored
	b.Next += (n - int64(stored)) * interval
	return b, true
}

// A settlement that gives back more than the debt leaves stored permits in the bucket. They lie between what the process owns and its next grant, so that
// keeps its due time, and goes back whole.
func TestSettledBeyondTheDebt(t *testing.T) {
	s := new(Schedule[int])
	first, second := &Waiter[int]{Permits: 5, Until: Forever}, &Waiter[int]{Permits: 6, Until: Forever}
	s.GrantTo(first, &Grant{Terms: saving{}, Permits: 5, Epoch: 1, Tag: 1}, 0)
	left, after := permit.Balance{Stored: 4}, permit.Balance{Next: 2 * interval}
	s.Settled(&permit.Place{Epoch: 1, Tag: 2, Prev: 1, Before: permit.Balance{Next: 5 * interval}, After: left}, saving{}, 0)
	s.GrantTo(second, &Grant{Terms: saving{}, Before: left, Permits: 6, Epoch: 1, Tag: 3, Prev: 2}, 0)
	w, at := s.Next(0)
	require.Same(t, first, w)
	require.Zero(t, at)
	w, at = s.Next(0)
	require.Nil(t, w)
	require.EqualValues(t, after.Next, at)
	s.Leave(second, 0)
	r := s.Refund()
	require.NotNil(t, r)
	require.Equal(t, []any{left, after, int64(3), int64(2)}, []any{r.To, r.End, r.Tag, r.Tail})
}
