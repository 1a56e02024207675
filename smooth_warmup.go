package tokenbucket

// warmupCurve returns the curve of Guava's SmoothWarmingUp. An idle bucket stores permits. The more are stored, the colder
// the bucket, and the longer each takes to grant:
//
//	         ^ interval
//	    cold +                    /
//	interval |                  / .
//	         |                /   .
//	         |              /     .   the area under the line between two stored levels
//	         |            /       .   is the time that the permits between them cost
//	  stable +----------/  warm-  .
//	interval |          .   up    .
//	         |          . period  .
//	       0 +----------+---------+----> stored permits
//	         0      threshold    max
//
// The constants follow from two wishes. Going from max to threshold shall take the warm-up period, and the area of
// that trapezoid is (max − threshold) × (stable + cold) / 2:
//
//	max = threshold + 2 × period / (stable + cold)
//
// Going from threshold to 0 shall take half the period, a rectangle of threshold × stable (Guava's choice: it makes
// the period the time to warm up at a cold factor of 3 while permits accrue as fast as they did):
//
//	threshold = period / (2 × stable)
//
// The slope is what raises stable to cold over max − threshold. An idle bucket goes from 0 to max in one period,
// so it stores a permit each period / max.
func warmupCurve(c *config) curve {
	stable := microsPerSecond / c.Rate
	cold := float64(stable * c.ColdFactor)
	period := float64(c.WarmupMicros)
	threshold := float64(0.5*period) / stable
	most := threshold + float64(2*period)/(stable+cold)
	return curve{
		interval:  stable,
		max:       most,
		threshold: threshold,
		slope:     (cold - stable) / (most - threshold),
	}
}

// storedCost returns the area under the curve from stored down to stored − spend, in microseconds.
func (k *curve) storedCost(stored, spend float64) float64 {
	micros := 0.0
	if above := stored - k.threshold; above > 0 {
		slow := min(above, spend)
		length := (k.interval + float64(above*k.slope)) + (k.interval + float64((above-slow)*k.slope))
		micros = float64(slow*length) / 2
		spend -= slow
	}
	return micros + float64(k.interval*spend)
}
