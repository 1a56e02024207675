// Package bound checks whether events keep to a rate in every window of time, whatever its start and length.
package bound

import (
	"slices"
	"time"
)

// Window is an interval of time and the number of events in it. Both ends are included.
type Window struct {
	Events   int
	From, To time.Duration
}

// Length returns To − From.
func (w Window) Length() time.Duration { return w.To - w.From }

// Excess returns by how many events the window exceeds rate × its length. It is negative if the window has room left.
func (w Window) Excess(rate float64) float64 {
	return float64(w.Events) - float64(rate*w.Length().Seconds())
}

// Noise is the tolerance for floating-point sums, in events.
const Noise = 1e-6

// Fullest returns the window with the largest excess of all possible windows. times must be sorted; one pass is enough.
//
// It works like a leaky bucket: each event adds one unit of water, which leaks at the given rate. The level is the largest
// excess of any window that ends now. That window began when the bucket was last empty.
func Fullest(times []time.Duration, rate float64) Window {
	var best Window
	start := 0
	for i, t := range times {
		before := Window{i - start, times[start], t} // up to now, without this event
		if before.Excess(rate) <= 0 {
			start = i
		}
		w := Window{i - start + 1, times[start], t}
		if i == 0 || w.Excess(rate) > best.Excess(rate)+Noise { // the first of equal windows wins
			best = w
		}
	}
	return best
}

// Busiest returns the window of at most the given length with the most events. times must be sorted.
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

// Lateness returns the largest delay between a due time and its event. Both slices must be sorted: the k-th event is
// compared with the k-th due time, whichever caller got which permit. The bound allows for exactly this delay: if no event
// is early, a window of events holds at most rate × lateness more than a window of due times.
func Lateness(events, due []time.Duration) time.Duration {
	var most time.Duration
	for i := range min(len(events), len(due)) {
		most = max(most, events[i]-due[i])
	}
	return most
}

// Sorted returns the times that pick extracts from the elements, in ascending order.
func Sorted[T any](from []T, pick func(T) time.Duration) []time.Duration {
	all := make([]time.Duration, len(from))
	for i, e := range from {
		all[i] = pick(e)
	}
	slices.Sort(all)
	return all
}
