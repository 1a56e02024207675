package gateway

import (
	"context"
	"math"
	"time"

	prom "github.com/prometheus/client_golang/prometheus"
)

// collector tells, when it is asked, how the gateway is.
type collector struct {
	*admin
	descs map[string]*prom.Desc
}

// about is every metric of a collector: its help, and its labels.
var about = map[string][]string{
	"calls_total":                        {"Calls that came in."},
	"calls_in_flight":                    {"Calls that have not been answered yet."},
	"refused_total":                      {"Calls that were refused."},
	"failed_total":                       {"Calls that the limiter could not decide about."},
	"bad_bodies_total":                   {"Calls whose body the client did not send as it should, or not in time."},
	"loads_total":                        {"Times that the limits were read, by result: good or failed.", "result"},
	"limits":                             {"Limits in force."},
	"limits_age_seconds":                 {"Time since the limits were read."},
	"limits_held":                        {"Limits in force though their rows are gone: more than half of the table is."},
	"limits_in_shadow":                   {"Limits that count, and refuse nothing."},
	"limit_keys":                         {"Keys that have a bucket of their own by their row, as far as they are in use."},
	"bad_rows":                           {"Rows that were rejected."},
	"bad_names":                          {"Names whose rows never were good: --bad-rows decides about their calls."},
	"switch_on":                          {"1 while calls are limited, 0 while the switch is off and every call passes."},
	"switch_age_seconds":                 {"Time since the switch was read."},
	"redis_up":                           {"1 while Redis answers a PING every second."},
	"draining":                           {"1 while the gateway drains."},
	"console_failed_sign_ins_total":      {"Requests to the console with a name or a token that is not known."},
	"limit_rate":                         {"Permits per second in force, of buckets that are in use.", "bucket"},
	"limit_max_permits":                  {"Permits that a bucket can save up.", "bucket"},
	"limit_stored_permits":               {"Permits that a bucket has saved up.", "bucket"},
	"limit_window_used":                  {"Calls that count in a limit's window, of the whole fleet.", "bucket"},
	"limit_window_limit":                 {"Calls that may begin in any such window.", "bucket"},
	"limit_concurrent_used":              {"Calls of a limit that are under way, of the whole fleet.", "bucket"},
	"limit_concurrent_used_here":         {"Calls of a limit that are under way in this gateway.", "bucket"},
	"limit_concurrent_limit":             {"Calls of a limit that may be under way.", "bucket"},
	"limit_held_until_timestamp_seconds": {"Until when a Retry-After of an upstream holds a bucket back; 0: it does not.", "bucket"},
}

func newCollector(a *admin) *collector {
	c := &collector{a, map[string]*prom.Desc{}}
	for name, d := range about {
		c.descs[name] = prom.NewDesc("tokenbucket_gateway_"+name, d[0], d[1:], nil)
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(to chan<- *prom.Desc) {
	for _, d := range c.descs {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(to chan<- prom.Metric) {
	tell := func(kind prom.ValueType, name string, value float64, labels ...string) {
		to <- prom.MustNewConstMetric(c.descs[name], kind, value, labels...)
	}
	gauge := func(name string, value float64, labels ...string) { tell(prom.GaugeValue, name, value, labels...) }
	count := func(name string, value float64, labels ...string) { tell(prom.CounterValue, name, value, labels...) }
	calls := &c.proxy.calls
	count("calls_total", float64(calls.received.Load()))
	gauge("calls_in_flight", float64(calls.inFlight.Load()))
	count("refused_total", float64(calls.refused.Load()))
	count("failed_total", float64(calls.failed.Load()))
	count("bad_bodies_total", float64(calls.badBodies.Load()))
	gauge("draining", number(c.draining.Load()))
	if console := c.console.Load(); console != nil {
		count("console_failed_sign_ins_total", float64(console.FailedSignIns()))
	}
	if c.pulse != nil {
		gauge("redis_up", number(c.pulse.check(c.config.storeTimeout) == nil))
	}
	if sw := c.sw.Load(); sw != nil {
		gauge("switch_on", number(sw.Enabled()))
		gauge("switch_age_seconds", sw.Age().Seconds())
	}
	limits := c.proxy.metrics.limits.Load()
	if limits == nil {
		return
	}
	s := limits.Stats()
	count("loads_total", float64(s.Loads-s.Failures), "good")
	count("loads_total", float64(s.Failures), "failed")
	gauge("limits", float64(s.Limits))
	gauge("limits_age_seconds", s.Age.Seconds())
	gauge("limits_held", float64(s.Held))
	gauge("limits_in_shadow", float64(inShadow(&s)))
	gauge("limit_keys", float64(s.Keys))
	gauge("bad_rows", float64(len(s.Rejected)))
	gauge("bad_names", float64(s.Bad))
	c.inUse(gauge)
}

// inUse tells of the limits that are in use.
func (c *collector) inUse(gauge func(name string, value float64, labels ...string)) {
	for name, v := range c.proxy.metrics.views(context.Background()) {
		if v.rate > 0 {
			gauge("limit_rate", v.rate, name)
			gauge("limit_max_permits", v.maxPermits, name)
			gauge("limit_stored_permits", v.stored, name)
		}
		gauge("limit_held_until_timestamp_seconds", v.until(), name)
	}
	for name, u := range c.proxy.metrics.usages(context.Background(), math.MaxInt) {
		if u.Window != 0 {
			gauge("limit_window_used", float64(u.WindowUsed), name)
			gauge("limit_window_limit", float64(u.WindowLimit), name)
		}
		if u.Concurrent != 0 {
			gauge("limit_concurrent_used", float64(u.Places), name)
			gauge("limit_concurrent_used_here", float64(u.Inside), name)
			gauge("limit_concurrent_limit", float64(u.Concurrent), name)
		}
	}
}

// until is when the penalty ends, in seconds since 1970; 0 if there is none.
func (v *view) until() float64 {
	if v.held.Before(time.Now()) {
		return 0
	}
	return float64(v.held.UnixMicro()) / 1e6
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
