package httplimit_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// A client that closes its direction after its requests gets its responses, whether or not it gets a 100 in between.
func TestClientsThatFinishSending(t *testing.T) {
	for name, c := range map[string]struct {
		requests string
		want     []int
	}{
		"a request":                {"GET / HTTP/1.1\r\nHost: h\r\n\r\n", []int{200}},
		"of HTTP/1.0":              {"GET / HTTP/1.0\r\n\r\n", []int{503}},
		"a body":                   {"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nfares", []int{200}},
		"a long target":            {"GET /" + strings.Repeat("x", 50_000) + " HTTP/1.1\r\nHost: h\r\n\r\n", []int{200}},
		"a request and a line":     {"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n\r\n", []int{200}},
		"two requests in one":      {strings.Repeat("GET / HTTP/1.1\r\nHost: h\r\n\r\n", 2), []int{200, 200}},
		"two requests with bodies": {strings.Repeat("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nfares", 2), []int{200, 200}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := limited(t, gate.One(bursty(t, 4, tb.WithInitialPermits(0)), time.Hour), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(w, r.Body)
			}))
			c1 := connect(t, watched(t, h))
			_, err := io.WriteString(c1, c.requests)
			require.NoError(t, err)
			require.NoError(t, c1.(*net.TCPConn).CloseWrite())
			responses := bufio.NewReader(c1)
			for _, want := range c.want {
				response, err := http.ReadResponse(responses, nil)
				for err == nil && response.StatusCode == http.StatusContinue {
					response, err = http.ReadResponse(responses, nil)
				}
				require.NoError(t, err)
				require.Equal(t, want, response.StatusCode)
				body, err := io.ReadAll(response.Body)
				require.NoError(t, err)
				if strings.Contains(c.requests, "fares") {
					require.Equal(t, "fares", string(body))
				}
			}
		})
	}
}

// A response that begins in time is not preceded by another one.
func TestFastResponsesHaveNoProbe(t *testing.T) {
	c := connect(t, watched(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok")
		_ = http.NewResponseController(w).Flush()
		time.Sleep(300 * time.Millisecond)
		_, _ = io.WriteString(w, "!")
	})))
	_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	require.NoError(t, err)
	time.Sleep(20 * time.Millisecond) // usually the response has begun
	_ = c.(*net.TCPConn).CloseWrite()
	all, err := io.ReadAll(c)
	require.NoError(t, err)
	if !strings.HasPrefix(string(all), "HTTP/1.1 200 OK\r\n") {
		require.True(t, strings.HasPrefix(string(all), "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"), "%s", all)
	}
	require.NotContains(t, strings.TrimPrefix(string(all), "HTTP/1.1 100"), "HTTP/1.1 100", "a probe within the response")
}

// A client that has left ends its request, after its direction was closed, too, and if nobody reads the body of the request.
func TestClientsThatFinishAndLeave(t *testing.T) {
	for name, c := range map[string]struct {
		request string
		leave   func(c *net.TCPConn)
	}{
		"at once":            {"GET / HTTP/1.1\r\nHost: h\r\n\r\n", func(c *net.TCPConn) { _ = c.Close() }},
		"later":              {"GET / HTTP/1.1\r\nHost: h\r\n\r\n", func(c *net.TCPConn) { _ = c.CloseWrite(); time.Sleep(300 * time.Millisecond); _ = c.Close() }},
		"with more":          {"GET / HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n", func(c *net.TCPConn) { _ = c.CloseWrite(); time.Sleep(50 * time.Millisecond); _ = c.Close() }},
		"an unread body":     {"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nfares", func(c *net.TCPConn) { _ = c.Close() }},
		"a body that broke":  {"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 50\r\n\r\nfares", func(c *net.TCPConn) { _ = c.Close() }},
		"a reset":            {"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nfares", func(c *net.TCPConn) { _ = c.SetLinger(0); _ = c.Close() }},
		"chunks":             {"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfares\r\n", func(c *net.TCPConn) { _ = c.Close() }},
		"a body of HTTP/1.0": {"POST / HTTP/1.0\r\nContent-Length: 5\r\n\r\nfares", func(c *net.TCPConn) { _ = c.Close() }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			began, ended := make(chan bool, 9), make(chan error, 9)
			h := limited(t, gate.One(bursty(t, 0.001, tb.WithInitialPermits(0)), time.Hour), http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
			conn := connect(t, watched(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				began <- true
				h.ServeHTTP(w, r)
				ended <- r.Context().Err()
			})))
			_, err := io.WriteString(conn, c.request)
			require.NoError(t, err)
			<-began
			c.leave(conn.(*net.TCPConn))
			select {
			case err := <-ended:
				require.ErrorIs(t, err, context.Canceled)
			case <-time.After(30 * time.Second):
				t.Fatal("the request still waits")
			}
		})
	}
}

// A client that only has an unread body is no client that has left.
func TestUnreadBodiesOfClientsThatStay(t *testing.T) {
	c := connect(t, watched(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(1200 * time.Millisecond) // longer than a look takes to come
		_, _ = fmt.Fprint(w, r.Context().Err())
	})))
	_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nfare")
	require.NoError(t, err)
	time.AfterFunc(1300*time.Millisecond, func() { _, _ = io.WriteString(c, "s") })
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Equal(t, "<nil>", string(text))
}
