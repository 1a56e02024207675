package schedule

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The rules of docs/architecture.md, one test each: R1 to R6 were found by histories that broke the bound, T1 to T6 are invariants.
// R4, whose clock a grant's time is by, is the rule of internal/clock's Offset.

// join puts a waiter into a line.
func join(s *Schedule[int], permits, came int64) *Waiter[int] {
	w := &Waiter[int]{Permits: permits, Came: came, Until: Forever}
	s.Join(w)
	return w
}

// granted puts a waiter into a line, and grants it what it wants.
func granted(s *Schedule[int], b *bucket, permits int64) *Waiter[int] {
	w := join(s, permits, 0)
	s.Grant(w, b.grant(permits), 0)
	return w
}

// goes requires that a waiter is the next to go, and when.
func goes(t *testing.T, s *Schedule[int], w *Waiter[int], at int64) {
	t.Helper()
	early, next := s.Next(at - 1)
	require.Nil(t, early)
	require.Equal(t, at, next)
	got, due := s.Next(at)
	require.Same(t, w, got)
	require.Equal(t, at, due)
}

// left returns a schedule that owns spare permits, due one interval after another, which cannot be refunded.
func left(t *testing.T, b *bucket, permits int64) *Schedule[int] {
	t.Helper()
	s := new(Schedule[int])
	w := granted(s, b, permits)
	b.grant(1)
	s.Leave(w, 0)
	require.NotNil(t, s.Refund())
	s.Refunded(false, true, 0)
	require.True(t, s.Spare())
	return s
}

// R1: a waiter uses no permit that was due before it came.
func TestR1NothingFromBefore(t *testing.T) {
	s := left(t, &bucket{}, 4)
	goes(t, s, join(s, 1, 2*interval+1), 3*interval)

	s = left(t, &bucket{}, 6) // also while there is another waiter
	first := join(s, 6, 0)
	_, _ = s.Next(0)
	second := join(s, 1, 2*interval+1)
	s.Leave(first, 2*interval+1)
	goes(t, s, second, 3*interval)
}

// R2: what the head was gathering lapses when it leaves, as far as it is due.
func TestR2WhatWasGatheredLapses(t *testing.T) {
	b := &bucket{}
	s := new(Schedule[int])
	first, second := granted(s, b, 3), granted(s, b, 1)
	w, _ := s.Next(2*interval + 1)
	require.Nil(t, w)
	s.Leave(first, 2*interval+1)
	goes(t, s, second, 3*interval)
}

// R3: permits that have fallen due while a refund was in flight lapse if it is refused.
func TestR3ARefusedRefundLapses(t *testing.T) {
	b := &bucket{}
	s := new(Schedule[int])
	s.Leave(granted(s, b, 4), 0)
	require.NotNil(t, s.Refund())
	waits := join(s, 1, 0)
	s.Refunded(false, true, 2*interval+1)
	goes(t, s, waits, 3*interval)
}

// R5: a segment that is too small for the head serves the first waiter behind it for which it suffices, and does not delay the head.
func TestR5TooLittleForTheHead(t *testing.T) {
	b := &bucket{}
	s := new(Schedule[int])
	leaves := granted(s, b, 2)
	b.grant(1)
	head := granted(s, b, 3)
	behind := join(s, 2, 0)
	s.Leave(leaves, 0)
	require.True(t, behind.Covered())
	goes(t, s, behind, 2*interval)
	goes(t, s, head, 6*interval)

	s = left(t, &bucket{}, 2) // even if no waiter has been promised anything yet
	head, behind = join(s, 3, 0), join(s, 2, 0)
	goes(t, s, behind, 2*interval)
	require.Same(t, head, s.Uncovered())
}

// R6: a waiter is asked for as a whole, however much of what it wants is owned.
func TestR6TheWholeSize(t *testing.T) {
	s := left(t, &bucket{}, 2)
	w := join(s, 3, 0)
	require.Same(t, w, s.Uncovered())
	require.EqualValues(t, 3, s.Wanted())
	at, asks := s.AskAt()
	require.True(t, asks)
	require.Zero(t, at)
}

// T1: a segment is contiguous: permits that other processes have taken between two grants are never refunded.
func TestT1Contiguous(t *testing.T) {
	b := &bucket{}
	s := new(Schedule[int])
	first := granted(s, b, 2)
	b.grant(1)
	second := granted(s, b, 1)
	third := granted(s, b, 1)
	s.Leave(first, 0)
	s.Leave(second, 0)
	s.Leave(third, 0)
	r := s.Refund()
	require.EqualValues(t, 2, r.Permits)
	require.EqualValues(t, 3*interval, r.To.Next)
	require.EqualValues(t, 5*interval, r.End.Next)
	require.Equal(t, b.tag, r.Tag)
	s.Refunded(true, true, 0)
	require.Nil(t, s.Refund(), "others' lies behind it")
	require.True(t, s.Spare())
}

// T2: at most one refund is under way.
func TestT2OneRefund(t *testing.T) {
	b := &bucket{}
	s := new(Schedule[int])
	first, second := granted(s, b, 1), granted(s, b, 1)
	s.Leave(second, 0)
	require.EqualValues(t, 1, s.Refund().Permits)
	s.Leave(first, 0)
	require.Nil(t, s.Refundable())
	require.Nil(t, s.Refund())
	s.Refunded(true, true, 0)
	require.EqualValues(t, 1, s.Refund().Permits)
}

// T3: no waiter is delayed by one behind it: permits that the head gathers are not for smaller requests.
func TestT3NobodyOvertakes(t *testing.T) {
	b := &bucket{}
	s := new(Schedule[int])
	head, behind := granted(s, b, 3), granted(s, b, 1)
	goes(t, s, head, 3*interval)
	goes(t, s, behind, 4*interval)
}

// T4: a request is served from one segment.
func TestT4OneSegment(t *testing.T) {
	b := &bucket{}
	s := new(Schedule[int])
	first := granted(s, b, 2)
	b.grant(1)
	second := granted(s, b, 2)
	b.grant(1)
	waits := join(s, 3, 0)
	s.Leave(first, 0)
	s.Leave(second, 0)
	require.False(t, waits.Covered(), "four permits are owned, but no three in a row")
	w, at := s.Next(5 * interval)
	require.Nil(t, w)
	require.Zero(t, at)
	require.Same(t, waits, s.Uncovered())
}

// T5: after a pause of the bucket all segments move by the same time, and their spare permits are not refunded.
func TestT5Pause(t *testing.T) {
	b := &bucket{}
	s := new(Schedule[int])
	first := granted(s, b, 1)
	b.grant(1)
	second, third := granted(s, b, 1), granted(s, b, 1)
	s.Pause(10*interval, 10*interval, 0)
	s.Leave(third, 0)
	require.Nil(t, s.Refund())
	goes(t, s, first, 11*interval)
	goes(t, s, second, 13*interval)

	s = new(Schedule[int]) // permits gathered before fall due again, but only for the waiter that has gathered them
	first, second = granted(s, &bucket{}, 3), join(s, 1, 0)
	_, _ = s.Next(2*interval + 1)
	s.Pause(interval, 3*interval+1, 2*interval+1)
	s.Leave(first, 2*interval+2)
	goes(t, s, second, 4*interval)
}

// T6: permits that are overdue by more than 100 ms lapse, if the clock is real, and no others. The order stays, and the last ask again.
func TestT6Overdue(t *testing.T) {
	for _, strict := range []bool{true, false} {
		b := &bucket{}
		s := &Schedule[int]{Strict: strict}
		var waiters []*Waiter[int]
		for range 4 {
			waiters = append(waiters, granted(s, b, 1))
		}
		now := int64(3*interval + Tolerated/2)
		w, at := s.Next(now)
		require.Same(t, waiters[0], w)
		if !strict {
			require.EqualValues(t, interval, at)
			continue
		}
		require.EqualValues(t, 3*interval, at)
		require.True(t, waiters[1].Covered())
		require.Same(t, waiters[2], s.Uncovered(), "two permits have lapsed")
		at, asks := s.AskAt()
		require.True(t, asks)
		require.Zero(t, at)
		goes(t, s, waiters[1], 4*interval)
	}
}
