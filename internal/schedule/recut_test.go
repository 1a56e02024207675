package schedule

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// paced are terms under which a permit takes so many microseconds and nothing is stored.
type paced int64

func (p paced) After(b permit.Balance, n int64) (permit.Balance, bool) {
	b.Next += n * int64(p)
	return b, true
}

func (paced) PayLater() bool { return false }

// recut puts all that is owned under terms.
func (p paced) recut(s *Schedule[int], now int64) {
	s.Recut(now, func(_ Terms, at permit.Balance, now int64) (Terms, permit.Balance) {
		at.Next = max(at.Next, now-int64(p))
		return p, at
	})
}

// A stretch of ten permits has as many as fit into it under the new terms. The rest of its time goes back, since nobody has taken permits behind it.
func TestRecut(t *testing.T) {
	for _, c := range []struct {
		to      paced
		permits int64
	}{{interval, 10}, {125_000, 8}, {80_000, 12}, {300_000, 3}, {2_000_000, 0}, {1_000_000, 1}} {
		b := &bucket{}
		s := new(Schedule[int])
		var waiters []*Waiter[int]
		for range 20 {
			waiters = append(waiters, join(s, 1, 0))
		}
		s.Grant(waiters[0], b.grant(10), 0)
		s.Refused(0, 1_000_000, 0, 0)
		c.to.recut(s, 0)
		require.Equal(t, []int64{c.permits, c.permits}, []int64{s.owned, s.promised}, "every %d", c.to)
		at, asks := s.AskAt()
		require.True(t, asks)
		require.Zero(t, at)
		if end := c.permits * int64(c.to); end < b.next {
			r := s.Refund()
			require.Equal(t, []int64{end, b.next, b.tag}, []int64{r.To.Next, r.End.Next, r.Tag})
			s.Refunded(true, true, 0)
		}
		for i := range c.permits {
			goes(t, s, waiters[i], (i+1)*int64(c.to))
		}
		require.Zero(t, s.owned)
	}
}

// Of the time that has passed under the former terms, no more than one permit is due at once.
func TestRecutAfterAWhile(t *testing.T) {
	s := new(Schedule[int])
	first := join(s, 1, 0)
	others := []*Waiter[int]{join(s, 1, 0), join(s, 1, 0)}
	s.Grant(first, (&bucket{}).grant(1), 0)
	paced(1000).recut(s, 50_000)
	goes(t, s, first, 50_000)
	goes(t, s, others[0], 51_000)
	goes(t, s, others[1], 52_000)
}

// What comes back from a refund that the bucket refuses is counted under the new terms, too.
func TestRecutDuringARefund(t *testing.T) {
	b := &bucket{}
	s := new(Schedule[int])
	first, second := granted(s, b, 4), granted(s, b, 4)
	s.Leave(second, 0)
	require.EqualValues(t, 4, s.Refund().Permits)
	b.grant(1)
	paced(2*interval).recut(s, 0)
	require.EqualValues(t, 2, s.owned)
	s.Refunded(false, true, 0)
	require.EqualValues(t, 4, s.owned)
	goes(t, s, first, 8*interval)

	s, b = new(Schedule[int]), &bucket{}
	s.Leave(granted(s, b, 4), 0)
	require.EqualValues(t, 4, s.Refund().Permits)
	b.grant(1)
	waiters := []*Waiter[int]{join(s, 1, 0), join(s, 1, 0), join(s, 1, 0)}
	paced(2*interval).recut(s, 0)
	s.Refunded(false, true, 0)
	require.EqualValues(t, 2, s.owned)
	goes(t, s, waiters[0], 2*interval)
	goes(t, s, waiters[1], 4*interval)
	require.False(t, waiters[2].Covered())
}

// A refund that was not sent yet is counted under the new terms.
func TestRecutBeforeARefund(t *testing.T) {
	s := new(Schedule[int])
	b := &bucket{}
	granted(s, b, 1)
	s.Leave(granted(s, b, 5), 0)
	require.EqualValues(t, 5, s.Refundable().Permits)
	paced(2*interval).recut(s, 0)
	require.EqualValues(t, 2, s.Refund().Permits)
	require.EqualValues(t, 1, s.owned)
}

// Two processes own stretches of a bucket in turns. However these lie, and whenever the interval changes, no window from then on has more than one
// permit for each new interval, and one.
func TestRecutKeepsTheBound(t *testing.T) {
	for seed := range uint64(500) {
		r := rand.New(rand.NewPCG(seed, 7))
		b := &bucket{}
		lines := []*Schedule[int]{{}, {}}
		for range 40 {
			s := lines[r.IntN(2)]
			w := join(s, 1, 0)
			s.Grant(w, b.grant(1+r.Int64N(4)), 0)
		}
		for _, s := range lines {
			for range 200 {
				join(s, 1, 0)
			}
		}
		now := r.Int64N(b.next)
		to := paced(10_000 + r.Int64N(4*interval))
		var used []int64
		for _, s := range lines {
			for w, _ := s.Next(now); w != nil; w, _ = s.Next(now) {
			}
			to.recut(s, now)
			for w, at := s.Next(b.next); w != nil; w, at = s.Next(b.next) {
				used = append(used, max(at, now))
			}
		}
		slices.Sort(used)
		over, last := 0.0, now
		for _, at := range used {
			over = max(0, over-float64(at-last)/float64(to)) + 1
			require.LessOrEqual(t, over, 1.001, "seed %d, every %d at %d: %v", seed, to, now, used)
			last = at
		}
	}
}

// A stretch that the new terms fill to its end has nothing to give back. It stays the bucket's tail, so what is given up later goes back.
func TestRecutToTheEnd(t *testing.T) {
	for _, to := range []paced{50_000, 125_000, 300_000} {
		s := new(Schedule[int])
		w := granted(s, &bucket{}, 10)
		to.recut(s, 0)
		if r := s.Refund(); r != nil {
			require.Less(t, r.To.Next, r.End.Next, "every %d", to)
			s.Refunded(true, true, 0)
		}
		s.Leave(w, 0)
		r := s.Refund()
		require.NotNil(t, r, "every %d", to)
		require.Zero(t, r.To.Next)
	}
}
