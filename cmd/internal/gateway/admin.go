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
	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// admin serves the admin port, for operators and load balancers.
type admin struct {
	config   *config
	began    time.Time
	proxy    *proxy
	pulse    *pulse // nil without Redis
	sw       atomic.Pointer[killswitch.Switch]
	draining atomic.Bool
	console  atomic.Pointer[console.Console] // nil before the start, or without a console
}

func (a *admin) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", a.ready)
	mux.HandleFunc("GET /stats", a.stats)
	mux.Handle("GET /metrics", a.proxy.metrics.handler())
	mux.Handle("GET /console", http.RedirectHandler("/console/", http.StatusMovedPermanently))
	mux.HandleFunc("/console/", a.serveConsole)
	return bodiesInTime(a.config.knownHosts(mux))
}

// knownHosts refuses requests whose Host is not one of the gateway's names. This stops DNS rebinding: otherwise a page of another site could
// make its own name resolve to this address and read the responses.
func (c *config) knownHosts(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host != "" && !console.KnownHost(r.Host, c.access.Hosts) { // browsers always send a Host; HAProxy's health checks do not
			http.Error(w, fmt.Sprintf("unknown host name %.100q: use an IP address or localhost, or allow the name with --admin-host",
				r.Host), http.StatusMisdirectedRequest)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// answerTime bounds a response, from the end of the request's header until it is written. It frees connections of clients that do not read.
// The console's streams set a deadline for each write instead.
const answerTime = time.Minute

// bodyTime bounds the time to receive a request's body. Bodies on this port are small.
const bodyTime = 10 * time.Second

// bodiesInTime closes connections whose request body does not arrive within bodyTime. The server itself would wait without limit, even for a
// body that no handler reads.
func bodiesInTime(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime)) // fails only in tests
		}
		h.ServeHTTP(w, r)
	})
}

// readiness is the response of /readyz.
type readiness struct {
	status int
	text   strings.Builder
}

func (r *readiness) line(ok bool, format string, args ...any) {
	if !ok {
		r.status = http.StatusServiceUnavailable
	}
	fmt.Fprintln(&r.text, figure.Line(fmt.Sprintf(format, args...)))
}

// ready serves /readyz: one line for each dependency of the gateway, with its state.
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
	if sw := a.sw.Load(); sw != nil && sw.Err() != nil {
		r.line(true, "switch: cannot be read for %v, so it stays %s: %v", sw.Age().Round(time.Second), onOff(sw.Enabled()), sw.Err())
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
	r.line(most == 0 || s.Age <= most, "limits: loaded %v ago%s", s.Age.Round(time.Millisecond), after("; loads fail: ", message(s.Err)))
	if !s.Off.IsZero() {
		r.line(true, "switch: off for %v%s: every call passes", time.Since(s.Off).Round(time.Second), after(", ", s.Origin))
	}
	if s.Limits+s.Bad == 0 {
		r.line(true, "limits: none: --unknown decides about every call")
	}
	r.loss(&s.Loss)
	r.shadows(&s)
	r.faults(s.Faults)
	if n := len(s.Unmatched); n > 0 {
		r.line(true, "rows that match no call: %d, such as row %s: %s", n, s.Unmatched[0].Row, s.Unmatched[0].Want)
	}
	for i := range s.Rejected {
		if i == mostLines {
			r.line(true, "bad rows: %d more, see /stats", len(s.Rejected)-i)
			break
		}
		r.line(true, "bad row: %v; %s", &s.Rejected[i], s.Rejected[i].Consequence)
	}
}

// faults lists the limits whose bucket, window or semaphore is broken and needs a repair. The gateway stays in service: its other limits
// work, and the calls of the broken ones fail in the whole fleet.
func (r *readiness) faults(faults []registry.Fault) {
	for i := range faults {
		f := &faults[i]
		if i == mostLines {
			r.line(true, "faults: %d more, see /metrics", len(faults)-i)
			break
		}
		r.line(true, "fault: calls of %.80q fail until its %s is repaired: %v", f.Bucket, f.By, f.Err)
	}
}

// loss reports rows that the table has lost, until the loss is confirmed.
func (r *readiness) loss(l *registry.Loss) {
	if l.Since.IsZero() {
		return
	}
	state := "no longer in force"
	if l.Held {
		state = "still in force"
	}
	var names []string
	for i, name := range l.Names {
		if i == mostNamed {
			names = append(names, "…")
			break
		}
		names = append(names, name)
	}
	r.line(true, "limits: %d of %d are gone from the table since %v, and %s: %s; confirm the loss (tokenbucket confirm, or the console) or restore the rows",
		l.Gone, l.Before, time.Since(l.Since).Round(time.Second), state, strings.Join(names, ", "))
}

// mostNamed bounds the names in one line of /readyz.
const mostNamed = 5

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

func (r *readiness) redis(err error, policy tokenbucket.FailurePolicy) {
	outage := err != nil && slices.Contains([]telemetry.Kind{telemetry.KindTimeout, telemetry.KindUnavailable}, telemetry.KindOf(err))
	switch { // with FailOpen or LocalShare the gateway stays ready: it serves calls, and other gateways have the same outage
	case err == nil:
		r.line(true, "redis: ok")
	case outage && policy == tokenbucket.FailOpen:
		r.line(true, "redis: %v; calls pass without limits", err)
	case outage && policy != tokenbucket.FailClosed:
		r.line(true, "redis: %v; calls use this gateway's local share of the limits", err)
	default:
		r.line(false, "redis: %v", err)
	}
}

// after returns before + text, or "" if text is empty.
func after(before, text string) string {
	if text == "" {
		return ""
	}
	return before + text
}

// mostLines bounds the bad rows, and the faults, that /readyz lists.
const mostLines = 20
