//go:build linux

package soak

import (
	"cmp"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/faultlab"
)

// lasting is permits or stays from one time to another.
type lasting struct{ from, to int64 }

// surely returns how many more than rate × its length some window holds for certain: of the given, each of which took place at
// one time between its ends, those that lie in the window from end to end. If it is at most a bucket's burst, there are times
// between those ends at which all of them could be taken from the bucket; if not, there are none, and somebody was given too
// much. So no allowance is needed for what happened late.
//
// Windows begin where one of the given does and end where one does. Going back from the last beginning, tree holds for each
// end how many there are, less what the rate allows.
func surely(all []lasting, rate float64) float64 {
	if len(all) == 0 {
		return 0
	}
	all = slices.SortedFunc(slices.Values(all), func(a, b lasting) int { return cmp.Compare(b.from, a.from) })
	ends := make([]int64, len(all))
	for i, l := range all {
		ends[i] = l.to
	}
	slices.Sort(ends)
	origin := ends[0]
	size := 1
	for size < len(ends) {
		size *= 2
	}
	tree := make([]node, 2*size)
	for i := range size {
		tree[size+i].best = math.Inf(-1)
		if i < len(ends) {
			tree[size+i].best = -rate * float64(ends[i]-origin) / 1e6
		}
	}
	for i := size - 1; i > 0; i-- {
		tree[i].best = max(tree[2*i].best, tree[2*i+1].best)
	}
	most := 0.0
	for _, l := range all {
		first, _ := slices.BinarySearch(ends, l.to)
		add(tree, 1, 0, size, first)
		begin, _ := slices.BinarySearch(ends, l.from)
		most = max(most, best(tree, 1, 0, size, begin)+rate*float64(l.from-origin)/1e6)
	}
	return most
}

// node is the best of its leaves, with plus added to all of them by itself.
type node struct{ best, plus float64 }

// add counts one more for all leaves from the first on. A node has the leaves from low to below high.
func add(tree []node, at, low, high, first int) {
	switch {
	case high <= first:
	case low >= first:
		tree[at].best++
		tree[at].plus++
	default:
		middle := (low + high) / 2
		add(tree, 2*at, low, middle, first)
		add(tree, 2*at+1, middle, high, first)
		tree[at].best = max(tree[2*at].best, tree[2*at+1].best) + tree[at].plus
	}
}

// best is the best leaf from the first on.
func best(tree []node, at, low, high, first int) float64 {
	switch {
	case high <= first:
		return math.Inf(-1)
	case low >= first:
		return tree[at].best
	}
	middle := (low + high) / 2
	return max(best(tree, 2*at, low, middle, first), best(tree, 2*at+1, middle, high, first)) + tree[at].plus
}

// fullest is the most that lie from end to end in any window of a length, in microseconds.
func fullest(all []lasting, window int64) (most int) {
	all = slices.SortedFunc(slices.Values(all), func(a, b lasting) int { return cmp.Compare(a.from, b.from) })
	for i, first := range all {
		n := 0
		for _, l := range all[i:] {
			if l.from >= first.from+window {
				break
			}
			if l.to < first.from+window {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

// crowd is the most that last at once.
func crowd(all []lasting) (most int) {
	type change struct {
		at int64
		by int
	}
	var changes []change
	for _, l := range all {
		changes = append(changes, change{l.from, 1}, change{l.to, -1})
	}
	slices.SortFunc(changes, func(a, b change) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.by, b.by)) })
	there := 0
	for _, c := range changes {
		there += c.by
		most = max(most, there)
	}
	return most
}

// between returns those of all, in the order of their beginnings, that lie within.
func between(all []event, within lasting) []event {
	first, _ := slices.BinarySearchFunc(all, within.from, func(e event, at int64) int { return cmp.Compare(e.Asked, at) })
	var those []event
	for _, e := range all[first:] {
		if e.Asked >= within.to {
			break
		}
		if max(e.Granted, e.Used) < within.to {
			those = append(those, e)
		}
	}
	return those
}

func TestJudges(t *testing.T) {
	random := faultlab.Seed(t)
	for range 300 {
		var all []lasting
		for range random.IntN(30) {
			from := random.Int64N(20) * 50_000
			all = append(all, lasting{from, from + random.Int64N(6)*40_000})
		}
		rate := []float64{1, 5, 20}[random.IntN(3)]
		want, full, there := 0.0, 0, 0
		const window = 200_000
		for _, a := range all {
			n, now := 0, 0
			for _, b := range all {
				count := 0
				for _, c := range all {
					if c.from >= a.from && c.to <= b.to {
						count++
					}
				}
				if count > 0 {
					want = max(want, float64(count)-rate*float64(b.to-a.from)/1e6)
				}
				if b.from >= a.from && b.to < a.from+window {
					n++
				}
				if b.from <= a.from && b.to > a.from {
					now++
				}
			}
			full, there = max(full, n), max(there, now)
		}
		require.InDelta(t, want, surely(all, rate), 1e-9, all)
		require.Equal(t, full, fullest(all, window))
		require.Equal(t, there, crowd(all))
		var exact []lasting
		var events []faultlab.Event
		for _, l := range all {
			exact = append(exact, lasting{l.to, l.to})
			events = append(events, faultlab.Event{At: l.to, Permits: 1})
		}
		require.InDelta(t, faultlab.Worst(events, rate), surely(exact, rate), 1e-9, "the usual measure, if nothing is uncertain")
	}
}
