package clock

import "slices"

// Offset is how far the clock here is ahead of a server's, in microseconds, never too small: the least difference that the last answers
// have shown between their arrival and the time in them. One of them may have lain in a socket while this process was stopped,
// so the last alone says little; and the way back may have become longer for good, so those before say little in the end. The
// zero value knows nothing. It is not safe for concurrent use.
type Offset struct {
	seen [4]int64
	n    int
}

// Observe notes an answer: the difference that it shows, and how long the way there and back has taken. The answer was no longer under
// way than that: a greater difference means that a clock was set, and that what was seen before is worth nothing.
func (o *Offset) Observe(difference, trip int64) {
	if o.n > 0 && o.Micros() < difference-trip {
		o.n = 0
	}
	o.seen[o.n%len(o.seen)] = difference
	o.n++
}

// Micros is the least difference.
func (o *Offset) Micros() int64 {
	if o.n == 0 {
		return 0
	}
	return slices.Min(o.seen[:min(o.n, len(o.seen))])
}
