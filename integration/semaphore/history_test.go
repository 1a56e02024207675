package semaphore

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"
)

// What happened to one permit, as its clients know it. Times are microseconds; forever: it is not known that it was over.
type story struct {
	fence    int64
	n        int
	acquired span
	ends     []end
}

type span struct{ call, back int64 }

const forever = math.MaxInt64 / 2

// end is an operation on a permit that was acquired.
type end struct {
	kind kind
	span
}

type kind int

const (
	acquire kind = iota
	release      // it was held, and is no longer
	denied       // the client got ErrNotHeld
	lapse        // if it is held, it no longer is: an expiry, or a release whose arrival is unknown
)

// operation is an input of the model. Permits are numbered in the order of their fences.
type operation struct {
	part   int
	kind   kind
	permit int
	n      int
}

// counted is a state of the model: how many permits were granted so far, and which of them are held.
type counted struct {
	granted int
	held    [16]int32 // permit + 1 each; 0 if none
	used    int
}

// model is a counting semaphore whose fences rise by the order of its grants.
func model(permits int) porcupine.Model {
	return porcupine.Model{
		Partition: func(all []porcupine.Operation) [][]porcupine.Operation {
			var parts [][]porcupine.Operation
			for _, o := range all {
				part := o.Input.(operation).part
				for len(parts) <= part {
					parts = append(parts, nil)
				}
				parts[part] = append(parts[part], o)
			}
			return parts
		},
		Init: func() any { return counted{} },
		Step: func(state, input, _ any) (bool, any) {
			s, o := state.(counted), input.(operation)
			if o.kind == acquire {
				free := slices.Index(s.held[:], 0)
				if o.permit != s.granted || s.used+o.n > permits || free < 0 {
					return false, nil
				}
				s.granted, s.used, s.held[free] = s.granted+1, s.used+o.n, int32(o.permit+1)
				return true, s
			}
			at := slices.Index(s.held[:], int32(o.permit+1))
			switch {
			case o.permit >= s.granted, o.kind == release && at < 0, o.kind == denied && at >= 0:
				return false, nil
			case at >= 0:
				s.used, s.held[at] = s.used-o.n, 0
			}
			return true, s
		},
		DescribeOperation: func(input, _ any) string {
			o := input.(operation)
			return fmt.Sprintf("%s %d (%d)", [...]string{"acquire", "release", "denied", "lapse"}[o.kind], o.permit, o.n)
		},
	}
}

// history turns stories into operations, in parts of the given number of permits that are checked one by one, because the search takes time
// and memory in proportion to the square of a part. The fences give the order of all acquires, so a part is a run of them. The permits that
// are certainly held when it begins are in it too, and it overlaps the part before. Leaving out all others makes nothing illegal that is
// legal: they would only use permits. Nor the other way round, except for effects that last longer than the overlap: the others may all
// have ended before the part begins.
func history(stories []*story, part int) (all []porcupine.Operation, open int) {
	slices.SortFunc(stories, func(a, b *story) int { return int(a.fence - b.fence) })
	const overlap = 20
	begins := int64(0) // no acquire of the part can take effect before
	number := 0
	for first := 0; first < len(stories); first += part {
		from := max(0, first-overlap)
		for _, s := range stories[max(0, from-part) : from+1] {
			begins = max(begins, s.acquired.call)
		}
		var here []*story
		for _, s := range stories[:from] {
			if !slices.ContainsFunc(s.ends, func(e end) bool { return e.call < begins }) {
				here = append(here, s)
			}
		}
		here = append(here, stories[from:min(first+part, len(stories))]...)
		for i, s := range here {
			add := func(k kind, at span) {
				if at.back == forever {
					open++
				}
				all = append(all, porcupine.Operation{
					ClientId: i, Input: operation{number, k, i, s.n}, Call: at.call, Return: at.back,
				})
			}
			add(acquire, s.acquired)
			for _, e := range s.ends {
				add(e.kind, e.span)
			}
		}
		number++
	}
	return all, open
}

func check(permits int, stories []*story, part int) (porcupine.CheckResult, int, int) {
	all, open := history(stories, part)
	return porcupine.CheckOperationsTimeout(model(permits), all, 2*time.Minute), len(all), open
}

// The checker finds the faults of histories that are nearly right.
func TestHistoriesAreJudged(t *testing.T) {
	legal := func() []*story { // two permits; each is acquired while the one before is held
		var all []*story
		for i := range int64(1000) {
			at := 100 * i
			all = append(all, &story{fence: 5 + 3*i, n: 1, acquired: span{at - 500, at + 10},
				ends: []end{{release, span{at + 150, at + 190}}}})
		}
		return all
	}
	for name, change := range map[string]func(all []*story){
		"":                    func([]*story) {},
		"open ends":           func(all []*story) { all[400].ends[0] = end{lapse, span{40_100, forever}} },
		"released by another": func(all []*story) { all[400].ends = append(all[400].ends, end{denied, span{40_100, 40_290}}) },
		"held for too long":   func(all []*story) { all[400].ends[0].span = span{40_240, 40_290} },
		"held for ever":       func(all []*story) { all[400].ends[0].span = span{90_000, forever} },
		"never ended":         func(all []*story) { all[400].ends = nil },
		"three of two":        func(all []*story) { all[400].n = 2 },
		"fences against time": func(all []*story) { all[400].fence, all[420].fence = all[420].fence, all[400].fence },
		"denied though held": func(all []*story) {
			all[400].ends = []end{{denied, span{40_100, 40_120}}, {release, span{40_150, 40_190}}}
		},
		"released twice":          func(all []*story) { all[400].ends = append(all[400].ends, end{release, span{40_150, 40_200}}) },
		"expires before it could": func(all []*story) { all[400].ends[0] = end{lapse, span{40_260, forever}} },
	} {
		all := legal()
		change(all)
		want := porcupine.Illegal
		if name == "" || name == "open ends" || name == "released by another" {
			want = porcupine.Ok
		}
		for _, part := range []int{50, 300, 1000} {
			got, _, _ := check(2, all, part)
			require.Equal(t, want, got, "%s, in parts of %d", name, part)
			slices.SortFunc(all, func(a, b *story) int { return int(b.fence - a.fence) })
		}
	}
}
