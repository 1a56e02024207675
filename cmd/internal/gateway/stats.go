package gateway

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	dto "github.com/prometheus/client_model/go"

	tbprometheus "github.com/go-tokenbucket/tokenbucket/contrib/prometheus"
)

// Statistics in JSON. Durations are in seconds.
type (
	statistics struct {
		UptimeSeconds float64      `json:"uptime_seconds"`
		Draining      bool         `json:"draining"`
		Calls         callCounts   `json:"calls"`
		Loads         *loadCounts  `json:"loads,omitempty"`
		Switch        *switchState `json:"switch,omitempty"`
		Redis         string       `json:"redis,omitempty"`
		Limits        []limit      `json:"limits"`
		Others        *counts      `json:"others,omitempty"`
		Rejected      []badRow     `json:"rejected"`
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
		Shadow     int     `json:"shadow,omitempty"` // limits that refuse nothing
		AllShadow  bool    `json:"all_shadow,omitempty"`
		Keys       int     `json:"keys,omitempty"` // with a bucket of their own
		Error      string  `json:"error,omitempty"`
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
		Name          string   `json:"name"`
		Row           string   `json:"row"`
		Disabled      bool     `json:"disabled,omitempty"`
		Shadow        bool     `json:"shadow,omitempty"`
		PerKey        bool     `json:"per_key,omitempty"`
		Rate          float64  `json:"rate"`
		Quota         bool     `json:"quota,omitempty"`
		JitterSeconds float64  `json:"jitter_seconds,omitempty"`
		MaxPermits    *float64 `json:"max_permits,omitempty"`
		WarmupSeconds float64  `json:"warmup_seconds,omitempty"`
		ColdFactor    float64  `json:"cold_factor,omitempty"`
		Cache         float64  `json:"cache"`
		Version       int64    `json:"version"`
		boundsOf
	}
	// counts are what calls of a limit came to, as /metrics has it.
	counts struct {
		Granted       float64 `json:"granted"`
		Refused       float64 `json:"refused"`
		Failed        float64 `json:"failed"`
		WouldRefuse   float64 `json:"would_refuse,omitempty"` // in shadow: they passed
		Bypassed      float64 `json:"bypassed,omitempty"`     // passed or were refused without a bucket
		WaitedSeconds float64 `json:"waited_seconds"`
		Penalties     float64 `json:"penalties,omitempty"`
		*inForce
		HeldUntil *time.Time `json:"held_until,omitempty"`
	}
	// inForce is what a bucket in use looks like.
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
		s.Loads = &loadCounts{stats.Loads, stats.Failures, stats.Age.Seconds(), stats.Bad, stats.Held, len(stats.Shadow), stats.AllShadow, stats.Keys, message(stats.Err)}
		for i := range stats.Rejected {
			e := &stats.Rejected[i]
			s.Rejected = append(s.Rejected, badRow{e.Row, e.Name, e.Error(), e.Consequence})
		}
		counted := a.proxy.metrics.counts(r.Context())
		s.Others = counted[tbprometheus.Other]
		bounds := a.proxy.metrics.boundsOf(r.Context())
		for _, l := range limits.Limits() {
			s.Limits = append(s.Limits, limit{
				counted[l.Name], l.Name, l.Row, l.Disabled, l.Shadow || stats.AllShadow, l.PerKey, l.Rate, l.Quota, l.Jitter.Seconds(), l.MaxPermits, l.Warmup.Seconds(), l.ColdFactor, l.Cache, l.Version, bounds(&l),
			})
		}
	}
	if sw := a.sw.Load(); sw != nil {
		s.Switch = &switchState{On: sw.Enabled(), AgeSeconds: sw.Age().Seconds(), Error: message(sw.Err()), Origin: sw.Origin()}
		if limits := a.proxy.metrics.limits.Load(); limits != nil {
			if off := limits.Stats().Off; !off.IsZero() {
				s.Switch.OffSeconds = time.Since(off).Seconds()
			}
		}
	}
	if a.pulse != nil {
		s.Redis = "ok"
		if err := a.pulse.check(a.config.storeTimeout); err != nil {
			s.Redis = err.Error()
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(s) // the client may have gone
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// counts are what the metrics say of each limit.
func (m *metrics) counts(ctx context.Context) map[string]*counts {
	all := map[string]*counts{}
	families, _ := m.calls.Gather() // what could be gathered
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			bucket, outcome, shadow := "", "", false
			for _, l := range metric.GetLabel() {
				switch l.GetName() {
				case "bucket":
					bucket = l.GetValue()
				case "outcome":
					outcome = l.GetValue()
				case "shadow":
					shadow = l.GetValue() == "true"
				case "by":
					shadow = shadow || l.GetValue() == "shadow"
				}
			}
			if bucket == "" {
				continue
			}
			if all[bucket] == nil {
				all[bucket] = new(counts)
			}
			all[bucket].add(family.GetName(), outcome, shadow, metric)
		}
	}
	for name, v := range m.views(ctx) {
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

func (c *counts) add(family, outcome string, shadow bool, metric *dto.Metric) {
	switch n := metric.GetCounter().GetValue(); family {
	case "tokenbucket_decisions_total":
		switch {
		case outcome == "granted":
			c.Granted += n
		case outcome == "refused" && shadow:
			c.WouldRefuse += n
		case outcome == "refused":
			c.Refused += n
		default:
			c.Failed += n
		}
	case "tokenbucket_wait_duration_seconds":
		if !shadow { // nobody waited
			c.WaitedSeconds += metric.GetHistogram().GetSampleSum()
		}
	case "tokenbucket_gateway_bypassed_total":
		if c.Bypassed += n; shadow {
			c.WouldRefuse += n
		}
	case "tokenbucket_gateway_penalties_total":
		c.Penalties += n
	}
}
