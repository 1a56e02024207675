package main

import (
	"math/bits"
	"time"
)

// stepBits: durations are told apart to a sixteenth.
const stepBits = 4

// histogram counts durations in steps that grow with them, so that adding is cheap and processes can be added up.
type histogram struct {
	Counts []int64
}

func newHistogram() histogram { return histogram{make([]int64, 64<<stepBits)} }

func (h *histogram) add(d time.Duration) { h.Counts[step(d)]++ }

// step numbers a duration: its highest bit, then the bits that follow.
func step(d time.Duration) int {
	n := uint64(max(1, d))
	top := bits.Len64(n) - 1
	if top < stepBits {
		return int(n)
	}
	return (top-stepBits+1)<<stepBits + int(n>>(top-stepBits))&(1<<stepBits-1)
}

// ceiling is the longest duration of a step.
func ceiling(step int) time.Duration {
	if step < 1<<stepBits {
		return time.Duration(step)
	}
	shift := step>>stepBits - 1
	first := (1<<stepBits + step&(1<<stepBits-1)) << shift
	return time.Duration(first + 1<<shift - 1)
}

func (h *histogram) merge(o histogram) {
	for i, n := range o.Counts {
		h.Counts[i] += n
	}
}

// quantile is the duration that a share q of all do not exceed, rounded up to its step; 0 if there are none.
func (h *histogram) quantile(q float64) time.Duration {
	var total, sum int64
	for _, n := range h.Counts {
		total += n
	}
	for i, n := range h.Counts {
		if sum += n; n > 0 && float64(sum) >= q*float64(total) {
			return ceiling(i)
		}
	}
	return 0
}
