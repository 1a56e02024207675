package schedule

import "math"

// Pace is how fast a line moved of late: the process's part of the rate, which others want too, and those who left. It is measured
// only while the process always wants more than it gets. The zero value knows nothing.
type Pace struct {
	permits, micros float64 // of late: what is longer ago counts less
	last            int64   // when the line moved last; 0: it is not measured
}

// Serve notes that n permits were used, or are not wanted any more, at full demand. What is longer ago than over counts little.
func (p *Pace) Serve(now, n, over int64) {
	if p.last == 0 {
		p.last = now
		return
	}
	if passed := float64(now - p.last); passed > 0 {
		old := math.Exp(-passed / float64(over))
		p.permits, p.micros, p.last = p.permits*old, p.micros*old+float64(over)*(1-old), now
	}
	p.permits += float64(n)
}

// Forget begins to measure anew: the demand is not full any more, or the process or the bucket has stood still.
func (p *Pace) Forget() {
	if p.last != 0 {
		*p = Pace{}
	}
}

// Cost is how long n permits take at this pace; false: that is not known, as it was not measured for at least so long.
func (p *Pace) Cost(n int64, least int64) (micros float64, ok bool) {
	if p.micros < float64(least) || p.permits < evidence {
		return 0, false
	}
	return float64(n) * p.micros / p.permits, true
}

// evidence is how many permits tell of a pace.
const evidence = 4
