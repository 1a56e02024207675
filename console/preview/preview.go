// Package preview says in plain words what a limit would mean for the traffic of the past. It asks nobody anything: whoever has the
// figures passes them in.
package preview

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// limit is a registry.Limit, as the arithmetic here needs it.
type limit registry.Limit

// Point is how many calls came in a stretch of time, and what became of them.
type Point struct {
	// Granted at last, Refused at last; of the granted ones so many Waited.
	Granted, Refused, Waited int64
}

// Input is the question.
type Input struct {
	Limit registry.Limit
	// Before is the limit that is in force now, before the change; nil: there is none. BeforeMinutes are those minutes of the past in
	// which no other limit was in force: what was refused in others is not its doing.
	Before        *registry.Limit
	BeforeMinutes []Point
	// Minutes are the traffic of past minutes, one after the other without a gap, the oldest first.
	Minutes []Point
	// Seconds are that of past seconds, if anybody has counted them, the oldest first. They are simulated: of more than 50,000 calls
	// the newest.
	Seconds []Point
	// Period is what the traffic of Minutes is called: "today's traffic"; without Minutes, that of Seconds. Empty: it is named by its length.
	Period string
}

// Result is the answer.
type Result struct {
	// Text is all of it: "5/s, saves up 5, waits up to 500 ms; today's traffic of 7.2/s would be refused to 31 %".
	Text string
	// Before is what the limit before the change means, and what it has refused: a sentence; empty: there is none.
	Before string
	// Limit is the limit in words, Effect is what becomes of the traffic.
	Limit, Effect string
	// Notes are what the figures cannot show, each a sentence.
	Notes []string
	// Calls that the history has, and how many that is in a second.
	Calls  int64
	Demand float64
	// Least and Most of the calls would be refused, 0 to 1. From Minutes: whatever the bursts within them. Simulated: with the calls of
	// each second spread evenly, and all at once. In shadow: would be refused without.
	Least, Most float64
	// Unknown: the limit has a concurrency, and the history does not show how many calls ran at once. Most then is for calls that never
	// end, and Least is what the other bounds would refuse.
	Unknown bool
	// Simulated: Seconds were played through. Else Least and Most follow from Minutes alone.
	Simulated bool
}

// Of says what a limit would mean.
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

// calls is how many came.
func (p *Point) calls() int64 { return max(p.Granted, 0) + max(p.Refused, 0) }

func total(points []Point) (calls int64) {
	for i := range points {
		calls += points[i].calls()
	}
	return calls
}
