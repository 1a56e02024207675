package schedule

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// inTurns is a schedule in turns, with waiters that need so many permits each. The process owns permits for the first few, as granted at
// time 0.
func inTurns(b *bucket, granted int, permits ...int64) (*Schedule[int], []*Waiter[int]) {
	s := new(Schedule[int])
	s.InTurns = true
	var waiters []*Waiter[int]
	for i, n := range permits {
		w := join(s, n, 0)
		if waiters = append(waiters, w); i < granted {
			s.Grant(w, b.grant(n), 0)
		}
	}
	return s, waiters
}

// A waiter that leads gets what the head would have got, and the head what the waiter would: here nothing yet. Nobody else moves.
func TestLeadChangesPlaces(t *testing.T) {
	s, w := inTurns(&bucket{next: 0}, 3, 1, 1, 1, 1, 1)
	require.True(t, s.Lead(w[4], 0))
	require.True(t, w[4].Covered())
	require.False(t, w[0].Covered())
	goes(t, s, w[4], interval)
	goes(t, s, w[1], 2*interval)
	goes(t, s, w[2], 3*interval)
	require.Same(t, w[3], s.Uncovered())
	require.Same(t, w[0], w[3].Following())
	require.Nil(t, w[0].Following())
	require.Zero(t, s.owned)
	require.EqualValues(t, 2, s.Wanted())
}

// A larger request that leads takes permits of the last covered waiters, which the process asks for again.
func TestLeadOfALargerRequest(t *testing.T) {
	s, w := inTurns(&bucket{next: 0}, 4, 1, 1, 1, 1, 3)
	_, some := s.AskAt()
	require.True(t, some)
	require.True(t, s.Lead(w[4], 0))
	require.Same(t, w[2], s.Uncovered(), "3 permits for w[4], 1 for w[1]")
	require.EqualValues(t, 4, s.promised)
	goes(t, s, w[4], 3*interval)
	goes(t, s, w[1], 4*interval)
}

// A granted reservation keeps its due time: neither does another lead in its place, nor does a larger request lead before it.
func TestReservationsKeepTheirDueTimes(t *testing.T) {
	b := &bucket{next: 0}
	s, w := inTurns(b, 2, 1, 1)
	r := &Waiter[int]{Permits: 1, Until: Forever}
	s.GrantTo(r, b.grant(1), 0)
	s.Promise(r)
	large, small := join(s, 2, 0), join(s, 1, 0)
	require.False(t, s.Lead(large, 0))
	require.True(t, s.Lead(small, 0))
	due, ok := s.DueOf(r)
	require.True(t, ok)
	require.EqualValues(t, 3*interval, due)
	goes(t, s, small, interval)
	goes(t, s, w[1], 2*interval)
	require.False(t, s.Lead(w[0], 2*interval), "the reservation is the head")
	goes(t, s, r, 3*interval)
	s.Grant(large, b.grant(2), 3*interval)
	require.True(t, s.Lead(large, 3*interval))
}

// A waiter does not lead if it came after the next permits fell due, because it must not use them (T4).
func TestLeadUsesNothingFromBefore(t *testing.T) {
	s, _ := inTurns(&bucket{next: 0}, 2, 1, 1)
	late := join(s, 1, 2*interval)
	require.False(t, s.Lead(late, 2*interval))
	sooner := join(s, 1, interval)
	require.True(t, s.Lead(sooner, 2*interval))
}

// What the head has gathered is not used late by a smaller request. One that is as large takes it over, and uses it when the head would have.
func TestLeadWhileTheHeadGathers(t *testing.T) {
	s, w := inTurns(&bucket{next: 0}, 1, 3, 1, 3)
	_, at := s.Next(2 * interval)
	require.EqualValues(t, 3*interval, at)
	require.False(t, s.Lead(w[1], 2*interval))
	require.True(t, s.Lead(w[2], 2*interval))
	goes(t, s, w[2], 3*interval)
}

// A waiter that others have overtaken leaves at the end of its timeout. By arrival it would have been served.
func TestOvertakenWaitersExpire(t *testing.T) {
	b := &bucket{next: 0}
	s := new(Schedule[int])
	s.InTurns = true
	w := &Waiter[int]{Permits: 1, Until: interval + 1}
	s.Join(w)
	s.Grant(w, b.grant(1), 0)
	require.EqualValues(t, interval+1, s.Timeout(), "although it is covered")
	other := join(s, 1, 0)
	require.True(t, s.Lead(other, 0))
	goes(t, s, other, interval)
	require.False(t, s.Expire(interval))
	require.True(t, s.Expire(interval+1))
	require.Equal(t, []*Waiter[int]{w}, s.Expired())
	require.False(t, s.Waiting())
}
