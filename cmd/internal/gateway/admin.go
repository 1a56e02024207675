package gateway

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// admin answers what operators and their load balancers ask.
type admin struct {
	config   *config
	began    time.Time
	proxy    *proxy
	pulse    *pulse // nil: Redis is not used
	limits   atomic.Pointer[registry.Registry]
	sw       atomic.Pointer[registry.PolledSwitch]
	draining atomic.Bool
}

func (a *admin) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", a.ready)
	mux.HandleFunc("GET /stats", a.stats)
	return mux
}

// ready tells, a line each, what a gateway needs, and whether it is there.
func (a *admin) ready(w http.ResponseWriter, _ *http.Request) {
	status := http.StatusOK
	var text strings.Builder
	line := func(ok bool, format string, args ...any) {
		if !ok {
			status = http.StatusServiceUnavailable
		}
		fmt.Fprintf(&text, format+"\n", args...)
	}
	if a.draining.Load() {
		line(false, "draining")
	}
	if limits := a.limits.Load(); limits == nil {
		line(false, "limits: not loaded yet")
	} else {
		stats, most := limits.Stats(), a.config.maxAge
		line(most == 0 || stats.Age <= most, "limits: loaded %v ago", stats.Age.Round(time.Millisecond))
		if !stats.Off.IsZero() {
			line(true, "switch: off for %v%s: every call passes", time.Since(stats.Off).Round(time.Second), after(", ", stats.Origin))
		}
		if stats.Limits+stats.Bad == 0 {
			line(true, "limits: none: every call has what --unknown says")
		}
		if stats.Held > 0 {
			line(true, "limits: %d are in force though their rows are gone, until further loads agree", stats.Held)
		}
		for i := range stats.Rejected {
			if i == mostLines {
				line(true, "bad rows: %d more, see /stats", len(stats.Rejected)-i)
				break
			}
			line(true, "bad row: %v; %s", &stats.Rejected[i], stats.Rejected[i].Consequence)
		}
	}
	if a.pulse != nil {
		err := a.pulse.check(a.config.storeTimeout)
		outage := err != nil && slices.Contains([]telemetry.Kind{telemetry.Timeout, telemetry.Unavailable}, telemetry.KindOf(err))
		switch { // a policy makes the gateway of use all the same, and the rest of the fleet is no better off
		case err == nil:
			line(true, "redis: ok")
		case outage && a.config.policy == tokenbucket.FailOpen:
			line(true, "redis: %v; calls pass without limits", err)
		case outage && a.config.policy != tokenbucket.FailClosed:
			line(true, "redis: %v; calls share this gateway's part of the limits", err)
		default:
			line(false, "redis: %v", err)
		}
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	fmt.Fprint(w, text.String())
}

// after puts something before a text that is not empty.
func after(before, text string) string {
	if text == "" {
		return ""
	}
	return before + text
}

// mostLines bounds what /readyz says of bad rows.
const mostLines = 20

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
		Name          string   `json:"name"`
		Row           string   `json:"row"`
		Disabled      bool     `json:"disabled,omitempty"`
		Rate          float64  `json:"rate"`
		Quota         bool     `json:"quota,omitempty"`
		JitterSeconds float64  `json:"jitter_seconds,omitempty"`
		MaxPermits    *float64 `json:"max_permits,omitempty"`
		WarmupSeconds float64  `json:"warmup_seconds,omitempty"`
		ColdFactor    float64  `json:"cold_factor,omitempty"`
		Cache         float64  `json:"cache"`
		Version       int64    `json:"version"`
	}
)

func (a *admin) stats(w http.ResponseWriter, _ *http.Request) {
	c := &a.proxy.calls
	s := statistics{
		UptimeSeconds: time.Since(a.began).Seconds(),
		Draining:      a.draining.Load(),
		Calls: callCounts{
			c.received.Load(), c.inFlight.Load(), c.refused.Load(), c.failed.Load(), c.upstreamErrors.Load(),
		},
		Limits: []limit{}, Rejected: []badRow{},
	}
	if limits := a.limits.Load(); limits != nil {
		stats := limits.Stats()
		s.Loads = &loadCounts{stats.Loads, stats.Failures, stats.Age.Seconds(), stats.Bad, stats.Held, message(stats.Err)}
		for i := range stats.Rejected {
			e := &stats.Rejected[i]
			s.Rejected = append(s.Rejected, badRow{e.Row, e.Name, e.Error(), e.Consequence})
		}
		for _, l := range limits.Limits() {
			s.Limits = append(s.Limits, limit{
				l.Name, l.Row, l.Disabled, l.Rate, l.Quota, l.Jitter.Seconds(), l.MaxPermits, l.Warmup.Seconds(), l.ColdFactor, l.Cache, l.Version,
			})
		}
	}
	if sw := a.sw.Load(); sw != nil {
		s.Switch = &switchState{On: sw.Enabled(), AgeSeconds: sw.Age().Seconds(), Error: message(sw.Err()), Origin: sw.Origin()}
		if limits := a.limits.Load(); limits != nil {
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
