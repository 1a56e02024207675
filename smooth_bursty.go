package tokenbucket

// burstyCurve: stored permits are free, and an idle bucket earns them at the rate at which it hands them out.
//
//	stored
//	  max ┤      ┌────────────      slope 1/interval while nobody asks
//	      │    ╱
//	    0 ┼──╱────────────────▶ time
func burstyCurve(c *config) curve {
	interval := microsPerSecond / c.Rate
	return curve{interval: interval, max: max(c.Floor, c.Size)}
}
