package tokenbucket

import (
	"fmt"
	"time"
)

// Limit is one balance of [NewLimits]: a number of permits for each window of time.
type Limit struct {
	permits float64
	window  time.Duration
	burst   *float64
}

// PerSecond is a limit of n permits a second.
func PerSecond(n float64) Limit { return Per(n, time.Second) }

// PerMinute is a limit of n permits a minute.
func PerMinute(n float64) Limit { return Per(n, time.Minute) }

// PerHour is a limit of n permits an hour.
func PerHour(n float64) Limit { return Per(n, time.Hour) }

// PerDay is a limit of n permits in 24 hours.
func PerDay(n float64) Limit { return Per(n, 24*time.Hour) }

// Per is a limit of n permits in a window. They fall due at the rate n / window, and a full bucket holds one second's worth of them, at least 1. So the
// permits of any window are at most those plus n. [Limit.Burst] sets another size.
func Per(n float64, window time.Duration) Limit { return Limit{permits: n, window: window} }

// Burst returns the limit with a bucket that holds n permits, which may be used at once after a pause ([WithMaxPermits]).
func (l Limit) Burst(n float64) Limit {
	l.burst = &n
	return l
}

// name returns the name of the balance, by its window.
func (l Limit) name() string {
	switch l.window {
	case time.Second:
		return "second"
	case time.Minute:
		return "minute"
	case time.Hour:
		return "hour"
	case 24 * time.Hour:
		return "day"
	}
	return l.window.String()
}

// LimitsOption is a [Limit] or an [Option], for [NewLimits].
type LimitsOption interface{ limits(*limits) }

// limits are the arguments of NewLimits.
type limits struct {
	limits []Limit
	opts   []Option
}

func (l Limit) limits(all *limits) { all.limits = append(all.limits, l) }

func (o Option) limits(all *limits) { all.opts = append(all.opts, o) }

// NewLimits returns a group of several limits of one name, which a call must all pass:
//
//	limits, err := tokenbucket.NewLimits("fares", tokenbucket.PerSecond(5), tokenbucket.PerDay(10_000).Burst(2000),
//		tokenbucket.WithStore(store), tokenbucket.WithInitialPermitsUpTo(2000))
//
// Beside a limit of a second, that of a longer window needs a [Limit.Burst]. Otherwise it alone decides: the permits of 10,000 a day fall due one in 8.6 s, and
// the bucket holds one. [WithInitialPermitsUpTo] lets new buckets begin full.
//
// Each limit has a bucket of its own, by [NewSmoothBursty]: fares/second, fares/minute, fares/day, and for another window fares/ and its duration. All of
// them are in the slot of the name ([WithSlot]), so they are decided on in one step, on a cluster too. The options are for all of them; no window may
// occur twice. Errors match [ErrInvalidConfig].
func NewLimits(name string, limitsAndOptions ...LimitsOption) (*Group, error) {
	var all limits
	for _, o := range limitsAndOptions {
		if isNil(o) {
			return nil, invalid(name, wanted("option", "nil", "no nil options"))
		}
		o.limits(&all)
	}
	store := NewMemoryStore()
	var members []Member
	for _, l := range all.limits {
		if l.window <= 0 {
			return nil, invalid(name, wanted("window", l.window, "a positive duration"))
		}
		opts := append([]Option{WithStore(store), WithSlot(name)}, all.opts...)
		if l.burst != nil {
			opts = append(opts, WithMaxPermits(*l.burst))
		}
		limiter, err := NewSmoothBursty(fmt.Sprintf("%s/%s", name, l.name()), l.permits/l.window.Seconds(), opts...)
		if err != nil {
			return nil, err
		}
		members = append(members, limiter)
	}
	if len(members) == 0 {
		return nil, invalid(name, wanted("limits", 0, "at least one"))
	}
	return All(members...)
}
