//go:build !race

package schedule

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// Whatever happens in a line, and however often its bucket is held back and released meanwhile, its sums, ranks and parked waiters are those
// of the line, and no permit that was owned before a penalty falls due in it.
func TestRandomPauses(t *testing.T) {
	for seed := range uint64(60) {
		p := &play{T: t, r: rand.New(rand.NewPCG(seed, 7)), clock: 1, bucket: bucket{next: interval}}
		p.Strict = seed%2 == 0
		p.largest = []int64{1, 3}[seed/2%2]
		until := int64(0)
		for range 200 {
			p.clock += p.r.Int64N(interval)
			p.bucket.next = max(p.bucket.next, p.clock)
			switch p.r.IntN(16) {
			default:
				p.event()
			case 0:
				d := 1 + p.r.Int64N(8*interval)
				longer := p.clock + d - max(p.clock, until)
				if longer <= 0 {
					break
				}
				p.released()
				until = p.clock + d
				p.bucket.next += longer
				if p.r.IntN(4) == 0 { // the bucket was reset: the difference of the times means nothing
					longer = 0
				}
				p.Pause(longer, until, p.clock)
				for w := p.head; w != p.first; w = w.next {
					at, _ := p.DueOf(w)
					require.GreaterOrEqual(p, at, until, "seed %d", seed)
				}
			case 1:
				if until > p.clock {
					p.Resume(until-p.clock, p.clock)
					until = p.clock
				}
			case 2:
				if len(p.waiting) > 0 {
					w := p.waiting[p.r.IntN(len(p.waiting))]
					if w.Covered() {
						p.Promise(w)
					}
				}
			case 3:
				p.Hopeless(p.clock, p.bucket.next, false, func(n int64) int64 { return n * interval })
			case 4:
				if p.out != nil {
					p.Refunded(false, false, p.clock)
					p.out = nil
				}
			}
			p.released()
			p.check(seed)
			p.checkRanks(seed)
		}
	}
}

// checkRanks requires that the ranks are those of the covered, in the order of the line, and count what those ahead want.
func (p *play) checkRanks(seed uint64) {
	last, sum := 0, int64(0)
	for w := p.head; w != nil; w = w.next {
		if !w.Covered() {
			require.Zero(p, w.rank, "seed %d", seed)
			continue
		}
		require.Greater(p, w.rank, last, "seed %d", seed)
		last = w.rank
		sum += w.Permits
		require.Equal(p, sum, p.ranks.wants.until(w.rank), "seed %d", seed)
	}
}
