// Package bound checks whether events keep to a rate in every window of time, wherever it begins and however long it is.
package bound

import (
	"slices"
	"time"
)

// Window is a stretch of time and the events in it, both ends included.
type Window struct {
	Events   int
	From, To time.Duration
}

// Length of the window.
func (w Window) Length() time.Duration { return w.To - w.From }

// Excess is how many events more than rate × its length the window holds.
func (w Window) Excess(rate float64) float64 {
	return float64(w.Events) - float64(rate*w.Length().Seconds())
}

// Noise is what summing up in floating point may cost, in events.
const Noise = 1e-6

// Fullest returns the window with the largest excess, out of all that there are, in one pass over sorted times. It
// pictures the events as water poured into a vessel that leaks at the given rate: the level is the largest excess of
// any window that ends now, and that window began when the vessel was last empty.
func Fullest(times []time.Duration, rate float64) Window {
	var best Window
	start := 0
	for i, t := range times {
		before := Window{i - start, times[start], t} // without this event, but what has leaked until now has
		if before.Excess(rate) <= 0 {
			start = i
		}
		w := Window{i - start + 1, times[start], t}
		if i == 0 || w.Excess(rate) > best.Excess(rate)+Noise { // of equals the first
			best = w
		}
	}
	return best
}

// Busiest returns the window of at most the given length with the most events, out of sorted times.
func Busiest(times []time.Duration, length time.Duration) Window {
	var best Window
	start := 0
	for i, t := range times {
		for t-times[start] > length {
			start++
		}
		if n := i - start + 1; n > best.Events {
			best = Window{n, times[start], t}
		}
	}
	return best
}

// Lateness is at most how much later than due an event came: the k-th event is set against the k-th due time, both
// sorted. Taken so, it suits the bound, whoever got which permit: events none of which is early, and that are at most
// this late, hold at most rate × lateness more in any window than the due times do.
func Lateness(events, due []time.Duration) time.Duration {
	var most time.Duration
	for i := range min(len(events), len(due)) {
		most = max(most, events[i]-due[i])
	}
	return most
}

// Sorted picks a time of each element and sorts them.
func Sorted[T any](from []T, pick func(T) time.Duration) []time.Duration {
	all := make([]time.Duration, len(from))
	for i, e := range from {
		all[i] = pick(e)
	}
	slices.Sort(all)
	return all
}
