package gateway

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Idle connections of one client do not keep others out.
func TestIdleConnectionsMakeRoom(t *testing.T) {
	_, addr := places(t, "--max-connections", "20")
	for range 20 {
		c, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer func() { _ = c.Close() }()
		_, err = io.WriteString(c, "GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
		require.NoError(t, err)
		_, err = c.Read(make([]byte, 1000))
		require.NoError(t, err)
	}
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get("http://" + addr + "/x")
	require.NoError(t, err)
	_ = r.Body.Close()
}

// A connection with a stream is never closed to make room.
func TestStreamsDoNotMakeRoom(t *testing.T) {
	_, addr := places(t, "--max-connections", "2")
	streams := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	stream, err := streams.Get("http://" + addr + "/events")
	require.NoError(t, err)
	for range 5 {
		c, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer func() { _ = c.Close() }()
		require.NoError(t, c.SetDeadline(time.Now().Add(30*time.Second)))
		_, err = io.WriteString(c, "GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
		require.NoError(t, err)
		_, err = c.Read(make([]byte, 1000))
		require.NoError(t, err)
	}
	text, err := io.ReadAll(stream.Body)
	require.NoError(t, err)
	require.Equal(t, 10, strings.Count(string(text), "data: "))
	require.NoError(t, stream.Body.Close())
}

// The connection that has been idle longest makes room. If none is idle, a new one waits until one is, or until one ends.
func TestWhichConnectionsMakeRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &pipes{make(chan net.Conn), make(chan struct{})}
		bounded := newConnections(l, 3)
		work := make(chan struct{})
		server := &http.Server{ConnState: bounded.note, Handler: bounded.handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/work" {
				<-work
			}
		})), ConnContext: bounded.context}
		ended := make(chan error)
		go func() { ended <- server.Serve(bounded) }()
		type client struct {
			net.Conn
			from *bufio.Reader
		}
		dial := func() *client {
			ours, theirs := net.Pipe()
			l.calls <- theirs
			return &client{ours, bufio.NewReader(ours)}
		}
		send := func(c *client, path string) {
			go func() { _, _ = io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: h\r\n\r\n") }()
			synctest.Wait()
		}
		answered := func(c *client) {
			answer, err := http.ReadResponse(c.from, nil)
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, answer.StatusCode)
			synctest.Wait()
		}
		closed := func(c *client) {
			_, err := c.from.ReadByte()
			require.Equal(t, io.EOF, err)
		}
		a, b, c := dial(), dial(), dial()
		for _, one := range []*client{a, b, c, a} {
			send(one, "/")
			answered(one)
		}
		d := dial()
		closed(b)
		send(d, "/work")
		send(a, "/work")
		e := dial()
		closed(c)
		send(e, "/work")
		f := dial()
		send(f, "/")
		synctest.Wait()
		require.Equal(t, 3, bounded.open)
		require.Zero(t, bounded.idle.Len(), "all work")
		for _, one := range []*client{a, d, e} {
			go func() { _, _ = io.Copy(io.Discard, one.from) }()
		}
		work <- struct{}{} // one of them is idle
		answered(f)
		require.Equal(t, 3, bounded.open)
		close(work)
		synctest.Wait()
		require.Equal(t, 3, bounded.idle.Len(), "those that worked were not closed")
		require.NoError(t, f.Close())
		synctest.Wait()
		require.Equal(t, 2, bounded.open)
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-ended, http.ErrServerClosed)
		require.Zero(t, bounded.open)
		require.Zero(t, bounded.idle.Len())
	})
}

// A request that comes when its connection has just been closed for another is not served: its client gets no answer, and may send it again.
func TestRequestsOfClosedConnections(t *testing.T) {
	l := newConnections(nil, 1)
	c := &connection{Conn: &net.TCPConn{}, of: l}
	require.True(t, l.makeRoom())
	l.note(c, http.StateIdle)
	require.True(t, l.makeRoom())
	l.note(c, http.StateActive)
	served := 0
	r, err := http.NewRequestWithContext(l.context(t.Context(), c), http.MethodGet, "/", nil)
	require.NoError(t, err)
	h := l.handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served++ }))
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { h.ServeHTTP(nil, r) })
	require.Zero(t, served)
	r = r.WithContext(l.context(t.Context(), &connection{of: l}))
	h.ServeHTTP(nil, r)
	require.Equal(t, 1, served)
}
