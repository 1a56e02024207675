package preview

import (
	"math"
	"time"
)

// bucket describes what a limit's rate allows: rate calls a second in the long run, and size more at once, the wait included.
// A call is refused only if the calls before it have used leastRate and leastSize.
type bucket struct{ rate, size, leastRate, leastSize float64 }

// slack allows for the rounding of times to microseconds.
const slack = 1e-6

func (l *limit) bucket() bucket {
	rate, size := l.Rate, l.size()
	wait := rate * l.MaxWait.Seconds()
	if l.Warmup <= 0 {
		return bucket{rate, size + wait, rate, size + wait}
	}
	// The first call of a series passes at once, and a cold bucket is slower.
	cold := l.cold()
	return bucket{rate, 1 + wait, rate / cold, wait / cold}
}

func (l *limit) cold() float64 {
	if l.ColdFactor > 1 {
		return l.ColdFactor
	}
	return 3
}

// size returns the largest number of stored permits.
func (l *limit) size() float64 {
	switch {
	case l.Quota:
		return 1
	case l.Burst != nil && l.Concurrent > 0: // as the registry has it
		return max(*l.Burst, 1)
	case l.Burst != nil:
		return *l.Burst
	}
	return max(l.Rate, 1)
}

// bounds returns bounds on the share of calls that would be refused, 0 to 1, whatever the times of the calls within their
// steps.
func (l *limit) bounds(points []Point, step time.Duration) (least, most float64) {
	calls := float64(total(points))
	if calls == 0 || l.Disabled {
		return 0, 0
	}
	if l.Rate <= 0 && !l.NoRate {
		return 1, 1
	}
	granted := calls
	if !l.NoRate {
		granted = l.bucket().mostGranted(points, step)
	}
	if l.windowed() {
		granted = min(granted, l.mostInWindows(points, step))
	}
	least = (calls - math.Floor(granted+slack)) / calls
	return least, max(least, (calls-l.leastGranted(points, step))/calls)
}

// spread reports whether calls use more than one bucket.
func (l *limit) spread() bool { return l.PerKey && !l.Disabled && !l.NoRate && l.Rate > 0 }

func (l *limit) windowed() bool { return l.Window > 0 && l.WindowLimit > 0 }

// mostGranted returns the number of calls that the bucket grants if they come at the best times.
func (b bucket) mostGranted(points []Point, step time.Duration) (granted float64) {
	stored := b.size
	for i := range points {
		stored += b.rate * step.Seconds()
		now := min(float64(points[i].calls()), stored)
		granted += now
		stored = min(b.size, stored-now)
	}
	return granted
}

// mostInWindows returns the number of calls that the windows grant at most: in all steps within one window together, or in
// one step with several windows.
func (l *limit) mostInWindows(points []Point, step time.Duration) (granted float64) {
	within := int(l.Window / step) // steps in a window
	limit := float64(l.WindowLimit)
	if within == 0 {
		limit *= math.Ceil(float64(step) / float64(l.Window))
		within = 1
	}
	taken := make([]float64, len(points))
	var sum float64 // of the last steps that lie within one window
	for i := range points {
		if i >= within {
			sum -= taken[i-within]
		}
		taken[i] = min(float64(points[i].calls()), limit-sum)
		sum += taken[i]
		granted += taken[i]
	}
	return granted
}

// leastGranted returns the number of calls that are certainly granted. If a call is refused, the calls before it have used up
// the bucket in its own step and the one before, or the window in the steps that it covers. So a series of steps with fewer
// calls refuses none. Of the other steps, those count that are so far apart that no call counts twice.
func (l *limit) leastGranted(points []Point, step time.Duration) float64 {
	enough, back := math.Inf(1), 1
	if !l.NoRate {
		b := l.bucket()
		enough = min(b.leastRate*step.Seconds(), b.leastSize)
	}
	if l.windowed() {
		enough = min(enough, float64(l.WindowLimit))
		back = max(back, int(math.Ceil(float64(l.Window)/float64(step))))
	}
	enough = max(0, math.Floor(enough+slack))
	var sum, safe float64 // calls of the last back+1 steps; calls in steps that refuse none
	free := make([]bool, len(points))
	best := make([]float64, len(points)+1) // for the first i steps: the most calls granted in steps that may refuse
	for i := range points {
		n := float64(points[i].calls())
		if sum += n; i > back {
			sum -= float64(points[i-back-1].calls())
		}
		best[i+1] = best[i]
		if free[i] = sum <= enough; free[i] {
			safe += n
			continue
		}
		rest := enough
		for j := max(0, i-back); j < i; j++ {
			if free[j] {
				rest -= float64(points[j].calls())
			}
		}
		best[i+1] = max(best[i+1], best[max(0, i-back)]+min(n, max(0, rest)))
	}
	return safe + best[len(points)]
}
