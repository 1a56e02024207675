package main

import (
	"math"
	"slices"
	"sync"
	"time"
)

// outcome is the limiter's decision about a call.
type outcome int

const (
	passed outcome = iota
	refused
	failed // the limiter returned an error
	outcomes
)

// call is one call at the limiter.
type call struct {
	offered, ended time.Duration
	outcome        outcome
}

// tally records the calls of all gateways and their outcomes.
type tally struct {
	origin time.Time

	mu      sync.Mutex
	offered int
	counts  [outcomes]int
	calls   []call
	lost    int   // calls that passed, but got no response
	err     error // the first error
}

// begin records that a call is offered.
func (t *tally) begin() call {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.offered++
	return call{offered: time.Since(t.origin)}
}

// end records the outcome of a call.
func (t *tally) end(c call, o outcome, err error) {
	c.ended, c.outcome = time.Since(t.origin), o
	t.mu.Lock()
	defer t.mu.Unlock()
	t.counts[o]++
	t.calls = append(t.calls, c)
	t.note(err)
}

// lose records a call that passed, but got no response.
func (t *tally) lose(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lost++
	t.note(err)
}

func (t *tally) note(err error) {
	if t.err == nil {
		t.err = err
	}
}

// sofar returns the counts up to now.
func (t *tally) sofar() (offered int, counts [outcomes]int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.offered, t.counts
}

// row is one line of the table.
type row struct {
	offered int
	counts  [outcomes]int
	seen    int
	waits   []time.Duration // of the calls that passed, sorted
}

// rows groups calls and arrivals into n seconds. One more row holds later ones, and the last row holds the totals.
func rows(calls []call, arrivals []time.Duration, n int) []row {
	table := make([]row, n+2)
	add := func(at time.Duration, count func(*row)) {
		count(&table[min(int(at/time.Second), n)])
		count(&table[n+1])
	}
	for _, c := range calls {
		add(c.offered, func(r *row) { r.offered++ })
		add(c.ended, func(r *row) {
			r.counts[c.outcome]++
			if c.outcome == passed {
				r.waits = append(r.waits, c.ended-c.offered)
			}
		})
	}
	for _, at := range arrivals {
		add(at, func(r *row) { r.seen++ })
	}
	for i := range table {
		slices.Sort(table[i].waits)
	}
	return table
}

// quantile returns the smallest of the sorted values that a share q of them does not exceed.
func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}
