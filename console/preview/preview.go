// Package preview describes in plain words what a limit would have done to past traffic. It reads nothing by itself: the
// caller passes in the figures.
package preview

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// limit is a registry.Limit with the arithmetic of this package.
type limit registry.Limit

// Point counts the calls of a step of time by their outcome.
type Point struct {
	// Granted and Refused calls. Waited of the granted ones had to wait.
	Granted, Refused, Waited int64
}

// Input is the limit and the traffic.
type Input struct {
	Limit registry.Limit
	// Before is the limit in force before the change; nil if there is none. BeforeMinutes are the minutes in which no other
	// limit was in force, because it is not responsible for refusals in others.
	Before        *registry.Limit
	BeforeMinutes []Point
	// Minutes has the traffic of past minutes without gaps, the oldest first.
	Minutes []Point
	// Seconds has the traffic of past seconds if it was counted, the oldest first. It is simulated; of more than 50,000 calls
	// only the newest are.
	Seconds []Point
	// Period names the traffic of Minutes, or without Minutes that of Seconds: "today's traffic". If empty, the length names
	// it.
	Period string
}

// Result describes the effect.
type Result struct {
	// Text is the whole description: "5/s, saves up 5, waits up to 500 ms; today's traffic of 7.2/s would be refused to 31
	// %".
	Text string
	// Before describes the limit before the change and what it refused, in a sentence; empty if there was none.
	Before string
	// Limit is the limit in words, and Effect its effect on the traffic.
	Limit, Effect string
	// Notes are sentences about what the figures cannot show.
	Notes []string
	// Calls in the history, and Demand in calls per second.
	Calls  int64
	Demand float64
	// Least and Most bound the share of refused calls, 0 to 1. From Minutes they hold whatever the bursts within them. From a
	// simulation they are the results with the calls of each second spread evenly, and all at once. In shadow, they are the
	// share that would be refused otherwise.
	Least, Most float64
	// Unknown is set if the limit has a concurrency, because the history does not show how many calls ran at once. Most then
	// assumes calls that never end, and Least counts the refusals of the other bounds.
	Unknown bool
	// Simulated is set if Seconds were simulated. Otherwise Least and Most are computed from Minutes.
	Simulated bool
}

// Of describes the effect of a limit.
func Of(in Input) Result {
	l := (*limit)(&in.Limit)
	r := Result{Limit: in.Limit.String(), Before: before(&in)}
	points, step := in.Minutes, time.Minute
	name := in.Period
	if len(in.Seconds) > 0 {
		if points, step = newest(in.Seconds), time.Second; len(in.Minutes) > 0 {
			name = ""
		}
		r.Simulated = len(points) > 0 && l.simulable()
		if len(points) == 0 {
			points = in.Seconds
		}
	}
	if name == "" {
		name = traffic(time.Duration(len(points)) * step)
	}
	r.Calls = total(points)
	if r.Calls > 0 {
		r.Demand = float64(r.Calls) / (time.Duration(len(points)) * step).Seconds()
	}
	switch {
	case r.Simulated:
		r.Least, r.Most = l.simulate(points)
	default:
		r.Least, r.Most = l.bounds(points, step)
	}
	if l.spread() {
		r.Least = 0
	}
	if c := l.Concurrent; c > 0 && !l.Disabled && r.Calls > int64(c) && r.Least < 1 {
		r.Unknown = true
		r.Most = max(r.Most, float64(r.Calls-int64(c))/float64(r.Calls))
	}
	r.Effect = effect(l, &r, name)
	r.Text = r.Limit + "; " + r.Effect
	r.Notes = notes(&in, &r, points, step)
	return r
}

// calls returns the number of all calls.
func (p *Point) calls() int64 { return max(p.Granted, 0) + max(p.Refused, 0) }

func total(points []Point) (calls int64) {
	for i := range points {
		calls += points[i].calls()
	}
	return calls
}
