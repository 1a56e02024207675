package admission

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

const (
	// parts is the number of steps in which a window is counted.
	parts = 100
	// longestLead and shortestLead bound the lead: the time before its permit is due at which a call asks for its place and its count. A
	// place that is held ahead is useless to others, so the lead is as short as these round trips allow (slot.took).
	longestLead  = 20 * time.Millisecond
	shortestLead = time.Millisecond
)

// lead returns the longest time before its beginning at which a call is counted: a hundredth of the window, at most longestLead.
func lead(window time.Duration) time.Duration {
	if window == 0 {
		return longestLead
	}
	return min(longestLead, (window/parts + time.Millisecond - 1).Truncate(time.Millisecond))
}

// latest returns the longest time from the count of a call to its beginning: twice the lead, as replies and timers are late.
func latest(lead time.Duration) time.Duration { return 2 * lead }

// counted returns the length and the resolution of the window in the store. The window is longer than the row's, by the time from a count
// to the beginning of its call. So in no window of the row's length do more calls begin than its limit.
func counted(window time.Duration) (length, resolution time.Duration) {
	length = window + latest(lead(window))
	return length, max(time.Millisecond, length/parts)
}

// bounds are the window and the concurrency of one version of a row.
type bounds struct {
	version int64
	name    string // under which the window and the concurrency are counted
	lead    time.Duration
	window  *slidingwindow.Limiter // nil if there is none
	length  time.Duration          // of the window, in the row
	limit   int                    // of the window
	places  *semaphore.Semaphore   // nil if there is none
	remote  bool                   // whether places are a fleet's: to release one is a round trip
	most    int                    // of the concurrency
}

// bounds makes the window and the concurrency of a row. A window of the same name and length as in was keeps its local counts, which
// include the calls that passed during an outage of the backend. was may be nil.
func (e *Env) bounds(row Row, was *bounds) (*bounds, error) {
	next := &bounds{version: row.Version, name: row.Name, lead: lead(row.Window), length: row.Window, limit: row.WindowLimit, most: row.Concurrent}
	var err error
	if row.Window != 0 {
		length, resolution := counted(row.Window)
		if next.window, err = e.Windows(row.Name, row.WindowLimit, length, resolution, slidingwindow.WithVersion(row.Version)); err != nil {
			return nil, err
		}
		if was != nil && was.window != nil && was.name == row.Name && was.length == row.Window && was.window.Reconfigure(next.window) == nil {
			next.window = was.window
		}
	}
	if row.Concurrent != 0 {
		if next.places, err = e.Semaphores(row.Name, row.Concurrent, semaphore.WithVersion(row.Version)); err == nil {
			next.remote = next.places.Name() != ""
		}
	}
	return next, err
}
