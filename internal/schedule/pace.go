package schedule

import "math"

// Pace measures how fast a queue moves. That is this process's part of the rate, plus the waiters that leave. It is measured only while the
// demand is full: the process always wants more permits than it gets. The zero value has no measurement.
type Pace struct {
	permits, micros float64 // exponentially decaying sums
	last            int64   // when the queue last moved; 0 if the pace is not being measured
}

// Serve records, at full demand, that n permits were used or are no longer wanted. over is the averaging window.
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

// Forget restarts the measurement. It is for a demand that is no longer full, and for a pause of the process or the bucket.
func (p *Pace) Forget() {
	if p.last != 0 {
		*p = Pace{}
	}
}

// Cost returns how long n permits take at this pace. It returns false if the measurement covers less than the time least, or too few permits.
func (p *Pace) Cost(n int64, least int64) (micros float64, ok bool) {
	if p.micros < float64(least) || p.permits < minPermits {
		return 0, false
	}
	return float64(n) * p.micros / p.permits, true
}

// minPermits is the least number of permits for a usable measurement.
const minPermits = 4
