package main

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
)

// figure is the measurement of one rival: medians over the rounds.
type figure struct {
	rival    string
	nanos    float64 // wall-clock time divided by calls; with n concurrent callers, each call takes n times as long
	allocs   float64 // allocations for each call
	p50, p99 time.Duration
	errors   int64
	wrong    error
}

func (f *figure) perSecond() float64 { return 1e9 / f.nanos }

// target is a number to reach.
type target struct {
	what    string
	value   float64 // NaN if it could not be measured
	limit   float64
	atLeast bool // whether limit is a minimum; otherwise it is a maximum
	unit    string
	why     string // why it could not be measured
}

func (t *target) reached() bool {
	if t.atLeast {
		return t.value >= t.limit
	}
	return t.value <= t.limit // false for NaN
}

func (t *target) verdict() string {
	switch {
	case t.reached():
		return "yes"
	case t.why != "":
		return "NO: " + t.why
	default:
		return "NO"
	}
}

func (t *target) measured() string {
	if math.IsNaN(t.value) {
		return "-"
	}
	return short(t.value) + " " + t.unit
}

func (t *target) wanted() string {
	if t.atLeast {
		return "≥ " + short(t.limit) + " " + t.unit
	}
	return "≤ " + short(t.limit) + " " + t.unit
}

// goal computes a target from the rivals' figures.
type goal func([]figure) target

// timeAtMost returns the goal that a call of rival takes at most times as long as one of other.
func timeAtMost(rival string, times float64, other string) goal {
	return compare(rival, "time", times, false, []string{other})
}

// throughputAtLeast returns the goal that rival answers at least times as many calls as the best of others.
func throughputAtLeast(rival string, times float64, others ...string) goal {
	return compare(rival, "throughput", times, true, others)
}

func compare(rival, of string, times float64, atLeast bool, others []string) goal {
	return func(all []figure) target {
		t := target{what: rival + ": " + of, value: math.NaN(), limit: times, atLeast: atLeast, unit: "× " + others[0]}
		if len(others) > 1 {
			t.unit = "× the best " + others[0]
		}
		mine, theirs := find(all, rival), fastest(all, others)
		switch {
		case mine == nil:
			t.why = rival + " is not in this library"
		case theirs == nil:
			t.why = "nothing to compare with"
		case atLeast:
			t.value = theirs.nanos / mine.nanos
		default:
			t.value = mine.nanos / theirs.nanos
		}
		return t
	}
}

// noAllocations returns the goal of no allocation for each call. It tolerates allocations of the runtime.
func noAllocations(rival string) goal {
	return func(all []figure) target {
		t := target{what: rival + ": allocations", value: math.NaN(), limit: 0.01, unit: "a call"}
		if f := find(all, rival); f != nil {
			t.value = f.allocs
		} else {
			t.why = rival + " is not in this library"
		}
		return t
	}
}

func find(all []figure, rival string) *figure {
	if i := slices.IndexFunc(all, func(f figure) bool { return f.rival == rival }); i >= 0 {
		return &all[i]
	}
	return nil
}

func fastest(all []figure, rivals []string) *figure {
	var best *figure
	for _, name := range rivals {
		if f := find(all, name); f != nil && (best == nil || f.nanos < best.nanos) {
			best = f
		}
	}
	return best
}

// median returns the median: NaN for no numbers, the mean of the middle two for an even count.
func median(all []float64) float64 {
	if len(all) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(all))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// short formats f with three digits, without an exponent below a billion.
func short(f float64) string {
	s := strconv.FormatFloat(f, 'g', 3, 64)
	if f, err := strconv.ParseFloat(s, 64); err == nil && math.Abs(f) < 1e9 && (f == 0 || math.Abs(f) >= 1e-3) {
		return strconv.FormatFloat(f, 'f', -1, 64)
	}
	return s
}

func micros(d time.Duration) string { return fmt.Sprintf("%s µs", short(float64(d)/1e3)) }
