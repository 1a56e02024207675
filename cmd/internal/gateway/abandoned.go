package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"time"
)

// upload is the request body of a call that holds a place, while it is sent to the upstream. The upload breaks off if the client disconnects
// or is too slow. The transport then closes the connection, but the upstream may keep working on the call. So the connection is abandoned
// instead of closed: the upstream closes its side when it has finished, and the call keeps its place until then.
type upload struct {
	io.ReadCloser
	patience time.Duration   // how long to wait for the upstream to close its side; no limit if 0
	cut      context.Context // ends the wait

	conn atomic.Pointer[upstreamConn] // the last connection the call was sent on; nil if none yet, or if it is shared (HTTP/2)

	mu     sync.Mutex
	over   bool            // the upstream's response has begun, or the call has failed
	broken <-chan struct{} // closed when the upstream has finished; nil unless the body broke off
}

// trace returns a context in which the transport reports the call's connection.
func (u *upload) trace(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) {
		conn := got.Conn
		if secure, ok := conn.(*tls.Conn); ok {
			conn = secure.NetConn()
			if secure.ConnectionState().NegotiatedProtocol == "h2" {
				conn = nil // the transport resets the stream and keeps the connection
			}
		}
		plain, _ := conn.(*upstreamConn)
		u.conn.Store(plain)
	}})
}

// Read implements io.Reader.
func (u *upload) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	if err != nil && err != io.EOF && !errors.Is(err, http.ErrBodyReadAfterClose) {
		u.breakOff()
	}
	return n, err
}

// breakOff abandons the call's connection before the transport closes it.
func (u *upload) breakOff() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if conn := u.conn.Load(); conn != nil && !u.over && u.broken == nil {
		u.broken = conn.abandon(u.cut, u.patience)
	}
}

// end returns a channel that is closed when the upstream has finished; nil if the body did not break off before the end of RoundTrip.
func (u *upload) end() <-chan struct{} {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.over = true
	return u.broken
}

// upstreamConn is a connection to an upstream. Close closes it. If the connection was abandoned, Close closes only the gateway's side and
// waits for the upstream in the background. For the transport the connection is closed in both cases.
type upstreamConn struct {
	net.Conn

	reading sync.Mutex // held during each read
	closed  atomic.Bool

	mu        sync.Mutex
	abandoned *wait // nil unless abandon was called
}

// wait is the wait for an upstream to close its side of an abandoned connection.
type wait struct {
	cut      context.Context
	patience time.Duration // no limit if 0
	ended    chan struct{} // closed when the wait has ended
}

// abandon makes the next Close wait for the upstream. The returned channel is closed when that wait has ended; it is nil if the connection
// is closed already.
func (c *upstreamConn) abandon(cut context.Context, patience time.Duration) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return nil
	}
	c.abandoned = &wait{cut, patience, make(chan struct{})}
	return c.abandoned.ended
}

// Read implements net.Conn.
func (c *upstreamConn) Read(p []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if c.closed.Load() {
		return 0, net.ErrClosed
	}
	return c.Conn.Read(p)
}

// CloseWrite closes the gateway's side of the connection.
func (c *upstreamConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// Close implements net.Conn.
func (c *upstreamConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := !c.closed.Swap(true)
	switch {
	case c.abandoned == nil:
		return c.Conn.Close()
	case !first:
		return net.ErrClosed
	case c.CloseWrite() != nil:
		defer close(c.abandoned.ended)
		return c.Conn.Close()
	}
	go c.await(c.abandoned)
	return nil
}

// mostDiscarded bounds the bytes read from an abandoned connection. An upstream that sends more has begun its response.
const mostDiscarded = 4096

// await closes the connection once the upstream has closed its side, has sent mostDiscarded bytes, or the wait is over.
func (c *upstreamConn) await(w *wait) {
	defer close(w.ended)
	defer func() { _ = c.Conn.Close() }()
	_ = c.SetReadDeadline(time.Now()) // interrupts the transport's read
	c.reading.Lock()
	defer c.reading.Unlock()
	var deadline time.Time
	if w.patience > 0 {
		deadline = time.Now().Add(w.patience)
	}
	_ = c.SetReadDeadline(deadline)
	defer context.AfterFunc(w.cut, func() { _ = c.Conn.Close() })()
	_, _ = io.CopyN(io.Discard, c.Conn, mostDiscarded)
}

// leaveAfterUpstream calls leave: at once, or, if the call's body broke off, when the upstream has finished. A draining gateway waits for
// that.
func (c *call) leaveAfterUpstream(leave func()) {
	if c.upstream == nil {
		leave()
		return
	}
	c.proxy.running.Add(1) // the call itself has not ended, so running is not zero
	c.proxy.calls.inFlight.Add(1)
	go func() {
		defer c.proxy.running.Done()
		defer c.proxy.calls.inFlight.Add(-1)
		<-c.upstream
		leave()
	}()
}
