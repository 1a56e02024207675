package tokenbucket

// burstyCurve returns the curve of a bursty bucket: stored permits are free, and an idle bucket earns them at its rate.
//
//	stored
//	  max ┤      ┌────────────      slope 1/interval while the bucket is idle
//	      │    ╱
//	    0 ┼──╱────────────────▶ time
func burstyCurve(c *config) curve {
	interval := microsPerSecond / c.Rate
	return curve{interval: interval, max: max(c.Floor, c.Size)}
}
