package gateway

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// inMemory serves on connections that the returned function makes.
func inMemory(t *testing.T, server *http.Server) (dial func() net.Conn) {
	l := &pipes{make(chan net.Conn), make(chan struct{})}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	return func() net.Conn {
		ours, theirs := net.Pipe()
		l.calls <- theirs
		return ours
	}
}

// slowly is what a test of slow clients has: a gateway whose rows let one call at a time pass, and an upstream.
type slowly struct {
	*proxy
	dial func() net.Conn
}

func newSlowly(t *testing.T, upstream http.HandlerFunc, args ...string) *slowly {
	limits, err := registry.New(registry.Static{{Name: "/", NoRate: true, Concurrent: 1}}, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores())
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	p := openProxy(t, limits, append([]string{"--upstream", "/=http://u", "--upstream-timeout", "0"}, args...)...)
	there := inMemory(t, &http.Server{Handler: upstream})
	p.base.DialContext = func(context.Context, string, string) (net.Conn, error) { return there(), nil }
	return &slowly{p, inMemory(t, &http.Server{Handler: p, IdleTimeout: 2 * time.Minute})}
}

// post begins a call with a body, on a connection of its own.
func (s *slowly) post(t *testing.T, header string) (net.Conn, *bufio.Reader) {
	c := s.dial()
	_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: h\r\n"+header+"\r\n\r\n")
	require.NoError(t, err)
	return c, bufio.NewReader(c)
}

// early makes an upstream answer before it has the body.
func early(w http.ResponseWriter) {
	answer := http.NewResponseController(w)
	_ = answer.EnableFullDuplex()
	_ = answer.Flush()
}

func read(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }

// A client that stops sending its body has its place, and its connection, for a minute and no longer. That is its failure.
func TestSilentBodies(t *testing.T) {
	for name, test := range map[string]struct {
		upstream http.HandlerFunc
		args     []string
		begun    string // the part that is sent of a body of ten bytes
	}{
		"nothing of it comes":     {upstream: read},
		"half of it comes":        {upstream: read, begun: "12345"},
		"inbound":                 {upstream: read, begun: "12345", args: []string{"--inbound"}},
		"half a minute is enough": {upstream: read, begun: "12345", args: []string{"--body-timeout", "30s"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSlowly(t, test.upstream, test.args...)
				began := time.Now()
				c, from := s.post(t, "Content-Length: 10")
				_, err := io.WriteString(c, test.begun)
				require.NoError(t, err)
				answer, err := http.ReadResponse(from, nil)
				require.NoError(t, err)
				_, _ = io.Copy(io.Discard, from) // until it is closed
				require.Equal(t, http.StatusRequestTimeout, answer.StatusCode)
				require.Less(t, time.Since(began), 61*time.Second)
				require.GreaterOrEqual(t, time.Since(began), 30*time.Second)
				require.Zero(t, s.calls.upstreamErrors.Load())
				require.EqualValues(t, 1, s.calls.badBodies.Load())
				require.NoError(t, c.Close())

				c, from = s.post(t, "Content-Length: 2\r\nConnection: close")
				_, err = io.WriteString(c, "ok")
				require.NoError(t, err)
				answer, err = http.ReadResponse(from, nil)
				require.NoError(t, err)
				require.NotEqual(t, http.StatusTooManyRequests, answer.StatusCode, "its place is free again")
			})
		})
	}
}

// A client whose body the upstream does not wait for has its connection no longer.
func TestSilentBodiesAfterTheAnswer(t *testing.T) {
	for name, upstream := range map[string]http.HandlerFunc{
		"the upstream has no need": func(w http.ResponseWriter, _ *http.Request) {
			c, from, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_, _ = io.ReadFull(from, make([]byte, 5)) // unread bytes would turn the reply into a reset
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
				_ = c.Close()
			}
		},
		"the upstream streams": func(w http.ResponseWriter, r *http.Request) { early(w); read(w, r) },
	} {
		t.Run(name, func(t *testing.T) {
			there := httptest.NewServer(upstream)
			t.Cleanup(there.Close)
			server := newTestProxy(t, &keys{}, "--upstream", there.URL, "--body-timeout", "500ms")
			c, err := net.Dial("tcp", server.Listener.Addr().String())
			require.NoError(t, err)
			defer func() { _ = c.Close() }()
			require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
			_, err = io.WriteString(c, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n12345")
			require.NoError(t, err)
			text, err := io.ReadAll(c)
			require.NoError(t, err)
			require.Regexp(t, "^HTTP/1.1 (200|408) ", string(text), "408 if the upstream was slow to answer")
		})
	}
}

// Also a call that is answered at once has its connection for a minute at most.
func TestSilentBodiesOfNobody(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T, s *slowly){
		"no limits yet": func(_ *testing.T, s *slowly) { s.handler.Store(nil) },
		"no route":      func(_ *testing.T, s *slowly) { s.live.Load().routes = nil },
		"refused":       func(t *testing.T, s *slowly) { s.post(t, "Content-Length: 10"); synctest.Wait() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSlowly(t, read)
				prepare(t, s)
				began := time.Now()
				_, from := s.post(t, "Content-Length: 10")
				text, _ := io.ReadAll(from)
				require.Regexp(t, "^HTTP/1.1 (404|429|503)", string(text))
				require.Less(t, time.Since(began), 61*time.Second)
			})
		})
	}
}

// A client that sends something now and then may take as long as it likes, and so may the upstream. A later request on the connection has
// its full time again.
func TestPatienceWithBodies(t *testing.T) {
	const long = 10 * time.Minute
	slow := func(w http.ResponseWriter, r *http.Request) {
		read(w, r)
		time.Sleep(long)
		_, _ = io.WriteString(w, "done")
	}
	stream := func(w http.ResponseWriter, r *http.Request) {
		read(w, r)
		for range 10 {
			_, _ = io.WriteString(w, "still here\n")
			_ = http.NewResponseController(w).Flush()
			time.Sleep(long / 10)
		}
		_, _ = io.WriteString(w, "done")
	}
	for name, test := range map[string]struct {
		upstream http.HandlerFunc
		args     []string
		pause    time.Duration
	}{
		"a byte now and then":          {upstream: read, pause: 59 * time.Second, args: []string{"--body-rate", "0"}},
		"the answer takes long":        {upstream: slow},
		"the answer takes long to end": {upstream: stream},
		"no limit":                     {upstream: read, pause: time.Hour, args: []string{"--body-timeout", "0"}},
	} {
		for _, header := range []string{"Content-Length: 3", "Transfer-Encoding: chunked"} {
			t.Run(name+", "+header, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newSlowly(t, test.upstream, test.args...)
					c, from := s.post(t, header)
					parts := []string{"a", "b", "c"}
					if strings.Contains(header, "chunked") {
						parts = []string{"1\r\na\r\n", "1\r\nb\r\n", "0\r\n\r\n"}
					}
					go func() {
						for _, part := range parts {
							time.Sleep(test.pause)
							_, _ = io.WriteString(c, part)
						}
					}()
					answer, err := http.ReadResponse(from, nil)
					require.NoError(t, err)
					text, err := io.ReadAll(answer.Body)
					require.NoError(t, err)
					require.Equal(t, http.StatusOK, answer.StatusCode)
					require.Regexp(t, "^$|done$", string(text))
					require.Zero(t, s.calls.badBodies.Load())
					if answer.Close {
						return
					}
					time.Sleep(119 * time.Second)
					_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
					require.NoError(t, err, "the connection is kept")
					answer, err = http.ReadResponse(from, nil)
					require.NoError(t, err)
					_, err = io.ReadAll(answer.Body)
					require.NoError(t, err)
					require.Equal(t, http.StatusOK, answer.StatusCode)
				})
			})
		}
	}
}
