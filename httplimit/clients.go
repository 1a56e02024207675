package httplimit

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"os"
	"sync"
)

// WatchClients makes a server notice clients that leave after they have sent more than their request. It returns the listener to
// serve, and adds to the server's ConnContext and ConnState; call it before Serve.
//
// While a handler runs, net/http waits for the next byte of the client: if the connection ends instead, the context of the
// request ends. If a byte comes, as of a pipelined request or a stray line end, net/http stops watching, and the context
// lasts as long as the handler. A client could send such a byte and leave, and its request would still wait for a permit, and
// keep its place. A watched connection reads on, up to 64 KiB, and ends the contexts of its requests when the client has left.
// Pipelined requests are served in turn, as without it. A client that sends more than that before its response begins counts as
// gone; once it has begun, the next request may come, and the watch ends.
//
// A client that closes only its own direction counts as gone, too, as in net/http: the two cannot be told apart.
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
		if state == http.StateHijacked {
			if c := watchedOf(conn); c != nil {
				c.unwatch()
			}
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
	c := &watched{Conn: conn}
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

const prior = "PRI " // an HTTP/2 connection begins with it

var errAhead = errors.New("httplimit: the client has sent too much beyond its request")

// watched is a connection that is read ahead while the server does not read it. Reads of the server come one after the other; the one that waits
// for the next byte during a handler is for one byte.
type watched struct {
	net.Conn

	mu      sync.Mutex
	changed sync.Cond // signalled when ahead, err or reading change
	cancel  context.CancelFunc
	off     bool   // the connection is hijacked, of HTTP/2, or not of a server with WatchClients
	begins  []byte // the first bytes, up to the length of prior
	replied bool   // a part of the response was written since the server has read a request
	ahead   []byte // what was read ahead
	err     error  // the end of the connection, returned once ahead is empty
	reading bool   // readAhead runs
	waiting bool   // a read of the server waits for readAhead
	stop    bool   // the server reads again, so readAhead ends with its next read
}

// watch begins to watch, and returns the context of the connection's requests.
func (c *watched) watch(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cancel = cancel
	return ctx
}

func (c *watched) unwatch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off, c.stop = true, true
}

// Read implements net.Conn.
func (c *watched) Read(p []byte) (int, error) {
	n, err := c.read(p)
	if len(p) != 1 {
		c.readRequest(p[:n])
	} else if n == 1 {
		c.mu.Lock()
		defer c.mu.Unlock()
		switch {
		case c.off || c.cancel == nil:
		case c.reading:
			c.stop = false
		case c.err == nil:
			c.reading, c.stop = true, false
			go c.readAhead()
		}
	}
	return n, err
}

// readRequest takes note of a part of a request that the server has read.
func (c *watched) readRequest(p []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.replied = false
	if missing := len(prior) - len(c.begins); missing > 0 {
		c.begins = append(c.begins, p[:min(missing, len(p))]...)
		c.off = c.off || string(c.begins) == prior
	}
}

// Write implements net.Conn.
func (c *watched) Write(p []byte) (int, error) {
	c.mu.Lock()
	c.replied = true
	c.mu.Unlock()
	return c.Conn.Write(p)
}

func (c *watched) read(p []byte) (int, error) {
	c.mu.Lock()
	c.stop = true
	for c.reading && len(c.ahead) == 0 && c.err == nil && len(p) > 0 {
		c.waiting = true
		c.changed.Wait()
		c.waiting = false
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
		if errors.Is(err, os.ErrDeadlineExceeded) { // of this read
			c.err = nil
		}
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
		if !c.note(buffer[:n], err) {
			return
		}
	}
}

// note takes what readAhead has read. It returns whether to go on.
func (c *watched) note(p []byte, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.changed.Broadcast()
	c.ahead = append(c.ahead, p...)
	late := errors.Is(err, os.ErrDeadlineExceeded)
	switch {
	case err == nil && !c.stop && len(c.ahead) >= mostAhead:
		if !c.replied { // otherwise these are requests that follow
			c.err = errAhead
			c.left()
		}
	case err != nil && !late:
		c.err = err
		c.left()
	case late && c.waiting:
		c.err = err
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
	c.mu.Unlock()
	err := c.Conn.Close()
	if cancel != nil {
		cancel()
	}
	return err
}
