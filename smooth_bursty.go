package tokenbucket

// NewSmoothBursty returns a limiter that hands out permitsPerSecond permits a second, and after a pause at most
// max permits at once ([WithMaxPermits]; default one second's worth, at least 1). By default a caller waits for its own
// permits ([PayNow]), and a bucket that nobody has used yet holds one permit ([WithInitialPermits]).
//
// All limiters of one name on one store share one bucket. permitsPerSecond is a number from 1e-9, a permit in 32 years, to
// 2^53. Errors match [ErrInvalidConfig] and name the field and the value; no store is asked.
func NewSmoothBursty(name string, permitsPerSecond float64, opts ...Option) (*RateLimiter, error) {
	return newLimiter(name, config{Kind: bursty, Payment: PayNow, Rate: permitsPerSecond}, opts)
}

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
