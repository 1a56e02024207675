package httplimit

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// WatchClients makes a server notice clients that leave, where net/http does not, and serve clients that have only finished sending, which
// net/http takes for gone. It returns the listener to serve, and adds to the server's ConnContext and ConnState; call it before Serve.
//
// While a handler runs that has read its whole request, net/http waits for the next byte of the client: if the connection ends instead, the
// context of the request ends. If a byte comes, as of a pipelined request or a stray line end, net/http stops watching, and the context lasts as
// long as the handler. A client could send such a byte and leave, and its request would still wait for a permit, and keep its place. A watched
// connection reads on, up to 64 KiB, and ends the contexts of its requests when the client has left. Pipelined requests are served in turn, as
// without it. A client that sends more than that before its response begins counts as gone; once it has begun, the next request may come, and
// the watch ends.
//
// On Linux it also looks once a second at the connection of a request whose body the handler has not read yet, since net/http does not. So a client
// that leaves is noticed if the rest of the body fits into the system's buffers.
//
// A client may close its own direction after the request (nc -N), and wait for the response. On Linux it is served: a tenth of a second later,
// unless the response has begun by then, it gets a response 100 (Continue), which every client of HTTP/1.1 skips. One that has left replies with
// a reset, and counts as gone. That is repeated one, ten and a hundred seconds after the first sign. A client that leaves after its response has
// begun is noticed by the next write, or after about a minute by the keep-alive probes of TCP. One that closes its direction
// after its response has begun, one of HTTP/1.0 that gets no response within a tenth of a second, and all on other systems, count as gone.
//
// It has no effect on connections with TLS, since net/http must see these itself: there a client that sends a byte and leaves is
// noticed when the response is written. HTTP/2 does not need it.
func WatchClients(server *http.Server, l net.Listener) net.Listener {
	connContext, connState := server.ConnContext, server.ConnState
	server.ConnContext = func(ctx context.Context, conn net.Conn) context.Context {
		if c := watchedOf(conn); c != nil {
			ctx = c.watch(ctx)
		}
		if connContext != nil {
			ctx = connContext(ctx, conn)
		}
		return ctx
	}
	server.ConnState = func(conn net.Conn, state http.ConnState) {
		if c := watchedOf(conn); c != nil {
			c.note(state)
		}
		if connState != nil {
			connState(conn, state)
		}
	}
	return watching{l}
}

type watching struct{ net.Listener }

// Accept implements net.Listener.
func (l watching) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if _, secure := conn.(*tls.Conn); secure {
		return conn, nil
	}
	c := &watched{Conn: conn, peer: newPeer(conn)}
	c.changed.L = &c.mu
	return c, nil
}

// watchedOf returns the watched connection within a connection; nil without one.
func watchedOf(conn net.Conn) *watched {
	for {
		if c, ok := conn.(*watched); ok {
			return c
		}
		within, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		conn = within.NetConn()
	}
}

const mostAhead = 64 << 10 // bytes read ahead of a connection

const (
	lookAfter  = time.Second            // between two looks at the connection of a request
	probeAfter = 100 * time.Millisecond // from the first sign that a client may have left to the first probe
	probe      = "HTTP/1.1 100 Continue\r\n\r\n"
)

var errAhead = errors.New("httplimit: the client has sent too much beyond its request")

// watched is a connection that is read ahead while the server does not read it. Reads of the server come one after the other; the one that waits
// for the next byte during a handler is for one byte.
type watched struct {
	net.Conn
	peer  *peer  // nil if the state of the connection cannot be known
	first []byte // beginning and end of the first line; of the server's reads
	begun bool   // the first line is complete; of the server's reads

	replied atomic.Bool // a part of the response was written since the connection was idle
	writing sync.Mutex  // held while a probe is written, and while replied is set

	mu      sync.Mutex
	changed sync.Cond // signalled when ahead, err, reading, ended or expired change
	cancel  context.CancelFunc
	expired bool   // the read deadline has passed when it was set: net/http interrupts its read, since the handler has ended
	off     bool   // the connection is hijacked, of HTTP/2, or not of a server with WatchClients
	old     bool   // the client speaks HTTP/1.0
	ahead   []byte // what was read ahead
	err     error  // the end of the connection, returned once ahead is empty
	reading bool   // readAhead runs
	stop    bool   // the server reads again, so readAhead ends with its next read
	between bool   // a response has ended, and the server has not read since

	active   bool          // a request is served
	ended    bool          // the client has left, or the connection is closed
	looks    *time.Timer   // calls look; nil before the first request
	looking  bool          // looks is set
	finished time.Time     // when the client was found to have closed its direction; zero before
	late     bool          // the response had begun then, so the client counts as gone unless the request ends
	nextTry  time.Duration // from finished to the next probe
}

// watch begins to watch, and returns the context of the connection's requests.
func (c *watched) watch(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cancel = cancel
	return ctx
}

// note takes note of the state of the connection.
func (c *watched) note(state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state {
	case http.StateActive:
		c.active = true
		c.lookIn(lookAfter)
	case http.StateIdle:
		c.replied.Store(false)
		c.between = true
		if c.active = !c.finished.IsZero(); c.active { // pipelined requests may follow, of which there is no StateActive
			c.finished = time.Time{}
			c.lookIn(probeAfter)
		}
	case http.StateHijacked:
		c.off, c.stop = true, true
		c.changed.Broadcast()
	}
}

// lookIn sets looks, unless it is set. mu must be held.
func (c *watched) lookIn(d time.Duration) {
	switch {
	case c.peer == nil || c.off || c.ended || c.looking:
		return
	case c.looks == nil:
		c.looks = time.AfterFunc(d, c.look)
	default:
		c.looks.Reset(d)
	}
	c.looking = true
}

// look looks whether the client of a request has left.
func (c *watched) look() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.looking = false; !c.active || c.off || c.ended {
		return
	}
	switch c.peer.state() {
	case peerOpen:
		c.lookIn(lookAfter)
	case peerGone:
		c.left()
	case peerFinished:
		if c.finished.IsZero() && c.replied.Load() { // it may have sent its request, which is not read yet
			c.lookIn(lookAfter)
			return
		}
		c.finish()
		since := time.Since(c.finished)
		if since >= c.nextTry {
			if c.late || c.old && !c.replied.Load() {
				c.left()
				return
			}
			c.nextTry *= 10
			c.mu.Unlock() // Close interrupts the write
			c.probe()
			c.mu.Lock()
		}
		c.lookIn(min(max(since, probeAfter)/2, lookAfter))
	}
}

// finish notes that the client has closed its direction. mu must be held.
func (c *watched) finish() {
	if c.finished.IsZero() {
		c.finished, c.nextTry, c.late = time.Now(), probeAfter, c.replied.Load()
	}
}

// probe sends what a client that has left replies to with a reset, unless the response has begun.
func (c *watched) probe() {
	c.writing.Lock()
	defer c.writing.Unlock()
	if !c.replied.Load() {
		_, _ = io.WriteString(c.Conn, probe)
	}
}

// hold blocks a read of one byte that has found the end of what the client sends, until net/http interrupts it or the client has left. It returns
// the error of that read.
func (c *watched) hold() error {
	if c.peer == nil {
		return io.EOF
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.active = true
	c.finish()
	if c.looking && c.looks.Stop() {
		c.looking = false // so that it looks earlier
	}
	c.lookIn(probeAfter)
	for c.cancel != nil && !c.off && !c.ended && !c.expired {
		c.changed.Wait()
	}
	if c.expired {
		return os.ErrDeadlineExceeded
	}
	return io.EOF
}

// SetReadDeadline implements net.Conn.
func (c *watched) SetReadDeadline(t time.Time) error {
	c.expire(t)
	return c.Conn.SetReadDeadline(t)
}

// SetDeadline implements net.Conn.
func (c *watched) SetDeadline(t time.Time) error {
	c.expire(t)
	return c.Conn.SetDeadline(t)
}

// expire interrupts a read that is held, and readAhead, if their deadline t has passed.
func (c *watched) expire(t time.Time) {
	expired := !t.IsZero() && time.Until(t) <= 0
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.expired = expired; expired {
		c.stop = true
		c.changed.Broadcast()
	}
}

// Read implements net.Conn.
func (c *watched) Read(p []byte) (int, error) {
	n, err := c.read(p)
	switch {
	case len(p) != 1:
		c.readRequest(p[:n])
	case n == 1:
		c.mu.Lock()
		defer c.mu.Unlock()
		switch {
		case c.off || c.expired || c.cancel == nil:
		case c.reading:
			c.stop = false
		case c.err == nil:
			c.reading, c.stop = true, false
			go c.readAhead()
		}
	case err == io.EOF:
		err = c.hold()
	}
	return n, err
}

// readRequest takes note of the first line of the connection.
func (c *watched) readRequest(p []byte) {
	if c.begun {
		return
	}
	line, _, ended := bytes.Cut(p, []byte{'\n'})
	c.first = append(c.first, line...)
	if n := len(c.first); n > 32 { // the middle is of no interest
		c.first = append(c.first[:4], c.first[n-10:]...)
	}
	if c.begun = ended; !ended {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off = c.off || bytes.HasPrefix(c.first, []byte("PRI ")) // an HTTP/2 connection begins with it
	c.old = bytes.HasSuffix(bytes.TrimSuffix(c.first, []byte{'\r'}), []byte("HTTP/1.0"))
	c.first = nil
}

// Write implements net.Conn.
func (c *watched) Write(p []byte) (int, error) {
	if !c.replied.Load() {
		c.writing.Lock()
		c.replied.Store(true)
		c.writing.Unlock()
	}
	return c.Conn.Write(p)
}

func (c *watched) read(p []byte) (int, error) {
	c.mu.Lock()
	c.stop, c.between = true, false
	for c.reading && len(c.ahead) == 0 && c.err == nil && len(p) > 0 {
		c.changed.Wait()
	}
	if n := copy(p, c.ahead); n > 0 {
		defer c.mu.Unlock()
		if c.ahead = c.ahead[n:]; len(c.ahead) == 0 {
			c.ahead = nil
		}
		return n, nil
	}
	if err := c.err; err != nil {
		defer c.mu.Unlock()
		return 0, err
	}
	c.mu.Unlock()
	return c.Conn.Read(p)
}

// readAhead reads until the server does, or the client has left.
func (c *watched) readAhead() {
	buffer := make([]byte, 512)
	for {
		n, err := c.Conn.Read(buffer)
		if !c.add(buffer[:n], err) {
			return
		}
	}
}

// add takes what readAhead has read. It returns whether to go on.
func (c *watched) add(p []byte, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.changed.Broadcast()
	c.ahead = append(c.ahead, p...)
	late := errors.Is(err, os.ErrDeadlineExceeded)
	switch {
	case err == nil && !c.stop && len(c.ahead) >= mostAhead:
		if !c.replied.Load() && !c.between { // otherwise these are requests that follow
			c.err = errAhead
			c.left()
		}
	case err == io.EOF && c.peer != nil:
		c.err = err
		c.finish()
		c.lookIn(probeAfter)
	case err != nil && !late:
		c.err = err
		c.left()
	case late && !c.stop: // a deadline of the handler, which ends the watch of net/http, too
		c.left()
	case err == nil && !c.stop:
		return true
	}
	c.reading = false
	return false
}

// left ends the contexts of the requests, because the client has left. Those of a hijacked connection are its owner's. mu must be held.
func (c *watched) left() {
	if !c.off {
		c.cancel()
		c.ended = true
		c.changed.Broadcast()
	}
}

// CloseWrite closes the direction to the client. The other direction stays open.
func (c *watched) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// Close implements net.Conn.
func (c *watched) Close() error {
	c.mu.Lock()
	cancel := c.cancel
	if c.ended = true; c.looks != nil {
		c.looks.Stop()
	}
	c.changed.Broadcast()
	c.mu.Unlock()
	err := c.Conn.Close()
	if cancel != nil {
		cancel()
	}
	return err
}
