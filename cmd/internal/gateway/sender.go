package gateway

import (
	"context"
	"net/http"

	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// sender sends calls to upstreams. A call that holds a place of a semaphore outlives its client until the upstream's response begins, or
// --upstream-timeout is over; afterwards it ends with its client. Most upstreams keep working when their connection is closed. If the place
// were free at once, one client could have any number of calls at the upstream. If the client disconnects before its body is complete, the
// call ends, but keeps its place until the upstream has finished (see upload).
type sender struct{ proxy *proxy }

// RoundTrip implements http.RoundTripper.
func (s sender) RoundTrip(r *http.Request) (*http.Response, error) {
	c := callOf(r)
	if c.admission == nil || !c.admission.Holds() {
		return s.proxy.base.RoundTrip(r)
	}
	ctx, cancel := httplimit.WithoutCancel(r.Context())
	defer context.AfterFunc(s.proxy.requests, cancel)()
	sent := r.WithContext(ctx)
	var body *upload
	if r.Body != nil && r.Body != http.NoBody {
		body = &upload{ReadCloser: r.Body, patience: s.proxy.config.upstreamTimeout, cut: s.proxy.requests}
		sent = r.WithContext(body.trace(ctx))
		sent.Body = body
	}
	response, err := s.proxy.base.RoundTrip(sent)
	context.AfterFunc(r.Context(), cancel) // at once if the client has disconnected; otherwise when the call is over, at the latest
	if body != nil {
		if broken := body.end(); err != nil {
			c.upstream = broken
		}
	}
	return response, err
}

// CloseIdleConnections closes the connections that no call uses.
func (s sender) CloseIdleConnections() { s.proxy.base.CloseIdleConnections() }
