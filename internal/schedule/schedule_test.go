package schedule

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// steady are terms under which a permit takes 100 ms and nothing is stored.
type steady struct{}

const interval = 100_000

func (steady) After(b permit.Balance, n int64) (permit.Balance, bool) {
	b.Next += n * interval
	return b, true
}

func (steady) PayLater() bool { return false }

// bucket grants every request, one after another.
type bucket struct {
	next, tag int64
}

func (b *bucket) grant(n int64) *Grant {
	g := &Grant{Terms: steady{}, Before: permit.Balance{Next: b.next}, Permits: n, Epoch: 1, Tag: b.tag + 1, Prev: b.tag}
	b.next += n * interval
	b.tag++
	return g
}

// line returns a schedule of waiters that were granted the given permits each, at time 0.
func line(b *bucket, permits ...int64) (*Schedule[int], []*Waiter[int]) {
	s := new(Schedule[int])
	var waiters []*Waiter[int]
	for i, n := range permits {
		w := &Waiter[int]{Value: i, Permits: n, Until: Forever}
		s.Join(w)
		s.Grant(w, b.grant(n), 0)
		waiters = append(waiters, w)
	}
	return s, waiters
}

// Waiters that leave, in whatever order, leave no trace: the bucket gets all its time back.
func TestAllLeave(t *testing.T) {
	for range 100 {
		b := &bucket{next: interval}
		s, waiters := line(b, 1, 2, 3, 1, 1, 5)
		rand.Shuffle(len(waiters), func(i, j int) { waiters[i], waiters[j] = waiters[j], waiters[i] })
		for _, w := range waiters {
			s.Leave(w, 0)
		}
		require.False(t, s.Waiting())
		r := s.Refund()
		require.NotNil(t, r)
		require.EqualValues(t, 13, r.Permits)
		require.EqualValues(t, interval, r.To.Next)
		require.EqualValues(t, b.next, r.End.Next)
		require.Equal(t, b.tag, r.Tag)
		require.EqualValues(t, 0, r.Tail, "nothing of it was used")
		require.Nil(t, s.Refund(), "one at a time")
		s.Refunded(true, true, 0)
		require.True(t, s.Idle())
	}
}

// Those behind one who leaves move up; those in front of it keep their times.
func TestMovingUp(t *testing.T) {
	b := &bucket{next: 0}
	s, waiters := line(b, 1, 2, 3, 1)
	due := func(w *Waiter[int]) int64 {
		at, ok := s.DueOf(w)
		require.True(t, ok)
		return at / interval
	}
	require.Equal(t, []int64{1, 3, 6, 7}, []int64{due(waiters[0]), due(waiters[1]), due(waiters[2]), due(waiters[3])})
	s.Leave(waiters[1], 0)
	require.Equal(t, []int64{1, 4, 5}, []int64{due(waiters[0]), due(waiters[2]), due(waiters[3])})
	for _, want := range []struct{ value, at int }{{0, 1}, {2, 4}, {3, 5}} {
		w, at := s.Next(int64(want.at)*interval - 1)
		require.Nil(t, w)
		require.EqualValues(t, want.at*interval, at)
		w, _ = s.Next(at)
		require.Equal(t, want.value, w.Value)
		require.False(t, w.Waits())
	}
	r := s.Refund()
	require.EqualValues(t, 2, r.Permits, "the end goes back")
	require.EqualValues(t, 5*interval, r.To.Next)
}

// Permits behind which other processes have taken some stay for the next waiters, except those that are due already.
func TestRefusedRefund(t *testing.T) {
	b := &bucket{next: 0}
	s, waiters := line(b, 4)
	s.Leave(waiters[0], 0)
	require.EqualValues(t, 4, s.Refund().Permits)
	s.Refunded(false, true, 2*interval+1)
	require.True(t, s.Owns())
	w := &Waiter[int]{Permits: 1, Came: 2*interval + 1, Until: Forever}
	s.Join(w)
	require.Nil(t, s.Uncovered(), "it need not ask")
	_, at := s.Next(w.Came)
	require.EqualValues(t, 3*interval, at)
	require.Nil(t, s.Refund(), "others have taken behind it")
}

// A bucket in another epoch accepts no refunds of earlier grants: their spare permits are dropped.
func TestForget(t *testing.T) {
	b := &bucket{next: 0}
	s, waiters := line(b, 1, 1)
	s.Leave(waiters[0], 0)
	s.Leave(waiters[1], 0)
	s.Forget(2)
	require.False(t, s.Owns())
	w := &Waiter[int]{Permits: 1, Until: Forever}
	s.Join(w)
	require.Same(t, w, s.Uncovered())
	require.EqualValues(t, 1, s.Wanted())
}

// A waiter that could not be in time behind the present ones is refused at once.
func TestHopeless(t *testing.T) {
	s, _ := line(&bucket{}, 1)
	cost := func(n int64) int64 { return n * interval }
	for i, until := range []int64{Forever, 3 * interval, 3*interval - 1} {
		s.Join(&Waiter[int]{Value: i, Permits: 1, Until: until})
	}
	s.Hopeless(0, interval, false, cost)
	late := s.Expired()
	require.Len(t, late, 1)
	require.Equal(t, 2, late[0].Value)
	require.EqualValues(t, 4*interval, late[0].Due(), "behind the two others")
	require.Empty(t, s.Expired())
}

// Waiters without a timeout are not examined again when permits are too late for others.
func TestPromise(t *testing.T) {
	s := new(Schedule[int])
	w := &Waiter[int]{Permits: 1, Until: interval}
	s.Join(w)
	require.Equal(t, 1, s.limited)
	s.Promise(w)
	require.Zero(t, s.limited)
	s.Leave(w, 0)
	require.Zero(t, s.limited)
}

// A reservation whose grant lies before permits of others, in the epoch of a settlement or in the same one, is not behind them. Kept in one
// schedule, the head would take its permits, and leave too few for it.
func TestGrantBeforeOthers(t *testing.T) {
	for _, epoch := range []int64{1, 2} {
		b := &bucket{next: 100 * interval}
		s, _ := line(b, 2)
		before := &Grant{Terms: steady{}, Before: permit.Balance{Next: 10 * interval}, Permits: 27, Epoch: epoch, Tag: 9, Prev: 8}
		require.False(t, s.Behind(before))
		require.False(t, s.Behind(&Grant{Terms: steady{}, Before: permit.Balance{Next: 101 * interval}, Permits: 1, Epoch: epoch, Tag: 9, Prev: 8}))
		require.True(t, s.Behind(&Grant{Terms: steady{}, Before: permit.Balance{Next: b.next}, Permits: 1, Epoch: epoch, Tag: 9, Prev: 8}))
		w := &Waiter[int]{Permits: 27, Until: Forever}
		s.GrantTo(w, before, 0)
		_, covered := s.DueOf(w)
		require.False(t, covered, "the head has taken two of its permits: if this changes, Behind may go")
	}
	require.True(t, new(Schedule[int]).Behind(&Grant{Terms: steady{}, Permits: 1, Epoch: 1}))
}

// Offsets of the clock vary with the round trips, so the permits of another epoch that follow at once lie behind, although their times by the local clock
// do not. Otherwise every reservation of limiters that do not agree on the configuration has a schedule of its own, and costs as much as there are. Only
// if the store's clock has stepped are times by the local clock compared.
func TestBehindAnotherEpoch(t *testing.T) {
	b := &bucket{next: 100 * interval}
	s, _ := line(b, 2)
	follows := func(offset int64) bool {
		return s.Behind(&Grant{Terms: steady{}, Before: permit.Balance{Next: b.next}, Permits: 1, Epoch: 9, Tag: 9, Prev: 8, Offset: offset})
	}
	require.True(t, follows(0))
	require.True(t, follows(-2))
	require.True(t, follows(-Jitter))
	require.False(t, follows(-Jitter-1))
	require.True(t, follows(Jitter+1))
}
