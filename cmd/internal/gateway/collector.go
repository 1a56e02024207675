package gateway

import (
	"context"
	"math"
	"time"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/go-tokenbucket/tokenbucket/cmd/internal/condition"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// collector reads the gateway's state at each scrape.
type collector struct {
	*admin
	descs map[string]*prom.Desc
}

// about maps each metric of a collector to its help and its labels.
var about = map[string][]string{
	"calls_total":                        {"Calls received."},
	"calls_in_flight":                    {"Calls in flight."},
	"refused_total":                      {"Calls refused."},
	"failed_total":                       {"Calls that the limiter could not decide about."},
	"bad_bodies_total":                   {"Calls whose request body was malformed or late."},
	"bad_targets_total":                  {"Calls answered with 400 because of their target, or of a header field that names their limit."},
	"slow_clients_total":                 {"Calls that ended because the client read the response too slowly."},
	"loads_total":                        {"Loads of the limits, by result: good or failed.", "result"},
	"limits":                             {"Limits in force."},
	"limits_age_seconds":                 {"Time since the limits were loaded."},
	"limits_held":                        {"Limits that stay in force although their rows are gone, because the table has lost more than half of its rows."},
	"limits_lost":                        {"Limits that the table has lost, if it has lost more than half of them, until the loss is confirmed or the rows are back; otherwise 0."},
	"limits_before_loss":                 {"Limits that the table had before it lost more than half of them, until the loss is confirmed or the rows are back; otherwise 0."},
	"limits_in_shadow":                   {"Limits in shadow: they count calls and refuse none."},
	"limit_keys":                         {"Keys in use that have a bucket of their own (rows with per_key)."},
	"keys_shared_total":                  {"Calls whose keys shared a bucket because their row had reached --max-keys within the hour."},
	"bad_rows":                           {"Rows rejected by the last load."},
	"unmatched_rows":                     {"Rows in force that match no call."},
	"bad_names":                          {"Names whose rows were never valid: --bad-rows decides about their calls."},
	"faults":                             {"Buckets, windows and concurrencies that need a repair: calls of their limits fail."},
	"faulty_calls_total":                 {"Calls that failed because their bucket, window or concurrency needs a repair."},
	"switch_on":                          {"1 while calls are limited, 0 while the switch is off and every call passes."},
	"switch_age_seconds":                 {"Time since the switch was last read."},
	"redis_up":                           {"1 while Redis serves a write every second. It is 0 if Redis does not reply, is full or read-only."},
	"state":                              {"1 for the present state of each part: redis, switch, rows.", "part", "state"},
	"calls_state":                        {"1 for what happens to calls now: limited, shared (local shares), failed, unlimited.", "state"},
	"draining":                           {"1 while the gateway drains."},
	"console_failed_sign_ins_total":      {"Requests to the console with an unknown name or token."},
	"limit_rate":                         {"Permits per second in force, of buckets that are in use.", "bucket"},
	"limit_max_permits":                  {"Permits that a bucket can store.", "bucket"},
	"limit_max_wait_seconds":             {"How long a call may wait for its permit, by the row.", "bucket"},
	"limit_stored_permits":               {"Permits stored in a bucket.", "bucket"},
	"limit_window_used":                  {"Calls counted in a limit's window, in the whole fleet.", "bucket"},
	"limit_window_limit":                 {"Calls that a limit's window allows.", "bucket"},
	"limit_concurrent_used":              {"Calls of a limit in flight, in the whole fleet.", "bucket"},
	"limit_concurrent_used_here":         {"Calls of a limit in flight in this gateway.", "bucket"},
	"limit_concurrent_limit":             {"Calls of a limit that may be in flight at once.", "bucket"},
	"limit_held_until_timestamp_seconds": {"When the penalty of a bucket, from an upstream's Retry-After, ends; 0 without one.", "bucket"},
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
	send := func(kind prom.ValueType, name string, value float64, labels ...string) {
		to <- prom.MustNewConstMetric(c.descs[name], kind, value, labels...)
	}
	gauge := func(name string, value float64, labels ...string) { send(prom.GaugeValue, name, value, labels...) }
	count := func(name string, value float64, labels ...string) { send(prom.CounterValue, name, value, labels...) }
	calls := &c.proxy.calls
	count("calls_total", float64(calls.received.Load()))
	gauge("calls_in_flight", float64(calls.inFlight.Load()))
	count("refused_total", float64(calls.refused.Load()))
	count("failed_total", float64(calls.failed.Load()))
	count("bad_bodies_total", float64(calls.badBodies.Load()))
	count("bad_targets_total", float64(calls.badTargets.Load()))
	count("slow_clients_total", float64(calls.slowClients.Load()))
	gauge("draining", number(c.draining.Load()))
	if console := c.console.Load(); console != nil {
		count("console_failed_sign_ins_total", float64(console.FailedSignIns()))
	}
	all := c.conditions()
	for i := range all {
		part := all[i].Part
		for _, state := range condition.States[part] {
			gauge("state", number(state == all[i].State), string(part), state)
		}
		if part == condition.Redis {
			gauge("redis_up", number(all[i].State == condition.OK || all[i].State == condition.Slow))
		}
	}
	for _, calls := range condition.AllCalls() {
		gauge("calls_state", number(calls == condition.Effect(all)), calls.String())
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
	gauge("limits_lost", float64(s.Loss.Gone))
	gauge("limits_before_loss", float64(s.Loss.Before))
	gauge("limits_in_shadow", float64(inShadow(&s)))
	gauge("limit_keys", float64(s.Keys))
	count("keys_shared_total", float64(s.Shared))
	gauge("bad_rows", float64(len(s.Rejected)))
	gauge("bad_names", float64(s.Bad))
	gauge("unmatched_rows", float64(len(s.Unmatched)))
	count("faulty_calls_total", float64(s.Faulty))
	gauge("faults", float64(len(s.Faults)))
	c.inUse(gauge)
}

// inUse sends the metrics of the limits in use.
func (c *collector) inUse(gauge func(name string, value float64, labels ...string)) {
	for row, v := range c.proxy.metrics.views(context.Background()) {
		name := telemetry.Named(row)
		if v.rate > 0 {
			gauge("limit_rate", v.rate, name)
			gauge("limit_max_permits", v.maxPermits, name)
			gauge("limit_stored_permits", v.stored, name)
			gauge("limit_max_wait_seconds", v.wait.Seconds(), name)
		}
		gauge("limit_held_until_timestamp_seconds", v.until(), name)
	}
	for row, u := range c.proxy.metrics.usages(context.Background(), math.MaxInt) {
		name := telemetry.Named(row)
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

// until returns when the penalty ends, in Unix seconds, or 0 without a penalty.
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
