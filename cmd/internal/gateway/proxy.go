package gateway

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// call is the state of a request from its arrival on.
type call struct {
	proxy     *proxy
	settings  *config // the settings when the request arrived
	route     *route
	target    *url.URL // canonical; the same target is limited and forwarded
	key       string
	admission *gate.Admission // nil until the call has entered the gate
	sent      bool            // with --inbound: it was sent to the upstream before
	upstream  <-chan struct{} // closed when the upstream has finished a call whose body broke off; nil if the call does not wait for that
	body      *incoming       // nil for a request without a body

	response *outgoing
}

// end releases what the call holds, even if its response was never closed.
func (c *call) end() { c.admission.Leave() }

// refusedBy returns what refused the call. If only its context is too short for the wait, that is the rate.
func (c *call) refusedBy() gate.Decider {
	if c.admission == nil {
		return gate.ByLimit
	}
	return c.admission.By
}

type callKey struct{}

func callOf(r *http.Request) *call { return r.Context().Value(callKey{}).(*call) }

// proxy forwards requests, once it has been opened.
type proxy struct {
	config  *config                // the settings at the start
	live    atomic.Pointer[config] // the settings after the last reload; only those in the list live apply
	log     *slog.Logger
	handler atomic.Pointer[http.Handler] // nil until the limits are loaded
	base    *http.Transport
	metrics *metrics
	faults  logLimiter // for log lines of failed limiters
	dead    logLimiter // for log lines of failed upstreams, by upstream and kind

	requests context.Context // cancelled to cut off all requests

	running sync.WaitGroup // all requests, including upgraded connections
	calls   struct {
		received, inFlight, refused, failed, upstreamErrors, badBodies, badTargets, slowClients atomic.Int64
	}
}

func newProxy(c *config, log *slog.Logger) (*proxy, error) {
	m, err := newMetrics()
	if err != nil {
		return nil, err
	}
	base := http.DefaultTransport.(*http.Transport).Clone()
	dialer := &net.Dialer{Timeout: 5 * time.Second, KeepAlive: 30 * time.Second}
	base.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dialer.DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &upstreamConn{Conn: conn}, nil
	}
	base.ResponseHeaderTimeout = c.upstreamTimeout
	base.MaxIdleConns, base.MaxIdleConnsPerHost, base.IdleConnTimeout = 0, c.upstreamIdle, c.upstreamIdleFor
	base.DisableKeepAlives = c.upstreamIdle == 0 // MaxIdleConnsPerHost 0 would be 2
	base.DisableCompression = true               // bodies are forwarded unchanged
	p := &proxy{config: c, log: log, base: base, metrics: m, requests: context.Background()}
	p.live.Store(c)
	m.begin(c.routes)
	return p, nil
}

// open starts to forward requests, limited by the gate.
func (p *proxy) open(registry gate.Gate) error {
	counted := &counter{Gate: registry, log: p.log, metrics: p.metrics, callers: func() bool { return p.live.Load().key.callers() }}
	key := httplimit.WithKey(func(r *http.Request) string { return callOf(r).key })
	onError := httplimit.WithOnError(func(r *http.Request, err error) error {
		p.calls.failed.Add(1)
		if n, ok := p.faults.note("limiter"); ok {
			p.log.Error("the limiter failed, so calls were answered with 503", "calls", n, "error", err)
		}
		return err
	})
	logger := httplimit.WithLogger(p.log)
	reverse := &httputil.ReverseProxy{
		Rewrite:      p.rewrite,
		ErrorHandler: p.answer,
		ErrorLog:     slog.NewLogLogger(p.log.Handler(), slog.LevelWarn),
		BufferPool:   &buffers{},
	}
	var handler http.Handler = reverse
	limits, penalty := gate.Gate(counted), p.config.maxRetryAfter
	if p.config.inbound {
		limit, err := httplimit.NewMiddleware(counted, key, onError, logger, httplimit.WithRefusalHandler(http.HandlerFunc(p.refuse)))
		if err != nil {
			return err
		}
		handler = limit(reverse)
		limits, penalty = repeats{counted}, 0
	}
	transport, err := httplimit.NewTransport(limits, key, onError, logger, httplimit.WithBase(sender{p}), httplimit.WithMaxPenalty(penalty))
	if err != nil {
		return err
	}
	reverse.Transport = transport
	p.handler.Store(&handler)
	return nil
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.running.Add(1)
	p.calls.received.Add(1)
	p.calls.inFlight.Add(1)
	defer func() {
		p.calls.inFlight.Add(-1)
		p.running.Done()
	}()
	handler := p.handler.Load()
	settings := p.live.Load()
	connection := http.NewResponseController(w)
	response := &outgoing{ResponseWriter: w, connection: connection, silence: settings.upgradeTimeout, slow: &p.calls.slowClients, inbound: p.config.inbound,
		pace: pace{patience: settings.responseTimeout, rate: settings.responseRate}}
	var body *incoming
	answered := false // and not aborted
	if r.Body != nil && r.Body != http.NoBody {
		body = &incoming{ReadCloser: r.Body, connection: connection, failures: &p.calls.badBodies,
			pace: pace{patience: settings.bodyTimeout, rate: settings.bodyRate}}
		body.allow()
		defer body.leave()
		defer func() {
			if answered {
				body.discard(r, response)
			}
		}()
		response.body = settings.bodyTimeout
	}
	response.allow(0)
	defer response.leave()
	w = response
	if handler == nil {
		unavailable(w, "limits are not loaded yet")
		answered = true
		return
	}
	c, status, why := p.newCall(settings, r)
	if c == nil {
		if status == http.StatusBadRequest {
			p.calls.badTargets.Add(1)
			p.log.Debug("a malformed request was rejected", "target", r.RequestURI, "why", why)
		}
		respond(w, why, status)
		answered = true
		return
	}
	defer c.end()
	c.proxy, c.body, c.response = p, body, response
	r = r.WithContext(context.WithValue(settings.prioritized(r), callKey{}, c))
	r.URL = c.target
	if body != nil {
		r.Body = body
	}
	(*handler).ServeHTTP(w, r)
	answered = true
}

// newCall returns the call of a request, or the status and the reason with which to reject it. Only newCall derives target and key, from the
// request as the client sent it. The key is derived from the target, and the same target is forwarded.
func (p *proxy) newCall(settings *config, r *http.Request) (c *call, status int, why string) {
	if r.Method == http.MethodConnect {
		return nil, http.StatusMethodNotAllowed, "this server is not a forward proxy"
	}
	target, err := httplimit.Canonical(r.URL)
	if err != nil {
		return nil, http.StatusBadRequest, "the request target has no path with one meaning"
	}
	if settings.key.fields.hopByHop(r.Header) {
		return nil, http.StatusBadRequest, "a header field that names the limit must not be listed in Connection"
	}
	canonical := *r
	canonical.URL = target
	canonical.Header = settings.key.fields.counted(r.Header, fromTrustedProxy(r, settings.proxies))
	key := settings.key.of(settings, &canonical, p.metrics.match)
	if key == httplimit.NoKey {
		return nil, http.StatusBadRequest, "a header field that names the limit was sent twice"
	}
	route := settings.routes.find(target.Path)
	if route == nil {
		return nil, http.StatusNotFound, "no upstream for this path"
	}
	return &call{settings: settings, route: route, key: key, target: target}, 0, ""
}

// rewrite builds the request for the upstream: the canonical target below the upstream's URL, the upstream's Host, and of the proxy fields
// only those that the gateway or a trusted proxy vouches for. docs/gateway.md has a table of all changes.
func (p *proxy) rewrite(r *httputil.ProxyRequest) {
	c := callOf(r.In)
	settings := c.settings
	r.SetURL(c.route.target)
	r.Out.URL.RawQuery = r.In.URL.RawQuery // unchanged, even if Go cannot parse it: no limit depends on it
	r.Out.Trailer = nil                    // some upstreams would merge it into the header
	r.Out.Close = c.body != nil && slices.Contains(bodyless, r.Out.Method)
	trusted := fromTrustedProxy(r.In, settings.proxies)
	settings.key.fields.scrub(r.Out.Header, trusted)
	restrictUpgrade(r.Out.Header, settings.upgrades)
	if trusted {
		r.Out.Header["X-Forwarded-For"] = r.In.Header["X-Forwarded-For"]
	}
	r.SetXForwarded()
	for _, field := range []string{"X-Forwarded-Host", "X-Forwarded-Proto"} {
		if values := r.In.Header[field]; trusted && len(values) > 0 {
			r.Out.Header[field] = values
		}
	}
}

// bodyless are the methods whose bodies have no meaning. Some upstreams respond without reading such a body, and then take it for the next
// request of the connection. Calls smuggled that way would not be counted, and other clients would get their responses.
var bodyless = []string{http.MethodGet, http.MethodHead, http.MethodDelete, http.MethodOptions, http.MethodTrace}

// answer responds to a request that failed before its response began.
func (p *proxy) answer(w http.ResponseWriter, r *http.Request, err error) {
	var repeat *httplimit.RepeatError
	var refused *httplimit.RefusedError
	var failed *httplimit.GateError
	badBody := callOf(r).body.failureStatus(r.Context().Err())
	switch {
	case errors.As(err, &repeat): // the upstream may have received the call, and has failed
		p.failed(w, r, err)
	case errors.As(err, &refused):
		w.Header().Set("Retry-After", strconv.FormatInt(max(1, int64(math.Ceil(refused.RetryAfter.Seconds()))), 10))
		p.refuse(w, r)
	case errors.As(err, &failed):
		unavailable(w, "the rate limiter is not available")
	case badBody != 0:
		p.log.Debug("a request body could not be read", "key", callOf(r).key, "status", badBody)
		respond(w, "the request body was malformed or late", badBody)
	case callOf(r).response.hijacked: // the client did not read the 101 response in time
		p.calls.slowClients.Add(1)
	case context.Cause(r.Context()) == errDown: // the drain period is over
		unavailable(w, errDown.Error())
	case r.Context().Err() != nil: // the client has disconnected
		unavailable(w, "the request was cancelled")
	default:
		p.failed(w, r, err)
	}
}

// failed responds to a call that got no response from its upstream.
func (p *proxy) failed(w http.ResponseWriter, r *http.Request, err error) {
	p.calls.upstreamErrors.Add(1)
	upstream, kind, status := callOf(r).route.target.String(), kindOf(err), http.StatusBadGateway
	if kind == "timeout" {
		status = http.StatusGatewayTimeout
	}
	p.metrics.upstreams.WithLabelValues(upstream, kind).Inc()
	if n, ok := p.dead.note(kind + " " + upstream); ok {
		p.log.Warn("an upstream failed", "upstream", upstream, "kind", kind, "calls", n, "status", status, "error", err)
	}
	respond(w, http.StatusText(status), status)
}

// refusedOnWindows is WSAECONNREFUSED, which syscall lacks. No other system has an error of this number.
const refusedOnWindows = syscall.Errno(10061)

// upstreamKinds are the values of the label kind.
var upstreamKinds = [...]string{"name", "timeout", "refused", "other"}

// kindOf returns the value of the label kind for an upstream's failure.
func kindOf(err error) string {
	var slow net.Error
	var name *net.DNSError
	switch {
	case errors.As(err, &name):
		return "name"
	case errors.As(err, &slow) && slow.Timeout():
		return "timeout"
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, refusedOnWindows):
		return "refused"
	}
	return "other"
}

// refuse responds to a request that got no permit. Retry-After must be set; refuse removes it if a retry can never pass.
func (p *proxy) refuse(w http.ResponseWriter, r *http.Request) {
	p.calls.refused.Add(1)
	by, after := callOf(r).refusedBy(), w.Header().Get("Retry-After")
	p.log.Debug("refused", "key", callOf(r).key, "by", by.String(), "retryAfter", after)
	status, why := http.StatusTooManyRequests, "too many requests: try again in "+after+" s"
	switch by {
	case gate.ByUnknown:
		status, why = p.live.Load().unknownStatus, "there is no limit for this path"
	case gate.ByZero:
		status, why = http.StatusServiceUnavailable, "no call may pass: the limit is 0"
	case gate.ByBadRow:
		status, why = http.StatusServiceUnavailable, "no call may pass: the limit is misconfigured"
	}
	if status != http.StatusTooManyRequests {
		w.Header().Del("Retry-After")
	}
	respond(w, why, status)
}

func unavailable(w http.ResponseWriter, why string) {
	w.Header().Set("Retry-After", "1")
	respond(w, why, http.StatusServiceUnavailable)
}

// respond is http.Error with a length: the client knows the end of the response while the rest of its body is discarded.
func respond(w http.ResponseWriter, why string, status int) {
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Length", strconv.Itoa(len(why)+1))
	w.WriteHeader(status)
	_, _ = io.WriteString(w, why+"\n")
}

// buffers is a pool of buffers through which bodies are copied.
type buffers struct{ pool sync.Pool }

// Get implements httputil.BufferPool.
func (b *buffers) Get() []byte {
	if buf, ok := b.pool.Get().(*[]byte); ok {
		return *buf
	}
	return make([]byte, 32<<10)
}

// Put implements httputil.BufferPool.
func (b *buffers) Put(buf []byte) { b.pool.Put(&buf) }
