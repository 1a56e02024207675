package gateway

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A client that gives up at once leaves no more calls with the upstream than the row's concurrency.
func TestAbandonedCalls(t *testing.T) {
	for _, way := range []string{"--inbound=false", "--inbound"} {
		var now, most atomic.Int64
		end := make(chan struct{})
		upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			if n := now.Add(1); n > most.Load() {
				most.Store(n)
			}
			<-end // as most upstreams, it does its work to the end
			now.Add(-1)
		}))
		limits, err := registry.New(registry.Static{{Name: "/*", NoRate: true, Concurrent: 3}}, tokenbucket.NewMemoryStore(),
			registry.WithLocalSemaphores(), registry.WithLogger(slog.New(slog.DiscardHandler)))
		require.NoError(t, err)
		server := newTestProxy(t, limits, "--upstream", upstream.URL, way)
		const request = "GET /slow HTTP/1.1\r\nHost: h\r\n\r\n"
		for i := range 3 {
			c, err := net.Dial("tcp", server.Listener.Addr().String())
			require.NoError(t, err)
			_, _ = io.WriteString(c, request)
			require.Eventually(t, func() bool { return int(now.Load()) == i+1 }, 30*time.Second, time.Millisecond, "the upstream has the call")
			require.NoError(t, c.Close())
		}
		for range 20 {
			status, _ := raw(t, server, request)
			require.Equal(t, http.StatusTooManyRequests, status)
		}
		require.EqualValues(t, 3, most.Load())
		close(end)
		require.Eventually(t, func() bool {
			u, _, err := limits.Usage(t.Context(), "/*")
			return err == nil && u.Inside == 0
		}, 30*time.Second, time.Millisecond, "the places are free when the upstream has answered")
		upstream.Close()
		limits.Close()
	}
}

// The place of a client that gave up is free when --upstream-timeout is over. Once the upstream has begun to answer, it is free at once.
func TestPlacesOfAbandonedCalls(t *testing.T) {
	for name, tt := range map[string]struct {
		upstream http.HandlerFunc
		answered bool
		free     time.Duration // after the client has gone
	}{
		"an upstream that never answers": {func(http.ResponseWriter, *http.Request) { time.Sleep(time.Hour) }, false, 30 * time.Second},
		"an upstream that answers":       {func(http.ResponseWriter, *http.Request) { time.Sleep(5 * time.Second) }, false, 5 * time.Second},
		"a stream": {func(w http.ResponseWriter, _ *http.Request) {
			_ = http.NewResponseController(w).Flush()
			time.Sleep(time.Hour)
		}, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				defer time.Sleep(time.Hour) // until the upstream has ended
				s := newSlowly(t, tt.upstream, "--upstream-timeout", "30s")
				c := s.dial()
				_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
				require.NoError(t, err)
				if tt.answered {
					answer, err := http.ReadResponse(bufio.NewReader(c), nil)
					require.NoError(t, err)
					defer func() { _ = answer.Body.Close() }()
				}
				synctest.Wait()
				began := time.Now()
				require.NoError(t, c.Close())
				s.running.Wait()
				require.Equal(t, tt.free, time.Since(began))
			})
		})
	}
}

// Rows without a concurrency hold nothing: their calls end with their clients.
func TestAbandonedCallsOfRates(t *testing.T) {
	arrived, gone := make(chan struct{}), make(chan struct{})
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-r.Context().Done()
		close(gone)
	}))
	defer upstream.Close()
	server := newTestProxy(t, &keys{}, "--upstream", upstream.URL, "--upstream-timeout", "0")
	c, err := net.Dial("tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	require.NoError(t, err)
	<-arrived
	require.NoError(t, c.Close())
	<-gone
}

// Calls that go on without their clients end when the drain period is over.
func TestAbandonedCallsAreCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		defer time.Sleep(time.Hour) // until the upstream has ended
		s := newSlowly(t, func(http.ResponseWriter, *http.Request) { time.Sleep(time.Hour) })
		requests, cut := context.WithCancel(t.Context())
		s.requests = requests
		c := s.dial()
		_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
		require.NoError(t, err)
		synctest.Wait()
		require.NoError(t, c.Close())
		synctest.Wait()
		require.EqualValues(t, 1, s.calls.inFlight.Load())
		cut()
		synctest.Wait()
		require.Zero(t, s.calls.inFlight.Load())
	})
}

// concurrent returns limits that let the given number of calls pass at once.
func concurrent(t *testing.T, most int) *registry.Registry {
	t.Helper()
	limits, err := registry.New(registry.Static{{Name: "/*", NoRate: true, Concurrent: most}}, tokenbucket.NewMemoryStore(),
		registry.WithLocalSemaphores(), registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	return limits
}

// inside returns how many calls hold a place.
func inside(t *testing.T, limits *registry.Registry) int {
	t.Helper()
	u, _, err := limits.Usage(t.Context(), "/*")
	require.NoError(t, err)
	return u.Inside
}

// halfPost begins a call whose body is larger than the buffers on its way, so that the upstream gets the call.
func halfPost(t *testing.T, server *httptest.Server) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetReadDeadline(time.Now().Add(30*time.Second)))
	_, _ = io.WriteString(c, "POST /slow HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n"+strings.Repeat("x", 100_000))
	return c
}

// A client that leaves before its body is complete leaves no more calls with the upstream than the row's concurrency. Its place is free when
// the upstream has finished.
func TestAbandonedBodies(t *testing.T) {
	for _, secure := range []bool{false, true} {
		for _, way := range []string{"--inbound=false", "--inbound"} {
			t.Run(fmt.Sprintf("%s, secure: %t", way, secure), func(t *testing.T) {
				var now, most atomic.Int64
				begun, end := make(chan struct{}, 100), make(chan struct{})
				upstream := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { // it does not read the body
					if n := now.Add(1); n > most.Load() {
						most.Store(n)
					}
					begun <- struct{}{}
					<-end
					now.Add(-1)
				}))
				start := upstream.Start
				if secure {
					start = upstream.StartTLS
				}
				start()
				defer upstream.Close()
				limits := concurrent(t, 3)
				p := openProxy(t, limits, "--upstream", upstream.URL, "--upstream-timeout", "0", way)
				p.base.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
				server := httptest.NewServer(p)
				defer server.Close()
				for range 3 {
					c := halfPost(t, server)
					<-begun
					require.NoError(t, c.Close())
				}
				for range 20 {
					c := halfPost(t, server)
					answer, err := http.ReadResponse(bufio.NewReader(c), nil)
					require.NoError(t, err)
					require.Equal(t, http.StatusTooManyRequests, answer.StatusCode)
					require.NoError(t, c.Close())
				}
				require.Equal(t, 3, inside(t, limits))
				require.EqualValues(t, 3, most.Load())
				close(end)
				require.Eventually(t, func() bool { return inside(t, limits) == 0 }, 30*time.Second, time.Millisecond, "the upstream has finished")
			})
		}
	}
}

// An upstream that waits for the rest of a body that broke off learns of its end at once, and the place is free.
func TestAbandonedBodiesEndReads(t *testing.T) {
	begun, failed := make(chan struct{}), make(chan error, 1)
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(begun)
		_, err := io.Copy(io.Discard, r.Body)
		failed <- err
	}))
	defer upstream.Close()
	limits := concurrent(t, 1)
	server := newTestProxy(t, limits, "--upstream", upstream.URL, "--upstream-timeout", "0")
	c := halfPost(t, server)
	<-begun
	require.Equal(t, 1, inside(t, limits))
	require.NoError(t, c.Close())
	require.ErrorIs(t, <-failed, io.ErrUnexpectedEOF)
	require.Eventually(t, func() bool { return inside(t, limits) == 0 }, 30*time.Second, time.Millisecond)
}

// An upstream that does not close its side keeps the place for --upstream-timeout, one that answers without an end until 4 KiB have come, and
// either as long as the gateway drains.
func TestAbandonedBodiesAreBounded(t *testing.T) {
	const patience = 300 * time.Millisecond
	for name, tt := range map[string]struct {
		timeout time.Duration
		answers bool
		cut     bool
	}{
		"--upstream-timeout is over": {timeout: patience},
		"the answer has no end":      {answers: true},
		"the drain period is over":   {cut: true},
	} {
		t.Run(name, func(t *testing.T) {
			upstream, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer func() { _ = upstream.Close() }()
			begun := make(chan net.Conn, 1)
			go func() {
				conn, err := upstream.Accept()
				if err != nil {
					return
				}
				_, _ = io.ReadFull(conn, make([]byte, 1000))
				begun <- conn
				_, _ = io.Copy(io.Discard, conn)
				for tt.answers && err == nil {
					_, err = conn.Write(make([]byte, 1000))
				}
			}()
			limits := concurrent(t, 1)
			p := openProxy(t, limits, "--upstream", "http://"+upstream.Addr().String(), "--upstream-timeout", tt.timeout.String())
			requests, cut := context.WithCancel(t.Context())
			p.requests = requests
			server := httptest.NewServer(p)
			defer server.Close()
			c := halfPost(t, server)
			conn := <-begun
			defer func() { _ = conn.Close() }()
			require.Equal(t, 1, inside(t, limits))
			left := time.Now()
			require.NoError(t, c.Close())
			if tt.cut {
				cut()
			}
			require.Eventually(t, func() bool { return inside(t, limits) == 0 }, 30*time.Second, time.Millisecond)
			require.GreaterOrEqual(t, time.Since(left), tt.timeout)
			p.running.Wait()
			require.Zero(t, p.calls.inFlight.Load())
			cut()
		})
	}
}
