// Package tries watches how often a base sends one request.
//
// An http.RoundTripper may send a request several times. http.Transport does so by itself: over HTTP/1 if a kept connection ends before the
// response begins, on one idle connection after the other; over HTTP/2 if the server refuses the stream or shuts down. The limiter above sees
// one request, but the upstream may have received each of these tries.
//
// Disabling the repetition would be simpler, but then a request would fail whenever its connection had just been closed for being idle. So a
// try is a call of its own, and asks for a permit. The exception is a try after one whose header was not written completely: the upstream
// cannot have acted on that one, so the next try is free. A base may send other requests with the context, as for a token: if such a request got
// its response from another host, the next one is no further try.
//
// The watch uses hooks of httptrace. It asks before a try has a connection, because the call may wait for its permit, and others need the connection
// meanwhile. Hooks cannot return an error, so a try that must not happen is prevented in two steps. Its context is cancelled, which ends the loops of
// net/http, and over HTTP/2 keeps the header from being written. Over HTTP/1 the try may get an idle connection all the same. Then the watch closes
// that, and nothing is written.
package tries

import (
	"context"
	"crypto/tls"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
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
	call     Call
	cancel   context.CancelCauseFunc
	trace    httptrace.ClientTrace
	next     atomic.Pointer[string] // the host of the try that has begun last
	sent     atomic.Pointer[string] // the host of the last try whose header has been written; nil if the next one is free
	answered atomic.Bool            // its response has begun

	mu       sync.Mutex
	detached []context.CancelCauseFunc // of WithoutCancel
	err      error                     // why no further try may happen
	ended    bool
}

type watchKey struct{}

var noHost string // before the first try

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

// Start begins the watch of a call whose context is ctx. The base must send the request with the watch as its context. The caller must call
// End when the response has ended.
func (w *Watch) Start(ctx context.Context, call Call) {
	w.call = call
	w.next.Store(&noHost)
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
	w.answered.Store(false)
	w.sent.Store(w.next.Load())
}

// gotResponse is called when the response of a try begins.
func (w *Watch) gotResponse() { w.answered.Store(true) }

// getConn is called before a try gets a connection.
func (w *Watch) getConn(host string) {
	w.next.Store(&host)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begin()
}

// begin asks for a try after one that the upstream may have received. mu must be held.
func (w *Watch) begin() {
	if w.ended || w.err != nil {
		return
	}
	sent, next := w.sent.Swap(nil), w.next.Load()
	if sent == nil || w.answered.Load() && *sent != *next {
		return
	}
	if w.err = w.call.Again(); w.err == nil {
		return
	}
	w.cancel(w.err)
	for _, cancel := range w.detached {
		cancel(w.err)
	}
}

// gotConn is called when a try has a connection, before it writes to it.
func (w *Watch) gotConn(got httptrace.GotConnInfo) {
	w.mu.Lock()
	defer w.mu.Unlock()
	asked := false
	defer func() {
		if asked && w.err == nil {
			return
		}
		if secure, ok := got.Conn.(interface{ ConnectionState() tls.ConnectionState }); ok && secure.ConnectionState().NegotiatedProtocol == "h2" {
			return // other requests use the connection, and this one looks at its context before it writes
		}
		_ = got.Conn.Close() // the try must not happen, or Again has panicked
	}()
	w.begin() // if the base has not called getConn
	asked = true
}
