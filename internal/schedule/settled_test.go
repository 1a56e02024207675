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

// spaced are steady terms of another interval.
type spaced int64

func (i spaced) After(b permit.Balance, n int64) (permit.Balance, bool) {
	b.Next += n * int64(i)
	return b, true
}

func (spaced) PayLater() bool { return false }

// Two permits that this process has given back, and moved up by, do not count as another's two later: those were given back at half the rate, and
// their time holds four permits of the rate before and after.
func TestFollowCountsNoOwnSettlement(t *testing.T) {
	const fast, slow, again = spaced(interval), spaced(2 * interval), spaced(interval - 1)
	s := new(Schedule[int])
	w := &Waiter[int]{Permits: 10, Until: Forever}
	s.GrantTo(w, &Grant{Terms: fast, Before: permit.Balance{Next: 10 * interval}, Permits: 10, Epoch: 1, ID: 2, Tag: 2, Prev: 1}, 0)
	s.Settled(&permit.Place{Epoch: 1, ID: 3, Tag: 3, Prev: 2, Before: permit.Balance{Next: 20 * interval}, After: permit.Balance{Next: 18 * interval}}, fast, 0)
	at, _ := s.DueOf(w)
	require.EqualValues(t, 18*interval, at)
	grant := &Grant{Terms: again, Before: permit.Balance{Next: 14 * interval}, Permits: 1, Epoch: 1, ID: 5, Tag: 5, Prev: 4, Returned: 4}
	require.False(t, s.Follow(grant, 0), "four permits of this process would be due earlier, and two were given back")
	at, _ = s.DueOf(w)
	require.EqualValues(t, 18*interval, at)
	grant.Before.Next = 16 * interval
	require.True(t, s.Follow(grant, 0))
	at, _ = s.DueOf(w)
	require.EqualValues(t, 16*interval, at)
}

// After a penalty, which begins an epoch without moving what is due, a process that has settled does not know how many others have given back.
func TestFollowCountsNoOwnSettlementOfALaterEpoch(t *testing.T) {
	s := new(Schedule[int])
	w := &Waiter[int]{Permits: 10, Until: Forever}
	s.GrantTo(w, &Grant{Terms: spaced(interval), Before: permit.Balance{Next: 10 * interval}, Permits: 10, Epoch: 1, ID: 2, Tag: 2, Prev: 1}, 0)
	s.Settled(&permit.Place{Epoch: 2, ID: 4, Tag: 4, Before: permit.Balance{Next: 20 * interval}, After: permit.Balance{Next: 18 * interval}}, spaced(interval), 0)
	require.False(t, s.Follow(&Grant{Terms: spaced(interval - 1), Before: permit.Balance{Next: 16 * interval}, Permits: 1, Epoch: 2, ID: 6, Tag: 6, Prev: 5, Returned: 3}, 0))
	at, _ := s.DueOf(w)
	require.EqualValues(t, 18*interval, at)
}

// Permits that fell due while a refund of them was refused go back out of turn, if no caller waits for them. A caller that comes first uses none of them.
func TestRefusedRefundGoesBackOutOfTurn(t *testing.T) {
	for _, comes := range []bool{false, true} {
		s, b := new(Schedule[int]), &bucket{}
		s.Leave(granted(s, b, 4), 0)
		require.NotNil(t, s.Refund())
		b.grant(1)
		const now = 2*interval + 1
		s.Refunded(false, true, now)
		if comes {
			goes(t, s, join(s, 1, now), 3*interval)
			continue
		}
		require.Zero(t, s.Yield(now))
		r := s.Refund()
		require.NotNil(t, r)
		require.Equal(t, []int64{0, 4}, []int64{r.Tag, r.Permits})
	}
}
