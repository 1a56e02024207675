package httplimit_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/internal/tries/triestest"
)

// servers serve with WatchClients, and as net/http does.
var servers = map[string]func(server *http.Server, l net.Listener) net.Listener{
	"net/http":     func(_ *http.Server, l net.Listener) net.Listener { return l },
	"WatchClients": httplimit.WatchClients,
}

func hostileServe(t *testing.T, watch func(server *http.Server, l net.Listener) net.Listener, server *http.Server) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	watching := watch(server, l)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(watching) }()
	t.Cleanup(func() { _ = server.Close(); <-ended })
	return l.Addr().String()
}

// A client that has read its whole response may send its next request, however long: it has waited for its response.
func TestHostileNextRequestWhileTheHandlerEnds(t *testing.T) {
	for name, watch := range servers {
		t.Run(name, func(t *testing.T) {
			cancelled := make(chan error, 9)
			addr := hostileServe(t, watch, &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				n, err := io.Copy(io.Discard, r.Body)
				text := fmt.Sprint(n, err)
				w.Header().Set("Content-Length", fmt.Sprint(len(text)))
				_, _ = io.WriteString(w, text)
				_ = http.NewResponseController(w).Flush()
				time.Sleep(200 * time.Millisecond) // work after the response: a log, a metric, a release of a place
				cancelled <- r.Context().Err()
			})})
			c := connect(t, addr)
			answers := bufio.NewReader(c)
			for _, n := range []int{0, 200_000, 0} {
				_, err := fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", n, strings.Repeat("x", n))
				require.NoError(t, err)
				response, err := http.ReadResponse(answers, nil)
				require.NoError(t, err, "the request of %d bytes", n)
				text, err := io.ReadAll(response.Body)
				require.NoError(t, err)
				require.Equal(t, fmt.Sprint(n, error(nil)), string(text))
			}
			require.NoError(t, <-cancelled)
			require.NoError(t, <-cancelled)
		})
	}
}

// The same while net/http notes that the connection is idle: a response was begun, and the next request is not read yet.
func TestNextRequestOfAnIdleConnection(t *testing.T) {
	for name, watch := range servers {
		t.Run(name, func(t *testing.T) {
			idle, proceed := make(chan bool), make(chan bool)
			server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				n, err := io.Copy(io.Discard, r.Body)
				text := fmt.Sprint(n, err)
				w.Header().Set("Content-Length", fmt.Sprint(len(text)))
				_, _ = io.WriteString(w, text)
				_ = http.NewResponseController(w).Flush()
				time.Sleep(50 * time.Millisecond) // the next request begins
				if err := r.Context().Err(); err != nil {
					t.Error(err)
				}
			})}
			server.ConnState = func(_ net.Conn, state http.ConnState) {
				if state == http.StateIdle {
					idle <- true
					<-proceed
				}
			}
			c := connect(t, hostileServe(t, watch, server))
			answers := bufio.NewReader(c)
			read := func(n int) {
				response, err := http.ReadResponse(answers, nil)
				require.NoError(t, err)
				text, err := io.ReadAll(response.Body)
				require.NoError(t, err)
				require.Equal(t, fmt.Sprint(n, error(nil)), string(text))
			}
			const n = 200_000
			_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
			require.NoError(t, err)
			read(0)
			_, err = io.WriteString(c, "POST /")
			require.NoError(t, err)
			<-idle
			_, err = fmt.Fprintf(c, " HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", n, strings.Repeat("x", n))
			require.NoError(t, err)
			time.Sleep(50 * time.Millisecond) // the watch reads on
			proceed <- true
			read(n)
			<-idle
			proceed <- true
		})
	}
}

// The context of a request whose connection is hijacked does not end while the handler uses the connection.
func TestHostileContextOfHijackedConnections(t *testing.T) {
	for name, watch := range servers {
		t.Run(name, func(t *testing.T) {
			began, hijacked, ended := make(chan bool, 1), make(chan bool, 1), make(chan error, 1)
			addr := hostileServe(t, watch, &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				began <- true
				time.Sleep(100 * time.Millisecond) // the client sends its first byte
				conn, _, err := http.NewResponseController(w).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				defer func() { _ = conn.Close() }()
				hijacked <- true
				_, _ = io.ReadAll(conn)
				time.Sleep(200 * time.Millisecond) // the client has closed its direction, and waits for the reply
				ended <- r.Context().Err()
			})})
			c := connect(t, addr)
			_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
			<-began
			_, _ = io.WriteString(c, "x")
			<-hijacked
			require.NoError(t, c.(*net.TCPConn).CloseWrite())
			require.NoError(t, <-ended)
		})
	}
}

// A read deadline of a handler does not end the watch for good.
func TestHostileDeadlinesOfHandlers(t *testing.T) {
	for _, more := range []string{"", "x"} {
		for name, watch := range servers {
			t.Run(fmt.Sprintf("%s %q", name, more), func(t *testing.T) {
				began, left, ended := make(chan bool, 1), make(chan bool, 1), make(chan error, 1)
				addr := hostileServe(t, watch, &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					began <- true
					time.Sleep(50 * time.Millisecond)
					_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(50 * time.Millisecond))
					<-left
					select {
					case <-r.Context().Done():
						ended <- nil
					case <-time.After(5 * time.Second):
						ended <- errors.New("the client has left, and its request goes on")
					}
				})})
				c := connect(t, addr)
				_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
				<-began
				_, _ = io.WriteString(c, more)
				time.Sleep(300 * time.Millisecond)
				require.NoError(t, c.Close())
				left <- true
				err := <-ended
				if name == "net/http" && more != "" {
					require.Error(t, err, "net/http has stopped watching")
					return
				}
				require.NoError(t, err)
			})
		}
	}
}

// HTTP/2 without TLS works as without WatchClients, however its frames are cut.
func TestHostileHTTP2(t *testing.T) {
	for name, watch := range servers {
		t.Run(name, func(t *testing.T) {
			var protocols http.Protocols
			protocols.SetUnencryptedHTTP2(true)
			addr := hostileServe(t, watch, &http.Server{Protocols: &protocols, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				n, err := io.Copy(io.Discard, r.Body)
				_, _ = fmt.Fprint(w, n, err)
			}), ConnState: func(net.Conn, http.ConnState) { time.Sleep(5 * time.Millisecond) }})
			base := &http.Transport{Protocols: &protocols}
			defer base.CloseIdleConnections()
			for i := range 600 { // one in about 60 fails
				body, write := io.Pipe()
				go func() {
					for range 5 {
						_, _ = write.Write([]byte("x"))
					}
					_, _ = write.Write(make([]byte, 300_000))
					for range 5 {
						_, _ = write.Write([]byte("x"))
					}
					_ = write.Close()
				}()
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr+"/", body)
				require.NoError(t, err)
				response, err := base.RoundTrip(r)
				require.NoError(t, err, i)
				text, err := io.ReadAll(response.Body)
				require.NoError(t, err, i)
				require.Equal(t, "300010 <nil>", string(text))
			}
		})
	}
}

// line is a gate with one place, for which calls wait.
type line chan struct{}

func (g line) Enter(ctx context.Context, _ string) (*gate.Admission, error) {
	select {
	case g <- struct{}{}:
		return &gate.Admission{OK: true, Release: func() { <-g }}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (line) Penalize(context.Context, string, time.Duration) error { return nil }

// A try that waits for its place does not keep what the call with the place waits for: the only connection.
func TestHostileConnectionsOfWaitingTries(t *testing.T) {
	upstream, base := triestest.NewMortal(t), &http.Transport{MaxConnsPerHost: 1}
	defer base.CloseIdleConnections()
	upstream.Keep(t, base, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	g := line(make(chan struct{}, 1))
	tr := transport(t, g, httplimit.WithBase(base))
	g <- struct{}{} // so that all calls wait
	ended := make(chan error, 4)
	for range 4 {
		go func() {
			response, err := tr.RoundTrip(get(t, upstream.URL()).WithContext(ctx))
			if err == nil {
				_, err = io.Copy(io.Discard, response.Body)
				_ = response.Body.Close()
			}
			ended <- err
		}()
	}
	time.Sleep(100 * time.Millisecond)
	<-g
	for i := range 4 {
		select {
		case err := <-ended:
			require.NoError(t, err)
		case <-time.After(8 * time.Second):
			t.Errorf("%d of 4 calls have ended; the others wait for each other", i)
			cancel()
			return
		}
	}
}

// detached is a base that lets calls outlive their callers.
type detached struct{ http.RoundTripper }

func (d detached) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := httplimit.WithoutCancel(r.Context())
	context.AfterFunc(ctx, cancel)
	return d.RoundTripper.RoundTrip(r.WithContext(ctx))
}

// Of several Transports around a base, each keeps a try from happening.
func TestHostileTriesOfSeveralTransports(t *testing.T) {
	for name, order := range map[string][2]int{"the inner one refuses": {99, 1}, "the outer one refuses": {1, 99}} {
		t.Run(name, func(t *testing.T) {
			addr, received := triestest.NewRefuser(t, 7)
			base := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
			t.Cleanup(base.CloseIdleConnections)
			inner := transport(t, &counted{left: order[1]}, httplimit.WithBase(detached{base}))
			outer := transport(t, &counted{left: order[0]}, httplimit.WithBase(inner))
			var ended atomic.Bool
			r := get(t, "https://"+addr+"/")
			go func() {
				_, _ = outer.RoundTrip(r)
				ended.Store(true)
			}()
			deadline := time.Now().Add(5 * time.Second)
			for !ended.Load() && time.Now().Before(deadline) {
				time.Sleep(10 * time.Millisecond)
			}
			require.EqualValues(t, 1, received.Load(), "requests at the upstream, of one permit")
			require.True(t, ended.Load())
		})
	}
}
