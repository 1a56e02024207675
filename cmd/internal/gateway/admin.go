package gateway

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console"
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
	console  atomic.Pointer[console.Console] // nil: not yet, or none
}

func (a *admin) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", a.ready)
	mux.HandleFunc("GET /stats", a.stats)
	mux.Handle("GET /metrics", a.proxy.metrics.handler())
	mux.Handle("GET /console", http.RedirectHandler("/console/", http.StatusMovedPermanently))
	mux.HandleFunc("/console/", a.serveConsole)
	return bodiesInTime(mux)
}

// bodyTime is how long the body of a request may take that is answered here: it is small.
const bodyTime = 10 * time.Second

// bodiesInTime ends connections whose body does not come. The server itself would wait for it for ever, also where nobody reads it.
func bodiesInTime(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime)) // it can, but in tests
		}
		h.ServeHTTP(w, r)
	})
}

// readiness is what /readyz answers.
type readiness struct {
	status int
	text   strings.Builder
}

func (r *readiness) line(ok bool, format string, args ...any) {
	if !ok {
		r.status = http.StatusServiceUnavailable
	}
	fmt.Fprintf(&r.text, format+"\n", args...)
}

// ready tells, a line each, what a gateway needs, and whether it is there.
func (a *admin) ready(w http.ResponseWriter, _ *http.Request) {
	r := readiness{status: http.StatusOK}
	if a.draining.Load() {
		r.line(false, "draining")
	}
	if limits := a.proxy.metrics.limits.Load(); limits == nil {
		r.line(false, "limits: not loaded yet")
	} else {
		r.limits(limits.Stats(), a.proxy.live.Load().maxAge)
	}
	if a.pulse != nil {
		r.redis(a.pulse.check(a.config.storeTimeout), a.config.policy)
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(r.status)
	fmt.Fprint(w, r.text.String())
}

func (r *readiness) limits(s registry.Stats, most time.Duration) {
	r.line(most == 0 || s.Age <= most, "limits: loaded %v ago", s.Age.Round(time.Millisecond))
	if !s.Off.IsZero() {
		r.line(true, "switch: off for %v%s: every call passes", time.Since(s.Off).Round(time.Second), after(", ", s.Origin))
	}
	if s.Limits+s.Bad == 0 {
		r.line(true, "limits: none: every call has what --unknown says")
	}
	if s.Held > 0 {
		r.line(true, "limits: %d are in force though their rows are gone, until further loads agree", s.Held)
	}
	r.shadows(&s)
	for i := range s.Rejected {
		if i == mostLines {
			r.line(true, "bad rows: %d more, see /stats", len(s.Rejected)-i)
			break
		}
		r.line(true, "bad row: %v; %s", &s.Rejected[i], s.Rejected[i].Consequence)
	}
}

func (r *readiness) redis(err error, policy tokenbucket.FailurePolicy) {
	outage := err != nil && slices.Contains([]telemetry.Kind{telemetry.Timeout, telemetry.Unavailable}, telemetry.KindOf(err))
	switch { // a policy makes the gateway of use all the same, and the rest of the fleet is no better off
	case err == nil:
		r.line(true, "redis: ok")
	case outage && policy == tokenbucket.FailOpen:
		r.line(true, "redis: %v; calls pass without limits", err)
	case outage && policy != tokenbucket.FailClosed:
		r.line(true, "redis: %v; calls share this gateway's part of the limits", err)
	default:
		r.line(false, "redis: %v", err)
	}
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
