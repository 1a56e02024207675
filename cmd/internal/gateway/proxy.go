package gateway

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// call is what is known about a request from its arrival on.
type call struct {
	route *route
	key   string
	by    registry.Decider // what has refused it
	leave func()           // gives back what it holds; nil: nothing
	body  *incoming        // nil: it has none
}

// end gives back what the call holds, also when nobody has closed its response.
func (c *call) end() {
	if c.leave != nil {
		c.leave()
	}
}

type callKey struct{}

func callOf(r *http.Request) *call { return r.Context().Value(callKey{}).(*call) }

// proxy forwards requests, once it has been opened.
type proxy struct {
	config  *config                // as it was when the gateway started
	live    atomic.Pointer[config] // with what was changed since, of which little counts
	log     *slog.Logger
	handler atomic.Pointer[http.Handler] // nil: limits are not loaded yet
	base    *http.Transport
	metrics *metrics
	faults  seldom // kinds of failures
	dead    seldom // upstreams and kinds of failures

	running sync.WaitGroup // all requests, also those whose connection is no longer the server's
	calls   struct {
		received, inFlight, refused, failed, upstreamErrors, badBodies atomic.Int64
	}
}

func newProxy(c *config, log *slog.Logger) (*proxy, error) {
	m, err := newMetrics()
	if err != nil {
		return nil, err
	}
	base := http.DefaultTransport.(*http.Transport).Clone()
	base.DialContext = (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	base.ResponseHeaderTimeout = c.upstreamTimeout
	base.MaxIdleConns, base.MaxIdleConnsPerHost = 0, 256
	base.DisableCompression = true // bodies pass as they are
	p := &proxy{config: c, log: log, base: base, metrics: m}
	p.live.Store(c)
	return p, nil
}

// open lets requests pass, limited by the gate.
func (p *proxy) open(limits httplimit.Gate) error {
	gate := &gate{Gate: limits, log: p.log, metrics: p.metrics}
	key := httplimit.WithKey(func(r *http.Request) string { return callOf(r).key })
	onError := httplimit.WithOnError(func(r *http.Request, err error) error {
		p.calls.failed.Add(1)
		if n, tell := p.faults.note("limiter"); tell {
			p.log.Error("the limiter failed", "calls", n, "error", err)
		}
		return err
	})
	logger := httplimit.WithLogger(p.log)
	reverse := &httputil.ReverseProxy{
		Rewrite:      p.rewrite,
		Transport:    p.base,
		ErrorHandler: p.answer,
		ErrorLog:     slog.NewLogLogger(p.log.Handler(), slog.LevelWarn),
		BufferPool:   &buffers{},
	}
	var handler http.Handler = reverse
	if p.config.inbound {
		limit, err := httplimit.NewMiddleware(gate, key, onError, logger, httplimit.WithRefusalHandler(http.HandlerFunc(p.refuse)))
		if err != nil {
			return err
		}
		handler = limit(reverse)
	} else {
		transport, err := httplimit.NewTransport(gate, key, onError, logger,
			httplimit.WithBase(p.base), httplimit.WithMaxRetryAfter(p.config.maxRetryAfter))
		if err != nil {
			return err
		}
		reverse.Transport = transport
	}
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
	var body *incoming
	if r.Body != nil && r.Body != http.NoBody {
		body = &incoming{ReadCloser: r.Body, patience: settings.bodyTimeout, connection: http.NewResponseController(w), failures: &p.calls.badBodies}
		body.allow()
		defer body.leave()
	}
	route := settings.routes.find(cleanPath(r.URL.Path))
	switch {
	case handler == nil:
		unavailable(w, "limits are not loaded yet")
	case r.Method == http.MethodConnect:
		http.Error(w, "this is no forward proxy", http.StatusMethodNotAllowed)
	case route == nil:
		http.Error(w, "no upstream for this path", http.StatusNotFound)
	default:
		// The key is made here: the request that is sent on has another path, and its X-Forwarded-For is ours.
		c := &call{route: route, key: settings.key.of(settings, r, p.metrics.match), body: body}
		defer c.end()
		r = r.WithContext(context.WithValue(r.Context(), callKey{}, c))
		if body != nil {
			r.Body = body
		}
		(*handler).ServeHTTP(w, r)
	}
}

// rewrite makes the request for the upstream: its own Host, and X-Forwarded-* as they are true. A path with . and .. is sent on as it was
// limited: it must not lead to what has another limit, or out of the upstream's base.
func (p *proxy) rewrite(r *httputil.ProxyRequest) {
	if dotted(r.In.URL.Path) {
		r.Out.URL.Path, r.Out.URL.RawPath = cleanPath(r.In.URL.Path), ""
	}
	r.SetURL(callOf(r.In).route.target)
	r.Out.URL.RawQuery = r.In.URL.RawQuery // also what Go cannot parse: nothing here depends on it
	proxied := believed(r.In, p.live.Load().proxies)
	if proxied {
		r.Out.Header["X-Forwarded-For"] = r.In.Header["X-Forwarded-For"]
	}
	r.SetXForwarded()
	for _, field := range []string{"X-Forwarded-Host", "X-Forwarded-Proto"} {
		if values := r.In.Header[field]; proxied && len(values) > 0 {
			r.Out.Header[field] = values
		}
	}
}

// answer answers a request that has got no response.
func (p *proxy) answer(w http.ResponseWriter, r *http.Request, err error) {
	var refused *httplimit.RefusedError
	var failed *httplimit.GateError
	spoiled := callOf(r).body.spoiled(r.Context().Err())
	switch {
	case errors.As(err, &refused):
		w.Header().Set("Retry-After", strconv.FormatInt(max(1, int64(math.Ceil(refused.RetryAfter.Seconds()))), 10))
		p.refuse(w, r)
	case errors.As(err, &failed):
		unavailable(w, "the rate limiter is not available")
	case spoiled != 0: // the upstream's answer was not waited for
		p.log.Debug("a body could not be read", "key", callOf(r).key, "status", spoiled)
		http.Error(w, "the body did not come as it should, or not in time", spoiled)
	case r.Context().Err() != nil: // the client has gone, or the time to drain is over
		unavailable(w, "the request was cancelled")
	default:
		p.calls.upstreamErrors.Add(1)
		upstream, kind, status := callOf(r).route.target.String(), kindOf(err), http.StatusBadGateway
		if kind == "timeout" {
			status = http.StatusGatewayTimeout
		}
		p.metrics.upstreams.WithLabelValues(upstream, kind).Inc()
		if n, tell := p.dead.note(kind + " " + upstream); tell {
			p.log.Warn("an upstream failed", "upstream", upstream, "kind", kind, "calls", n, "status", status, "error", err)
		}
		http.Error(w, http.StatusText(status), status)
	}
}

// kindOf is what an upstream's failure is counted as.
func kindOf(err error) string {
	var slow net.Error
	var name *net.DNSError
	switch {
	case errors.As(err, &name):
		return "name"
	case errors.As(err, &slow) && slow.Timeout():
		return "timeout"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	}
	return "other"
}

// refuse answers a request that got no permit; Retry-After is set. What can never pass is not told to try again.
func (p *proxy) refuse(w http.ResponseWriter, r *http.Request) {
	p.calls.refused.Add(1)
	by, after := callOf(r).by, w.Header().Get("Retry-After")
	p.log.Debug("refused", "key", callOf(r).key, "by", by.String(), "retryAfter", after)
	status, why := http.StatusTooManyRequests, "too many requests: try again in "+after+" s"
	switch by {
	case registry.ByUnknown:
		status, why = p.live.Load().unknownStatus, "there is no limit for this path"
	case registry.ByZero:
		status, why = http.StatusServiceUnavailable, "nothing may pass: the limit is 0"
	case registry.ByBadRow:
		status, why = http.StatusServiceUnavailable, "nothing may pass: the limit is misconfigured"
	}
	if status != http.StatusTooManyRequests {
		w.Header().Del("Retry-After")
	}
	http.Error(w, why, status)
}

func unavailable(w http.ResponseWriter, why string) {
	w.Header().Set("Retry-After", "1")
	http.Error(w, why, http.StatusServiceUnavailable)
}

// buffers are what bodies are copied through.
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
