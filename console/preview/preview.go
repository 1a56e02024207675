// Package preview says in plain words what a limit would mean for the traffic of the past. It asks nobody anything: whoever has the
// figures passes them in.
package preview

import "time"

// Limit is the limit to be judged.
type Limit struct {
	// Rate in permits per second; with Quota, a whole number of calls in any second. 0: nothing passes.
	Rate float64
	// NoRate: there is no rate, and Rate does not matter.
	NoRate bool
	// Burst is what can be saved up; nil: one second's worth, at least 1.
	Burst *float64
	Quota bool
	// Warmup is the period in which a cold upstream gets warm; 0: none. ColdFactor 0: 3.
	Warmup     time.Duration
	ColdFactor float64
	// MaxWait is how long a call may wait.
	MaxWait time.Duration
	// WindowLimit is how many calls may begin in any Window. 0: no window.
	Window      time.Duration
	WindowLimit int
	// Concurrent is how many calls may run at once; 0: any number.
	Concurrent int
	// PerKey: each key has a bucket of its own. Most then is for one key alone; with many, perhaps nothing is refused.
	PerKey bool
	// Off lets every call pass. Shadow counts, and refuses nobody.
	Off, Shadow bool
}

// Point is how many calls came in a stretch of time, and what became of them.
type Point struct {
	// Granted at last, Refused at last; of the granted ones so many Waited.
	Granted, Refused, Waited int64
}

// Input is the question.
type Input struct {
	Limit Limit
	// Before is the limit that is in force now, before the change; nil: there is none. BeforeMinutes are those minutes of the past in
	// which no other limit was in force: what was refused in others is not its doing.
	Before        *Limit
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
	r := Result{Limit: in.Limit.Words(), Before: before(&in)}
	points, step := in.Minutes, time.Minute
	name := in.Period
	if len(in.Seconds) > 0 {
		if points, step = newest(in.Seconds), time.Second; len(in.Minutes) > 0 {
			name = ""
		}
		r.Simulated = len(points) > 0 && in.Limit.simulable()
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
		r.Least, r.Most = in.Limit.simulate(points)
	default:
		r.Least, r.Most = in.Limit.bounds(points, step)
	}
	if in.Limit.spread() {
		r.Least = 0
	}
	if c := in.Limit.Concurrent; c > 0 && !in.Limit.Off && r.Calls > int64(c) && r.Least < 1 {
		r.Unknown = true
		r.Most = max(r.Most, float64(r.Calls-int64(c))/float64(r.Calls))
	}
	r.Effect = effect(&in.Limit, &r, name)
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
