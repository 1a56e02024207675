package gateway

import (
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
	sw       atomic.Pointer[registry.PolledSwitch]
	draining atomic.Bool
}

func (a *admin) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", a.ready)
	mux.HandleFunc("GET /stats", a.stats)
	mux.Handle("GET /metrics", a.proxy.metrics.handler())
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
	if limits := a.proxy.metrics.limits.Load(); limits == nil {
		line(false, "limits: not loaded yet")
	} else {
		stats, most := limits.Stats(), a.proxy.live.Load().maxAge
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
