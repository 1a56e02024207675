package gateway

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/cmd/internal/condition"
	tbprometheus "github.com/go-tokenbucket/tokenbucket/contrib/prometheus"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// statistics and its parts are the JSON of /stats. Durations are in seconds. The settings of a row have their names in files and tables.
type (
	statistics struct {
		UptimeSeconds float64      `json:"uptime_seconds"`
		Draining      bool         `json:"draining"`
		Calls         callCounts   `json:"calls"`
		Loads         *loadCounts  `json:"loads,omitempty"`
		Switch        *switchState `json:"switch,omitempty"`
		Redis         string       `json:"redis,omitempty"`
		States        []partState  `json:"states"`
		CallsAre      string       `json:"calls_are"` // limited, shared, failed or unlimited
		Limits        []limit      `json:"limits"`
		Others        *counts      `json:"others,omitempty"`
		Rejected      []badRow     `json:"rejected"`
	}
	// partState is the state of Redis, of the switch or of the rows.
	partState struct {
		Part  string    `json:"part"`
		State string    `json:"state"`
		Calls string    `json:"calls"`
		Says  string    `json:"says"`
		Why   string    `json:"why,omitempty"`
		Since time.Time `json:"since,omitzero"`
	}
	callCounts struct {
		Received       int64 `json:"received"`
		InFlight       int64 `json:"in_flight"`
		Refused        int64 `json:"refused"`
		Failed         int64 `json:"failed"`
		UpstreamErrors int64 `json:"upstream_errors"`
	}
	loadCounts struct {
		Tried      int     `json:"tried"`
		Failed     int     `json:"failed"`
		AgeSeconds float64 `json:"age_seconds"`
		BadNames   int     `json:"bad_names"`
		Held       int     `json:"held"`
		Shadow     int     `json:"shadow,omitempty"` // limits in shadow
		AllShadow  bool    `json:"all_shadow,omitempty"`
		Keys       int     `json:"keys,omitempty"` // keys with a bucket of their own
		Error      string  `json:"error,omitempty"`
		Loss       *loss   `json:"loss,omitempty"`
	}
	// loss describes limits that the table has lost, until the loss is confirmed or the rows are back.
	loss struct {
		Since  time.Time `json:"since"`
		Before int       `json:"before"`
		Gone   int       `json:"gone"`
		Held   bool      `json:"held"` // the limits are still in force
		Names  []string  `json:"names"`
	}
	badRow struct {
		Row         string `json:"row"`
		Name        string `json:"name"`
		Error       string `json:"error"`
		Consequence string `json:"consequence"`
	}
	switchState struct {
		On         bool    `json:"on"`
		OffSeconds float64 `json:"off_seconds,omitempty"`
		Origin     string  `json:"origin,omitempty"`
		AgeSeconds float64 `json:"age_seconds"`
		Error      string  `json:"error,omitempty"`
	}
	limit struct {
		*counts
		Name       string   `json:"name"`
		Row        string   `json:"row"`
		Disabled   bool     `json:"disabled,omitempty"`
		Shadow     bool     `json:"shadow,omitempty"`
		PerKey     bool     `json:"per_key,omitempty"`
		Penalty    string   `json:"penalty,omitempty"`
		Rate       float64  `json:"rate"`
		Quota      bool     `json:"quota,omitempty"`
		Jitter     float64  `json:"jitter,omitempty"`
		Burst      *float64 `json:"burst,omitempty"`
		Warmup     float64  `json:"warmup,omitempty"`
		ColdFactor float64  `json:"cold_factor,omitempty"`
		MaxWait    float64  `json:"max_wait"`
		Priority   string   `json:"priority,omitempty"`
		Version    int64    `json:"version"`
		boundsOf
	}
	// counts are the calls of a limit, by result. Granted, Refused, Failed, WouldRefuse and Bypassed add up to all of its calls.
	counts struct {
		Granted       float64 `json:"granted"` // by the rate, the window or the concurrency
		Refused       float64 `json:"refused"` // refused_by has the reasons
		Failed        float64 `json:"failed"`
		WouldRefuse   float64 `json:"would_refuse,omitempty"` // passed, in shadow only
		Bypassed      float64 `json:"bypassed,omitempty"`     // passed without a limit: by the switch, a disabled row or no row
		WaitedSeconds float64 `json:"waited_seconds"`
		Penalties     float64 `json:"penalties,omitempty"`
		*inForce
		HeldUntil *time.Time `json:"held_until,omitempty"`
		// Priorities has the calls that the rate has decided, by priority. It is empty unless some are below normal.
		Priorities map[string]*priorityCounts `json:"priorities,omitempty"`
	}
	// priorityCounts are the calls of one priority. Granted includes those that the window or the concurrency has refused afterwards.
	priorityCounts struct {
		Granted       float64 `json:"granted"`
		Refused       float64 `json:"refused"`
		Failed        float64 `json:"failed"`
		WouldRefuse   float64 `json:"would_refuse,omitempty"`
		Bypassed      float64 `json:"bypassed,omitempty"`
		WaitedSeconds float64 `json:"waited_seconds"`
		Waiting       int     `json:"waiting"`
	}
	// inForce is the state of a bucket in use.
	inForce struct {
		Rate          float64 `json:"rate_in_force"`
		StoredPermits float64 `json:"stored_permits"`
	}
)

func (a *admin) stats(w http.ResponseWriter, r *http.Request) {
	c := &a.proxy.calls
	s := statistics{
		UptimeSeconds: time.Since(a.began).Seconds(),
		Draining:      a.draining.Load(),
		Calls: callCounts{
			c.received.Load(), c.inFlight.Load(), c.refused.Load(), c.failed.Load(), c.upstreamErrors.Load(),
		},
		Limits: []limit{}, Rejected: []badRow{},
	}
	if limits := a.proxy.metrics.limits.Load(); limits != nil {
		stats := limits.Stats()
		s.Loads = &loadCounts{stats.Loads, stats.Failures, stats.Age.Seconds(), stats.Bad, stats.Held, len(stats.Shadow), stats.AllShadow, stats.Keys, message(stats.Err), lossOf(&stats.Loss)}
		for i := range stats.Rejected {
			e := &stats.Rejected[i]
			s.Rejected = append(s.Rejected, badRow{e.Row, e.Name, e.Error(), e.Consequence})
		}
		counted := a.proxy.metrics.counts(r.Context())
		s.Others = counted[tbprometheus.Other]
		bounds := a.proxy.metrics.boundsOf(r.Context())
		for _, l := range limits.Limits() {
			s.Limits = append(s.Limits, limit{
				counted[telemetry.Named(l.Name)], l.Name, l.Row, l.Disabled, l.Shadow || stats.AllShadow, l.PerKey, l.Penalty.String(), l.Rate, l.Quota, l.Jitter.Seconds(), l.Burst, l.Warmup.Seconds(), l.ColdFactor, l.MaxWait.Seconds(), priorityOf(&l), l.Version, bounds(&l),
			})
		}
	}
	if sw := a.sw.Load(); sw != nil {
		s.Switch = &switchState{On: sw.Enabled(), AgeSeconds: sw.Age().Seconds(), Error: message(sw.Err()), Origin: sw.Origin()}
		if limits := a.proxy.metrics.limits.Load(); limits != nil {
			if stats := limits.Stats(); !stats.Off.IsZero() {
				s.Switch.OffSeconds, s.Switch.Origin = time.Since(stats.Off).Seconds(), stats.Origin
			}
		}
	}
	all := a.conditions()
	s.CallsAre = condition.Effect(all).String()
	for i := range all {
		c := &all[i]
		if c.Part == condition.Redis {
			s.Redis = cmp.Or(c.Why, c.State)
		}
		s.States = append(s.States, partState{string(c.Part), c.State, c.Calls.String(), c.Says, c.Why, c.Since})
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(s) // the client may have gone
}

// priorityOf returns the priority of a row; empty if it is normal.
func priorityOf(l *registry.Limit) string {
	if l.Priority == tokenbucket.Normal {
		return ""
	}
	return l.Priority.String()
}

func lossOf(l *registry.Loss) *loss {
	if l.Since.IsZero() {
		return nil
	}
	return &loss{l.Since, l.Before, l.Gone, l.Held, l.Names}
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// counts returns the counts of each limit, by label, from the metrics.
func (m *metrics) counts(ctx context.Context) map[string]*counts {
	all := map[string]*counts{}
	families, _ := m.calls.Gather() // on an error, the families that could be gathered
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			bucket, outcome, by, priority, shadow := "", "", "", "", false
			for _, l := range metric.GetLabel() {
				switch l.GetName() {
				case "bucket":
					bucket = l.GetValue()
				case "outcome", "result":
					outcome = l.GetValue()
				case "shadow":
					shadow = l.GetValue() == "true"
				case "by":
					by = l.GetValue()
				case "priority":
					priority = l.GetValue()
				}
			}
			if bucket == "" {
				continue
			}
			if all[bucket] == nil {
				all[bucket] = new(counts)
			}
			all[bucket].add(family.GetName(), outcome, by, shadow, metric)
			all[bucket].prioritized(priority).add(family.GetName(), outcome, by, shadow, metric)
		}
	}
	for _, c := range all {
		c.WouldRefuse = min(c.WouldRefuse, c.Granted) // a shadow's refusal is counted before its call
		c.Granted -= c.WouldRefuse
		if normal := tokenbucket.Normal.String(); len(c.Priorities) == 1 && c.Priorities[normal] != nil {
			c.Priorities = nil
		}
	}
	m.waiting(all)
	for row, v := range m.views(ctx) {
		name := telemetry.Named(row)
		if all[name] == nil {
			all[name] = new(counts)
		}
		if v.rate > 0 {
			all[name].inForce = &inForce{Rate: v.rate, StoredPermits: v.stored}
		}
		if v.until() > 0 {
			all[name].HeldUntil = &v.held
		}
	}
	return all
}

// waiting adds the waiters of each priority.
func (m *metrics) waiting(all map[string]*counts) {
	limits := m.limits.Load()
	if limits == nil {
		return
	}
	for row, l := range limits.Limiters() {
		if c := all[telemetry.Named(row)]; c != nil && m.hasSeries(row) {
			for name, of := range c.Priorities {
				p, _ := tokenbucket.ParsePriority(name)
				of.Waiting, _ = l.ForPriority(p).Waiting()
			}
		}
	}
}

// prioritized returns the counts of a priority, by the value of its label.
func (c *counts) prioritized(label string) *priorityCounts {
	if c.Priorities == nil {
		c.Priorities = map[string]*priorityCounts{}
	}
	name := cmp.Or(label, tokenbucket.Normal.String())
	if c.Priorities[name] == nil {
		c.Priorities[name] = new(priorityCounts)
	}
	return c.Priorities[name]
}

// add adds a metric.
func (c *priorityCounts) add(family, outcome, by string, shadow bool, metric *dto.Metric) {
	n := metric.GetCounter().GetValue()
	switch {
	case family == "tokenbucket_wait_duration_seconds" && !shadow:
		c.WaitedSeconds += metric.GetHistogram().GetSampleSum()
	case family != "tokenbucket_decisions_total":
	case by == tokenbucket.BySwitch.String() || shadow && outcome == "failed":
		c.Bypassed += n
	case shadow && outcome == "refused":
		c.WouldRefuse += n
	case outcome == "refused":
		c.Refused += n
	case outcome == "failed":
		c.Failed += n
	default:
		c.Granted += n
	}
}

// add adds a metric. Calls that a shadow would have refused also count as granted; counts subtracts them.
func (c *counts) add(family, outcome, by string, shadow bool, metric *dto.Metric) {
	switch n := metric.GetCounter().GetValue(); family {
	case "tokenbucket_gateway_admissions_total":
		switch {
		case outcome == refusedCall:
			c.Refused += n
		case outcome == failedCall:
			c.Failed += n
		case outcome == cancelledCall: // its client left while it waited
		case slices.Contains([]string{"switch", "disabled", "bad_row", "unknown"}, by):
			c.Bypassed += n
		default:
			c.Granted += n
		}
	case "tokenbucket_decisions_total":
		if shadow && outcome == "refused" {
			c.WouldRefuse += n
		}
	case "tokenbucket_gateway_bypassed_total":
		if by == "shadow" {
			c.WouldRefuse += n
		}
	case "tokenbucket_wait_duration_seconds":
		if !shadow { // no call waits in shadow
			c.WaitedSeconds += metric.GetHistogram().GetSampleSum()
		}
	case "tokenbucket_gateway_penalties_total":
		c.Penalties += n
	}
}
