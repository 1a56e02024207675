package httplimit_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/internal/tries/triestest"
)

// counted is a gate that admits so many calls, with one place.
type counted struct {
	mu                  sync.Mutex
	left, inside, asked int
}

func (g *counted) Enter(context.Context, string) (*gate.Admission, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asked++; g.left == 0 || g.inside > 0 {
		return &gate.Admission{RetryAfter: 3 * time.Second, By: gate.ByWindow}, nil
	}
	g.left--
	g.inside++
	return &gate.Admission{OK: true, Release: func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.inside--
	}}, nil
}

func (g *counted) Penalize(context.Context, string, time.Duration) error { return nil }

// Each try of http.Transport that the upstream may have received takes a permit, or does not happen.
func TestTriesOverKeptConnections(t *testing.T) {
	for name, c := range map[string]struct {
		request func(t testing.TB, url string) *http.Request
		repeats bool // by http.Transport
	}{
		"GET":     {get, true},
		"HEAD":    {of(http.MethodHead), true},
		"OPTIONS": {of(http.MethodOptions), true},
		"POST with a key": {func(t testing.TB, url string) *http.Request {
			r := of(http.MethodPost)(t, url)
			r.Header.Set("Idempotency-Key", "1")
			return r
		}, true},
		"POST with a key and a body": {func(t testing.TB, url string) *http.Request {
			r, err := http.NewRequest(http.MethodPost, url, strings.NewReader("fares"))
			require.NoError(t, err)
			r.Header.Set("Idempotency-Key", "1")
			return r
		}, true},
		"POST": {of(http.MethodPost), false},
	} {
		t.Run(name, func(t *testing.T) {
			upstream, base := triestest.NewMortal(t), &http.Transport{}
			defer base.CloseIdleConnections()
			base.MaxIdleConnsPerHost = 10
			upstream.Keep(t, base, 5)
			g := &counted{left: 3}
			tr := transport(t, g, httplimit.WithBase(base))
			_, err := tr.RoundTrip(c.request(t, upstream.URL()))
			require.Error(t, err)
			var repeat *httplimit.RepeatError
			if !c.repeats {
				require.NotErrorAs(t, err, &repeat)
				require.EqualValues(t, 1, upstream.Received.Load())
				require.Equal(t, 2, g.left)
				return
			}
			require.ErrorAs(t, err, &repeat)
			require.ErrorIs(t, err, httplimit.ErrRefused)
			require.EqualValues(t, 3, upstream.Received.Load())
			require.Equal(t, 4, g.asked)
			require.Zero(t, g.inside)

			g.left = 1 // the last try has closed the idle connection that it had; one is left
			_, err = tr.RoundTrip(c.request(t, upstream.URL()))
			require.ErrorAs(t, err, &repeat)
			require.EqualValues(t, 4, upstream.Received.Load())
		})
	}
}

func of(method string) func(t testing.TB, url string) *http.Request {
	return func(t testing.TB, url string) *http.Request {
		r := get(t, url)
		r.Method = method
		return r
	}
}

// A request is repeated while there are permits, and its response comes with the admission of the last try. A place is free for the next
// try.
func TestTriesThatSucceed(t *testing.T) {
	upstream, base := triestest.NewMortal(t), &http.Transport{MaxIdleConnsPerHost: 10}
	defer base.CloseIdleConnections()
	upstream.Keep(t, base, 2)
	g := &counted{left: 9}
	response, err := transport(t, g, httplimit.WithBase(base)).RoundTrip(get(t, upstream.URL()))
	require.NoError(t, err, "the third connection is new")
	require.EqualValues(t, 3, upstream.Received.Load())
	require.Equal(t, 6, g.left)
	require.Equal(t, 1, g.inside)
	gate.FromContext(response.Request.Context()).Leave()
	require.Zero(t, g.inside, "the admission of the last try")
	_, err = io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Zero(t, g.inside)
}

// The context of the request ends the wait for the next permit.
func TestTriesOfCancelledRequests(t *testing.T) {
	upstream, base := triestest.NewMortal(t), &http.Transport{MaxIdleConnsPerHost: 10}
	defer base.CloseIdleConnections()
	upstream.Keep(t, base, 2)
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("the user closed the tab")
	g := &second{cancel: func() { cancel(reason) }}
	_, err := transport(t, g, httplimit.WithBase(base)).RoundTrip(get(t, upstream.URL()).WithContext(ctx))
	require.ErrorIs(t, err, reason)
	require.EqualValues(t, 1, upstream.Received.Load())
}

// second is a gate whose second call waits until its context is cancelled.
type second struct {
	gate.Gate
	cancel func()
	asked  int
}

func (g *second) Enter(ctx context.Context, _ string) (*gate.Admission, error) {
	if g.asked++; g.asked == 1 {
		return &gate.Admission{OK: true}, nil
	}
	g.cancel()
	<-ctx.Done()
	return nil, ctx.Err()
}

// A connection that was closed before anything was written costs no permit.
func TestUnwrittenTriesAreFree(t *testing.T) {
	var dials atomic.Int64
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}}
	server.Start()
	defer server.Close()
	base := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		return &unwritable{Conn: c, from: 2, n: dials.Add(1)}, err
	}}
	defer base.CloseIdleConnections()
	g := &counted{left: 2}
	tr := transport(t, g, httplimit.WithBase(base))
	for range 2 {
		r := get(t, server.URL)
		r.Header.Set("X-Long", strings.Repeat("x", 8<<10)) // longer than the buffer of net/http
		response, err := tr.RoundTrip(r)
		require.NoError(t, err)
		_ = response.Body.Close()
	}
	require.EqualValues(t, 2, dials.Load())
	require.Equal(t, 2, g.asked)
}

// unwritable is a connection, of which the first of all fails with its second request, before a byte is written.
type unwritable struct {
	net.Conn
	from, n int64
	writes  int64
}

func (c *unwritable) Write(p []byte) (int, error) {
	if c.n == 1 && strings.HasPrefix(string(p), "GET ") {
		if c.writes++; c.writes >= c.from {
			return 0, net.ErrClosed
		}
	}
	return c.Conn.Write(p)
}

// Over HTTP/2 net/http repeats what the server has refused, seven times.
func TestTriesOverHTTP2(t *testing.T) {
	for _, code := range []uint32{7, 1} { // REFUSED_STREAM and PROTOCOL_ERROR
		for method, body := range map[string]io.Reader{http.MethodGet: nil, http.MethodPost: strings.NewReader("fares")} {
			addr, received := triestest.NewRefuser(t, code)
			base := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
			g := &counted{left: 1}
			r, err := http.NewRequest(method, "https://"+addr+"/fares", body)
			require.NoError(t, err)
			_, err = transport(t, g, httplimit.WithBase(base)).RoundTrip(r)
			var repeat *httplimit.RepeatError
			require.ErrorAs(t, err, &repeat, "%v %v", code, method)
			require.EqualValues(t, 1, received.Load())
			require.Equal(t, 2, g.asked)
			base.CloseIdleConnections()
		}
	}
}

// A base that goes from host to host takes a permit for each try once the request has been written to its own host, or to the same host again. A
// request of the base before that, as for a token, costs nothing more.
func TestTriesOverSeveralHosts(t *testing.T) {
	var received [3]atomic.Int64
	var urls [3]string
	for i := range urls {
		server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { received[i].Add(1) }))
		defer server.Close()
		urls[i] = server.URL
	}
	for name, c := range map[string]struct {
		tries   []int // hosts; the request's own is 0
		permits int
	}{
		"a token before":         {[]int{1, 0}, 1},
		"a base that rewrites":   {[]int{1, 2}, 1},
		"there and back":         {[]int{0, 1, 0}, 3},
		"to others":              {[]int{0, 1, 2}, 3},
		"the same":               {[]int{0, 0, 0}, 3},
		"a token between":        {[]int{1, 0, 1, 0}, 3},
		"elsewhere, there, back": {[]int{1, 2, 1}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			sender := &http.Transport{}
			defer sender.CloseIdleConnections()
			var several base = func(r *http.Request) (response *http.Response, err error) {
				for i, host := range c.tries {
					try, err := http.NewRequestWithContext(r.Context(), r.Method, urls[host], nil)
					if err != nil {
						return nil, err
					}
					if response, err = sender.RoundTrip(try); err != nil {
						return nil, err
					}
					if i < len(c.tries)-1 {
						_ = response.Body.Close()
					}
				}
				return response, nil
			}
			g := &counted{left: 9}
			response, err := transport(t, g, httplimit.WithBase(several)).RoundTrip(get(t, urls[0]))
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			require.Equal(t, c.permits, g.asked)
			require.Zero(t, g.inside)

			g = &counted{left: c.permits - 1}
			before := received[0].Load() + received[1].Load() + received[2].Load()
			_, err = transport(t, g, httplimit.WithBase(several)).RoundTrip(get(t, urls[0]))
			require.ErrorIs(t, err, httplimit.ErrRefused)
			require.Less(t, received[0].Load()+received[1].Load()+received[2].Load()-before, int64(len(c.tries)), "the last try was not made")
		})
	}
}
