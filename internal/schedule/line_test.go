//go:build !race

package schedule

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// play is a line under random events, beside another process that takes from the same bucket.
type play struct {
	*testing.T
	Schedule[int]
	r       *rand.Rand
	bucket  bucket
	clock   int64
	waiting []*Waiter[int]
	largest int64
	used    int64 // by whom was let go
	bought  int64 // granted
	back    int64 // accepted refunds
	out     *Refund
}

// After any history the sums are those of the queue, and no waiter was served before its due time, or by more than was granted.
func TestRandomLines(t *testing.T) {
	for seed := range uint64(300) {
		p := &play{T: t, r: rand.New(rand.NewPCG(seed, 3)), clock: 1, bucket: bucket{next: interval}}
		p.Strict = seed%2 == 0
		p.largest = []int64{1, 3, 8}[seed/2%3]
		for range 200 {
			p.clock += p.r.Int64N(interval)
			p.bucket.next = max(p.bucket.next, p.clock)
			p.event()
			p.check(seed)
		}
	}
}

func (p *play) event() {
	switch p.r.IntN(11) {
	case 0, 1:
		w := &Waiter[int]{Permits: 1 + p.r.Int64N(p.largest), Came: p.clock, Until: Forever}
		if p.r.IntN(3) == 0 {
			w.Until = p.clock + p.r.Int64N(20*interval)
		}
		p.released()
		p.Join(w)
		p.waiting = append(p.waiting, w)
	case 2, 3:
		for w := p.Uncovered(); w != nil && p.r.IntN(4) > 0; w = p.Uncovered() {
			p.Grant(w, p.bucket.grant(w.Permits), p.clock)
			p.bought += w.Permits
		}
	case 4:
		if len(p.waiting) > 0 {
			p.released()
			p.Leave(p.waiting[p.r.IntN(len(p.waiting))], p.clock)
		}
	case 5:
		p.bucket.grant(1 + p.r.Int64N(2)) // the other process
	case 6:
		if p.out == nil {
			p.out = p.Refund()
		} else {
			p.answer()
		}
	case 7:
		w := &Waiter[int]{Permits: 1 + p.r.Int64N(p.largest), Came: p.clock, Until: Forever}
		p.released()
		p.GrantTo(w, p.bucket.grant(w.Permits), p.clock)
		p.bought += w.Permits
		if p.waiting = append(p.waiting, w); p.r.IntN(2) == 0 {
			p.Owe(w)
		}
	case 8:
		if p.Uncovered() != nil {
			p.Refused(p.clock, 1_000_000, 0, p.r.Float64())
		}
	case 9:
		p.released()
		p.Expire(p.clock)
		require.True(p, p.Timeout() == 0 || p.Timeout() > p.clock)
	case 10:
		if len(p.waiting) > 0 {
			p.shrink(p.waiting[p.r.IntN(len(p.waiting))])
		}
	}
	p.released()
}

// shrink lowers what a waiter needs. If it has gathered the rest, it goes with that.
func (p *play) shrink(w *Waiter[int]) {
	p.released()
	if w.Waits() && w.Permits > 1 {
		if r := p.Shrink(w, 1+p.r.Int64N(w.Permits-1), p.clock); r.Served {
			require.LessOrEqual(p, r.Due, p.clock)
			p.used += w.Permits
		}
	}
}

// answer is what the bucket answers to a refund: it takes back its end.
func (p *play) answer() {
	r, ok := p.out, p.out.Tag == p.bucket.tag && p.out.End.Next == p.bucket.next
	if ok {
		p.bucket.next, p.bucket.tag = r.To.Next, r.Tail
		p.back += r.Permits
	}
	p.out = nil
	p.Refunded(ok, true, p.clock)
}

func (p *play) released() {
	for w, at := p.Next(p.clock); w != nil; w, at = p.Next(p.clock) {
		require.LessOrEqual(p, at, p.clock)
		require.False(p, w.Waits())
		if p.Strict {
			require.GreaterOrEqual(p, at, p.clock-Tolerated)
		}
		require.Greater(p, at, w.Came-1, "not by a permit from before")
		p.used += w.Permits
	}
	for _, w := range p.Expired() {
		require.False(p, w.Waits())
		require.Greater(p, w.Due(), w.Until)
	}
}

func (p *play) check(seed uint64) {
	owned, promised, wanted, waiters, large, limited, parked, behind := int64(0), int64(0), int64(0), 0, 0, 0, 0, false
	for _, g := range p.segments {
		require.GreaterOrEqual(p, g.left, int64(0))
		require.Equal(p, g.end.Next, g.cursor.Next+g.left*interval)
		owned += g.left
	}
	for w := p.head; w != nil; w = w.next {
		waiters++
		require.True(p, w.next == nil && p.tail == w || w.next != nil && w.next.prev == w)
		if behind = behind || p.first == w; behind {
			wanted += w.Permits
		} else {
			promised += w.Permits
		}
		require.Equal(p, behind, !w.Covered(), "seed %d: the covered come first", seed)
		if w.Permits > 1 {
			large++
		}
		if w.Until != Forever {
			limited++
		}
		if w.place != 0 {
			parked++
			require.True(p, behind && w.refused && w.Until != Forever && p.parked[w.place-1] == w, "seed %d", seed)
			require.GreaterOrEqual(p, w.Until, p.Timeout(), "seed %d", seed)
		}
		require.False(p, behind && w.refused && w.Until != Forever && w.place == 0, "seed %d", seed)
	}
	require.Len(p, p.parked, parked, "seed %d", seed)
	for w := p.head; w != nil; w = w.next {
		p.sameDue(seed, w)
	}
	require.Equal(p, []int64{owned, promised, wanted}, []int64{p.owned, p.promised, p.wanted}, "seed %d", seed)
	require.Equal(p, []int{waiters, large, limited}, []int{p.waiters, p.large, p.limited}, "seed %d", seed)
	require.LessOrEqual(p, promised, owned, "seed %d", seed)
	require.LessOrEqual(p, p.used+p.back+owned, p.bought, "seed %d", seed)
}

// sameDue requires that a look shows what going through the line does.
func (p *play) sameDue(seed uint64, w *Waiter[int]) {
	known, covered := p.DueOf(w)
	if !covered {
		return
	}
	for _, g := range p.segments {
		if g.lapsing(max(g.from, g.came(w.Came))) > 0 {
			return // the permits that are to lapse are known when they have
		}
	}
	found := int64(0)
	p.walk(func(other *Waiter[int], g *segment) bool {
		if other == w {
			found = g.due(w.Permits)
		}
		return true
	})
	if found != 0 {
		require.Equal(p, found, known, "seed %d", seed)
	}
}

// later are terms under which permits are due before they are paid for.
type later struct{ steady }

func (later) PayLater() bool { return true }

func TestSegment(t *testing.T) {
	for _, test := range []struct {
		terms             Terms
		due, second, none int64 // when the first two are due, and until when none lapses
	}{
		{steady{}, 2 * interval, 3 * interval, 2 * interval},
		{later{}, interval, 2 * interval, interval},
	} {
		end, _ := test.terms.After(permit.Balance{Next: interval}, 4)
		g := &segment{terms: test.terms, cursor: permit.Balance{Next: interval}, end: end, left: 4, offset: 5}
		require.Equal(t, test.due, g.permit(1))
		require.Equal(t, test.second, g.permit(2))
		require.Equal(t, test.due+5, g.due(1))
		require.Zero(t, g.lapsing(test.none))
		require.EqualValues(t, 1, g.lapsing(test.none+1))
		require.EqualValues(t, 2, g.lapsing(test.second+1))
		require.EqualValues(t, 4, g.lapsing(1<<60))
		require.EqualValues(t, 4*interval, g.ahead(0))
		require.EqualValues(t, 3*interval, g.ahead(2*interval+5))
		require.Zero(t, g.ahead(1<<60))
		g.take(3)
		require.Equal(t, test.due+3*interval, g.permit(1))
		require.True(t, g.used)
	}
}
