package main

import (
	"math/bits"
	"time"
)

// stepBits sets the resolution of the histogram to 1/16 of a duration.
const stepBits = 4

// histogram counts durations in steps of constant relative width. Adding is cheap, and histograms of several processes can be merged.
type histogram struct {
	Counts []int64
}

func newHistogram() histogram { return histogram{make([]int64, 64<<stepBits)} }

func (h *histogram) add(d time.Duration) { h.Counts[step(d)]++ }

// step returns the step of a duration, from its highest bit and the stepBits that follow.
func step(d time.Duration) int {
	n := uint64(max(1, d))
	top := bits.Len64(n) - 1
	if top < stepBits {
		return int(n)
	}
	return (top-stepBits+1)<<stepBits + int(n>>(top-stepBits))&(1<<stepBits-1)
}

// ceiling returns the longest duration of a step.
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

// quantile returns the duration that a share q of all durations does not exceed, rounded up to its step. It returns 0 if there are none.
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
