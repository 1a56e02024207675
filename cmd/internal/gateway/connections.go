package gateway

import (
	"container/list"
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
)

// connections is a listener that bounds the number of open connections. At the bound, it closes the connection that has been idle longest,
// between two requests, to accept a new one. If none is idle, the new one waits until a connection is idle or closed. It never closes a
// connection that serves a request.
//
// The server must use note as its ConnState, context as its ConnContext, and a Handler wrapped by handler.
type connections struct {
	net.Listener
	most int

	mu      sync.Mutex
	changed sync.Cond  // signalled when a connection is idle or closed, or the listener is closed
	open    int        // accepted connections that are not closed
	idle    *list.List // of *connection, the longest idle first
	closed  bool
}

func newConnections(l net.Listener, most int) *connections {
	c := &connections{Listener: l, most: most, idle: list.New()}
	c.changed.L = &c.mu
	return c
}

// Accept implements net.Listener.
func (l *connections) Accept() (net.Conn, error) {
	accepted, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if !l.makeRoom() {
		_ = accepted.Close()
		return nil, net.ErrClosed
	}
	return &connection{Conn: accepted, of: l}, nil
}

// makeRoom blocks until one more connection may be open, and counts it. It returns false if the listener is closed.
func (l *connections) makeRoom() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.open >= l.most && !l.closed {
		if oldest := l.idle.Front(); oldest == nil {
			l.changed.Wait()
		} else {
			c := l.idle.Remove(oldest).(*connection)
			c.idle, c.evicted = nil, true
			l.mu.Unlock()
			_ = c.Close()
			l.mu.Lock()
		}
	}
	if l.closed {
		return false
	}
	l.open++
	return true
}

// Close implements net.Listener.
func (l *connections) Close() error {
	l.mu.Lock()
	l.closed = true
	l.changed.Broadcast()
	l.mu.Unlock()
	return l.Listener.Close()
}

// note records a change of a connection's state.
func (l *connections) note(conn net.Conn, state http.ConnState) {
	c := conn.(*connection)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case state != http.StateIdle:
		l.busy(c)
	case !c.closed:
		c.idle = l.idle.PushBack(c)
		l.changed.Signal()
	}
}

// busy removes a connection from the idle list. l.mu must be held.
func (l *connections) busy(c *connection) {
	if c.idle != nil {
		l.idle.Remove(c.idle)
		c.idle = nil
	}
}

type connectionKey struct{}

// context adds the connection to the context of its requests.
func (l *connections) context(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, conn)
}

// handler returns a handler that drops requests whose connection was evicted. A request can arrive just before the eviction, before the server
// has seen it. Its response could not be sent, and its client may retry.
func (l *connections) handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connectionKey{}).(*connection); ok && c.wasEvicted() {
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, r)
	})
}

// connection is an accepted connection. of.mu guards its fields.
type connection struct {
	net.Conn
	of      *connections
	idle    *list.Element // in of.idle; nil while a request is served
	evicted bool          // closed to make room
	closed  bool
}

func (c *connection) wasEvicted() bool {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	return c.evicted
}

// NetConn returns the connection within, for httplimit.WatchClients.
func (c *connection) NetConn() net.Conn { return c.Conn }

// CloseWrite closes the direction to the client. The other direction stays open.
func (c *connection) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// Close implements net.Conn. The first call makes room for another connection.
func (c *connection) Close() error {
	err := c.Conn.Close()
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if !c.closed {
		c.closed = true
		c.of.busy(c)
		c.of.open--
		c.of.changed.Signal()
	}
	return err
}
