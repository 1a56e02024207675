package gateway

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/cmd/internal/condition"
	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
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

	mu     sync.Mutex
	states map[condition.Part]condition.Condition // as last seen; guarded by mu
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
	all := a.conditions()
	serves := condition.Effect(all) != condition.Failed
	for i := range all {
		if c := &all[i]; c.Part == condition.Redis || c.State != condition.OK {
			r.line(serves || c.Calls != condition.Failed, "%s", c.Line(time.Now()))
		}
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(r.status)
	fmt.Fprint(w, r.text.String())
}

func (r *readiness) limits(s registry.Stats, most time.Duration) {
	r.line(most == 0 || s.Age <= most, "limits: loaded %v ago%s", s.Age.Round(time.Millisecond), after("; loads fail: ", message(s.Err)))
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

// after returns before + text, or "" if text is empty.
func after(before, text string) string {
	if text == "" {
		return ""
	}
	return before + text
}

// mostLines bounds the bad rows, and the faults, that /readyz lists.
const mostLines = 20
