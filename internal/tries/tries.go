// Package tries watches how often a base sends one request.
//
// An http.RoundTripper may send a request several times. http.Transport does so by itself: over HTTP/1 if a kept connection ends before the
// response begins, on one idle connection after the other; over HTTP/2 if the server refuses the stream or shuts down. The limiter above sees
// one request, but the upstream may have received each of these tries.
//
// Disabling the repetition would be simpler, but then a request would fail whenever its connection had just been closed for being idle. So a
// try is a call of its own, and asks for a permit. The exception is a try after one whose header was not written completely: the upstream
// cannot have acted on that one, so the next try is free. A base may send other requests with the context, as for a token, before that of the
// caller: if such a request got its response, the first one to another host is no further try. Once the request has been written to its own host,
// each one is.
//
// The watch uses hooks of httptrace. It asks before a try has a connection, because the call may wait for its permit, and others need the connection
// meanwhile. Hooks cannot return an error, so a try that must not happen is prevented in two steps. Its context is cancelled, which ends the loops of
// net/http, and over HTTP/2 keeps the header from being written. Over HTTP/1 the try may get an idle connection all the same. Then the watch closes
// that, and nothing is written.
package tries

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"sync"
)

// Call is a request whose tries are watched.
type Call interface {
	// Again is called before each try after one that the upstream may have received, in the goroutine of the try. If it fails, the try does
	// not happen, and neither does any later one.
	Again() error
}

// Watch watches the tries of one request. Start begins it; the zero value has not begun. It is the context in which the request is sent.
type Watch struct {
	context.Context
	call   Call
	own    *url.URL // of the request
	cancel context.CancelCauseFunc
	trace  httptrace.ClientTrace
	asking sync.Mutex // held while a try begins, which may call Again

	mu       sync.Mutex
	host     string                    // of the try that has begun last
	hosts    []string                  // of all tries whose header has been written
	sent     bool                      // the header of the last try has been written, and its permit is used
	answered bool                      // its response has begun
	detached []context.CancelCauseFunc // of WithoutCancel
	err      error                     // why no further try may happen
	ended    bool
}

type watchKey struct{}

var errPanicked = errors.New("tries: Again has panicked")

// Value implements context.Context.
func (w *Watch) Value(key any) any {
	if key == (watchKey{}) {
		return w
	}
	return w.Context.Value(key)
}

// Repeatable reports whether net/http may send a request again that the upstream may have received. It does not if the request has a body that
// cannot be read again.
func Repeatable(r *http.Request) bool {
	return r.Body == nil || r.Body == http.NoBody || r.GetBody != nil
}

// Start begins the watch of a call of a request to own, whose context is ctx. The base must send the request with the watch as its context. The
// caller must call End when the response has ended.
func (w *Watch) Start(ctx context.Context, own *url.URL, call Call) {
	w.call, w.own = call, own
	w.Context, w.cancel = context.WithCancelCause(ctx)
	w.trace.GetConn, w.trace.GotConn, w.trace.WroteHeaders = w.getConn, w.gotConn, w.wroteHeaders
	w.trace.GotFirstResponseByte = w.gotResponse
	w.Context = httptrace.WithClientTrace(w.Context, &w.trace)
}

// Started reports whether the watch has begun.
func (w *Watch) Started() bool { return w.call != nil }

// WithoutCancel returns a context that does not end with its parent, as that of context.WithoutCancel, but ends if a watch of the request
// allows no further try.
func WithoutCancel(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(parent))
	for w, ok := parent.Value(watchKey{}).(*Watch); ok; w, ok = w.Context.Value(watchKey{}).(*Watch) {
		w.mu.Lock()
		w.detached = append(w.detached, cancel)
		w.mu.Unlock()
	}
	return ctx, func() { cancel(nil) }
}

// Failed returns the error of Again, which is why the base failed; nil if there was none.
func (w *Watch) Failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// End ends the watch and the context. What is sent later with the context is another request.
func (w *Watch) End() {
	w.mu.Lock()
	w.ended = true
	w.mu.Unlock()
	w.cancel(nil)
}

// wroteHeaders is called when the header of a try has been written, or is in the buffer that is written next.
func (w *Watch) wroteHeaders() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sent, w.answered = true, false
	if !slices.Contains(w.hosts, w.host) {
		w.hosts = append(w.hosts, w.host)
	}
}

// gotResponse is called when the response of a try begins.
func (w *Watch) gotResponse() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answered = true
}

// getConn is called before a try gets a connection.
func (w *Watch) getConn(host string) {
	w.asking.Lock()
	defer w.asking.Unlock()
	w.mu.Lock()
	w.host = host
	w.mu.Unlock()
	w.begin()
}

// begin asks for a try after one that the upstream may have received. It returns why the try must not happen. asking must be held.
func (w *Watch) begin() error {
	if !w.needsPermit() {
		return w.Failed()
	}
	err := w.call.Again()
	if err == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
	w.cancel(err)
	for _, cancel := range w.detached {
		cancel(err)
	}
	return err
}

// needsPermit reports whether the try that begins needs a permit of its own.
func (w *Watch) needsPermit() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended || w.err != nil || !w.sent {
		return false
	}
	w.sent = false
	return !w.answered || slices.Contains(w.hosts, w.host) || slices.Contains(w.hosts, w.ownHost())
}

// ownHost returns the host of the request as net/http names it to getConn.
func (w *Watch) ownHost() string {
	port := w.own.Port()
	switch {
	case port != "":
	case w.own.Scheme == "https":
		port = "443"
	default:
		port = "80"
	}
	return net.JoinHostPort(w.own.Hostname(), port)
}

// gotConn is called when a try has a connection, before it writes to it.
func (w *Watch) gotConn(got httptrace.GotConnInfo) {
	w.asking.Lock()
	defer w.asking.Unlock()
	err := errPanicked
	defer func() {
		if err == nil {
			return
		}
		if secure, ok := got.Conn.(interface{ ConnectionState() tls.ConnectionState }); ok && secure.ConnectionState().NegotiatedProtocol == "h2" {
			return // other requests use the connection, and this one looks at its context before it writes
		}
		_ = got.Conn.Close()
	}()
	err = w.begin() // if the base has not called getConn
}
