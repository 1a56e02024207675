package clock

import "slices"

// Offset estimates how far the local clock is ahead of a server's, in microseconds. The estimate contains the way back of a reply, so it is
// never too small; see [Remote] for what other types estimate. It is the least difference between the arrival of a reply and the time in
// it, over the last few replies. The last reply alone does not suffice, because it may have waited in a socket while this process was
// stopped. Old replies do not count, because the way back may have become longer for good. The zero value has no estimate. An Offset is not
// safe for concurrent use.
type Offset struct {
	recent [4]int64 // a ring of the latest differences
	trips  [4]int64 // the durations of their round trips
	n      int      // replies observed
}

// Observe adds the difference that a reply shows. trip is the duration of its round trip, which bounds the error of the difference. A
// difference that exceeds the estimate by more than trip means that a clock was set, so the earlier differences are dropped.
func (o *Offset) Observe(difference, trip int64) {
	if o.n > 0 && o.Micros() < difference-trip {
		o.n = 0
	}
	o.recent[o.n%len(o.recent)], o.trips[o.n%len(o.trips)] = difference, trip
	o.n++
}

// Micros returns the estimate, or 0 before the first reply.
func (o *Offset) Micros() int64 {
	if o.n == 0 {
		return 0
	}
	return slices.Min(o.recent[:min(o.n, len(o.recent))])
}

// Trip returns the shortest of the last few round trips, or 0 before the first reply. A longer one shows that a server or this process was
// busy or stopped, rather than how far away the server is.
func (o *Offset) Trip() int64 {
	if o.n == 0 {
		return 0
	}
	return slices.Min(o.trips[:min(o.n, len(o.trips))])
}
