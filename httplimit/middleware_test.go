package httplimit_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

var ok = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })

func serve(t testing.TB, h http.Handler) *http.Response {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/fares?from=FRA", nil))
	return w.Result()
}

func text(t testing.TB, r *http.Response) string {
	t.Helper()
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	return string(b)
}

// What is short of a permit by float noise only is one: five are left after a second at seven a second and two requests.
func TestMiddlewareFieldsWithoutNoise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bursty(t, 7, tb.WithInitialPermits(0))
		h := limited(t, gate.One(l, 0), ok)
		require.Equal(t, http.StatusTooManyRequests, serve(t, h).StatusCode)
		time.Sleep(400 * time.Millisecond)
		require.Equal(t, []string{`"default";r=1;t=1`}, serve(t, h).Header["Ratelimit"])
		time.Sleep(600 * time.Millisecond)
		require.Equal(t, []string{`"default";r=5;t=1`}, serve(t, h).Header["Ratelimit"])
		ok, err := l.TryAcquire(t.Context(), 5, 0)
		require.NoError(t, err)
		require.True(t, ok, "so many were there")
	})
}

// The fields over the life of a bucket of five at five a second, of which up to 200 ms may be waited.
func TestMiddlewareFields(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := limited(t, gate.One(bursty(t, 5, tb.WithInitialPermits(5)), 200*time.Millisecond), ok)
		start := time.Now()
		for i, want := range []string{
			`"default";r=4;t=1`, `"default";r=3;t=1`, `"default";r=2;t=1`, `"default";r=1;t=1`, `"default";r=0;t=1`,
			`"default";r=0;t=1`, // after a wait
		} {
			response := serve(t, h)
			require.Equal(t, http.StatusOK, response.StatusCode)
			require.Equal(t, []string{`"default";q=5;w=1`}, response.Header["Ratelimit-Policy"])
			require.Equal(t, []string{want}, response.Header["Ratelimit"], "request %d", i)
			require.Empty(t, response.Header["Retry-After"])
			require.Equal(t, "ok", text(t, response))
		}
		require.Equal(t, 200*time.Millisecond, time.Since(start))

		go serve(t, h) // waits, so that the next would wait twice as long
		synctest.Wait()
		response := serve(t, h)
		require.Equal(t, http.StatusTooManyRequests, response.StatusCode)
		require.Equal(t, []string{`"default";q=5;w=1`}, response.Header["Ratelimit-Policy"])
		require.Equal(t, []string{`"default";r=0;t=1`}, response.Header["Ratelimit"])
		require.Equal(t, []string{"1"}, response.Header["Retry-After"], "200 ms, rounded up")
		require.Equal(t, "text/plain; charset=utf-8", response.Header.Get("Content-Type"))
		require.Equal(t, "too many requests: try again in 1 s\n", text(t, response))
		require.Equal(t, 200*time.Millisecond, time.Since(start), "a refusal does not wait")
	})
}

// What is said of buckets of all shapes.
func TestMiddlewarePolicy(t *testing.T) {
	for name, c := range map[string]struct {
		rate           float64
		opts           []tb.Option
		policy, passed string
		refused, after string
	}{
		"bursty":          {5, nil, `q=5;w=1`, `r=0;t=1`, `r=0;t=1`, "1"},
		"deep":            {10, []tb.Option{tb.WithMaxPermits(100), tb.WithInitialPermits(40)}, `q=100;w=10`, `r=39;t=7`, "", ""}, // 61 / 10
		"fraction":        {2.5, nil, `q=2;w=1`, `r=0;t=1`, `r=0;t=1`, "1"},
		"slow":            {0.1, nil, `q=1;w=10`, `r=0;t=10`, `r=0;t=10`, "10"},
		"slow and uneven": {0.3, nil, `q=1;w=4`, `r=0;t=4`, `r=0;t=4`, "4"},
		"slow and deep":   {0.1, []tb.Option{tb.WithMaxPermits(3), tb.WithInitialPermits(3)}, `q=3;w=30`, `r=2;t=10`, "", ""},
		"quota":           {5 / 1.002, []tb.Option{tb.WithMaxPermits(1)}, `q=4;w=1`, `r=0;t=1`, `r=0;t=1`, "1"}, // 4.99/s
		"fast":            {1e7, []tb.Option{tb.WithInitialPermits(1e7)}, `q=10000000;w=1`, `r=9999999;t=1`, "", ""},
		"slowest":         {0.001, nil, `q=1;w=1000`, `r=0;t=1000`, `r=0;t=1000`, "1000"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := limited(t, gate.One(bursty(t, c.rate, c.opts...), 0), ok)
				response := serve(t, h)
				require.Equal(t, http.StatusOK, response.StatusCode)
				require.Equal(t, `"default";`+c.policy, response.Header.Get("RateLimit-Policy"))
				require.Equal(t, `"default";`+c.passed, response.Header.Get("RateLimit"))
				if c.refused == "" {
					return
				}
				response = serve(t, h)
				require.Equal(t, http.StatusTooManyRequests, response.StatusCode)
				require.Equal(t, `"default";`+c.policy, response.Header.Get("RateLimit-Policy"))
				require.Equal(t, `"default";`+c.refused, response.Header.Get("RateLimit"))
				require.Equal(t, c.after, response.Header.Get("Retry-After"))
			})
		})
	}
	t.Run("nothing saved up", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h := limited(t, gate.One(bursty(t, 0.4, tb.WithMaxPermits(0)), time.Minute), ok)
			response := serve(t, h)
			require.Equal(t, `"default";q=1;w=3`, response.Header.Get("RateLimit-Policy"))
			require.Equal(t, "r=0", strings.Split(response.Header.Get("RateLimit"), ";")[1])
		})
	})
	t.Run("warming up", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l, err := tb.NewSmoothWarmingUp("warm", 5, 4*time.Second)
			require.NoError(t, err)
			response := serve(t, limited(t, gate.One(l, 0), ok))
			require.Equal(t, `"default";q=5;w=1`, response.Header.Get("RateLimit-Policy"))
			require.Equal(t, `"default";r=0;t=1`, response.Header.Get("RateLimit"))
		})
	})
	t.Run("refused by no bucket", func(t *testing.T) {
		refusing := &spy{enter: func(context.Context, string) (*gate.Admission, error) {
			return &gate.Admission{RetryAfter: 2500 * time.Millisecond}, nil
		}}
		response := serve(t, limited(t, refusing, ok))
		require.Equal(t, http.StatusTooManyRequests, response.StatusCode)
		require.Empty(t, response.Header["Ratelimit-Policy"])
		require.Equal(t, `"default";r=0;t=3`, response.Header.Get("RateLimit"))
		require.Equal(t, "3", response.Header.Get("Retry-After"))
	})
	t.Run("switched off", func(t *testing.T) {
		l := bursty(t, 5, tb.WithSwitch(func() bool { return false }))
		response := serve(t, limited(t, gate.One(l, 0), ok))
		require.Equal(t, http.StatusOK, response.StatusCode)
		require.Empty(t, response.Header["Ratelimit-Policy"])
		require.Empty(t, response.Header["Ratelimit"])
	})
}

// Several limits show side by side; a name is quoted as RFC 9651 wants it.
func TestNestedPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := limited(t, gate.One(bursty(t, 1), 0), ok, httplimit.WithPolicy(`the "inner" \ one`))
		h = limited(t, gate.One(bursty(t, 10, tb.WithInitialPermits(10)), 0), h, httplimit.WithPolicy("outer"))
		response := serve(t, h)
		require.Equal(t, http.StatusOK, response.StatusCode)
		require.Equal(t, []string{`"outer";q=10;w=1`, `"the \"inner\" \\ one";q=1;w=1`}, response.Header["Ratelimit-Policy"])
		require.Equal(t, []string{`"outer";r=9;t=1`, `"the \"inner\" \\ one";r=0;t=1`}, response.Header["Ratelimit"])
		response = serve(t, h)
		require.Equal(t, http.StatusTooManyRequests, response.StatusCode)
		require.Equal(t, []string{`"outer";r=8;t=1`, `"the \"inner\" \\ one";r=0;t=1`}, response.Header["Ratelimit"])
		require.Equal(t, []string{"1"}, response.Header["Retry-After"])
	})
}

func TestRefusalHandler(t *testing.T) {
	l := single(t)
	require.True(t, take(t, l))
	h := limited(t, gate.One(l, 0), ok, httplimit.WithRefusalHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = fmt.Fprintf(w, "come back to %s in %s", r.URL.Path, w.Header().Get("Retry-After"))
	})))
	response := serve(t, h)
	require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
	require.Regexp(t, `^"default";r=0;t=\d+$`, response.Header.Get("RateLimit"))
	require.Equal(t, "come back to /fares in "+response.Header.Get("Retry-After"), text(t, response))
}

// A client that goes while it waits gives its permit back, and the handler is not called.
func TestClientGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bursty(t, 1, tb.WithMaxPermits(1))
		require.True(t, take(t, l))
		called := false
		h := limited(t, gate.One(l, time.Minute), http.HandlerFunc(func(http.ResponseWriter, *http.Request) { called = true }))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		w := httptest.NewRecorder()
		start := time.Now()
		h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
		require.Equal(t, 100*time.Millisecond, time.Since(start))
		require.False(t, called)
		require.Equal(t, http.StatusServiceUnavailable, w.Code, "never the success that writing nothing would be")
		require.Equal(t, "the request was cancelled\n", w.Body.String())
		require.Equal(t, "1", w.Header().Get("Retry-After"))
		next, err := l.Reserve(t.Context(), 1)
		require.NoError(t, err)
		require.Equal(t, 900*time.Millisecond, next.Delay())
	})
}

// So it is on a real connection that the client closes.
func TestClientGoneFromServer(t *testing.T) {
	l := bursty(t, 0.1, tb.WithMaxPermits(1))
	require.True(t, take(t, l))
	var called atomic.Bool
	gate := &spy{Gate: gate.One(l, time.Hour)}
	server := httptest.NewServer(limited(t, gate, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { called.Store(true) })))
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := server.Client().Do(get(t, server.URL).WithContext(ctx))
		done <- err
	}()
	debt := func() time.Duration {
		state, err := l.State(t.Context())
		require.NoError(t, err)
		return time.Until(time.UnixMicro(state.NextFreeTicketMicros))
	}
	require.Eventually(t, func() bool { return len(gate.asked()) == 1 && debt() > 0 }, 10*time.Second, time.Millisecond)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	require.Eventually(t, func() bool { return debt() <= 0 }, 10*time.Second, time.Millisecond, "the permit is back")
	require.False(t, called.Load())
}

// The deadline of http.TimeoutHandler is known when the request comes: what it would cut short is refused at once.
func TestTimeoutHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bursty(t, 0.2, tb.WithMaxPermits(1))
		require.True(t, take(t, l))
		h := http.TimeoutHandler(limited(t, gate.One(l, time.Minute), ok), 2*time.Second, "too slow")
		start := time.Now()
		response := serve(t, h)
		require.Equal(t, http.StatusTooManyRequests, response.StatusCode)
		require.Equal(t, "3", response.Header.Get("Retry-After"))
		require.Zero(t, time.Since(start))
	})
}

func TestMiddlewareGateFails(t *testing.T) {
	logger, log := logs()
	response := serve(t, limited(t, failing(errAway), ok, httplimit.WithLogger(logger)))
	require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
	require.Equal(t, "1", response.Header.Get("Retry-After"))
	require.Empty(t, response.Header["Ratelimit"])
	require.NotContains(t, text(t, response), "redis", "what is inside is nobody's business")
	require.Contains(t, log.String(), "redis is away")
	require.Contains(t, log.String(), "/fares")

	var seen error
	fail := httplimit.WithOnError(func(r *http.Request, err error) error {
		require.Equal(t, "/fares", r.URL.Path)
		seen = err
		return fmt.Errorf("no: %w", &httplimit.RefusedError{}) // an error like any other
	})
	response = serve(t, limited(t, failing(errAway), ok, fail))
	require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
	var failed *httplimit.GateError
	require.ErrorAs(t, seen, &failed)
	require.ErrorIs(t, seen, errAway)

	pass := httplimit.WithOnError(func(*http.Request, error) error { return nil })
	response = serve(t, limited(t, failing(errAway), ok, pass))
	require.Equal(t, http.StatusOK, response.StatusCode)
	require.Empty(t, response.Header["Ratelimit"])
	require.Equal(t, "ok", text(t, response))
}

// The handler gets the server's own ResponseWriter, whatever it can do.
func TestSameResponseWriter(t *testing.T) {
	var got http.ResponseWriter
	h := limited(t, &spy{}, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { got = w }))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	require.Same(t, w, got)
}

func onBothVersions(t *testing.T, h http.Handler, f func(t *testing.T, client *http.Client, url string)) {
	for _, two := range []bool{false, true} {
		t.Run(map[bool]string{false: "HTTP/1.1", true: "HTTP/2"}[two], func(t *testing.T) {
			server := httptest.NewUnstartedServer(h)
			server.EnableHTTP2 = two
			server.StartTLS()
			defer server.Close()
			server.Client().Timeout = time.Minute
			f(t, server.Client(), server.URL)
		})
	}
}

// Events arrive one by one, while the handler still runs.
func TestServerSentEvents(t *testing.T) {
	heard := make(chan struct{})
	h := limited(t, gate.One(bursty(t, 1000), time.Second), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			_, _ = fmt.Fprintf(w, "data: %d\n\n", i)
			if err := http.NewResponseController(w).Flush(); err != nil {
				panic(err)
			}
			<-heard // the next only when this one has arrived
		}
	}))
	onBothVersions(t, h, func(t *testing.T, client *http.Client, url string) {
		response, err := client.Get(url)
		require.NoError(t, err)
		defer response.Body.Close()
		require.Equal(t, `"default";q=1000;w=1`, response.Header.Get("RateLimit-Policy"))
		lines := bufio.NewScanner(response.Body)
		for i := range 3 {
			require.True(t, lines.Scan())
			require.Equal(t, fmt.Sprintf("data: %d", i), lines.Text())
			require.True(t, lines.Scan())
			heard <- struct{}{}
		}
		require.False(t, lines.Scan())
		require.NoError(t, lines.Err())
	})
}

// Thirty-two megabytes there and back, whole.
func TestLargeBodies(t *testing.T) {
	const size = 8 << 20 // several times what a connection holds
	h := limited(t, gate.One(bursty(t, 1000), time.Second), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/1.1 wants to be told
		_, _ = io.Copy(w, r.Body)
	}))
	onBothVersions(t, h, func(t *testing.T, client *http.Client, url string) {
		tr := transport(t, gate.One(bursty(t, 1000), time.Second), httplimit.WithBase(client.Transport))
		sent, received := sha256.New(), sha256.New()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, io.TeeReader(io.LimitReader(rand.Reader, size), sent))
		require.NoError(t, err)
		response, err := (&http.Client{Transport: tr}).Do(r)
		require.NoError(t, err)
		defer response.Body.Close()
		n, err := io.Copy(received, response.Body)
		require.NoError(t, err)
		require.EqualValues(t, size, n)
		require.Equal(t, sent.Sum(nil), received.Sum(nil))
	})
}

// An upgraded connection is the handler's.
func TestUpgrade(t *testing.T) {
	server := httptest.NewServer(limited(t, gate.One(bursty(t, 1000), time.Second), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, both, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		defer conn.Close()
		_, _ = both.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_ = both.Flush()
		line, _ := both.ReadString('\n')
		_, _ = both.WriteString("you said " + line)
		_ = both.Flush()
	})))
	defer server.Close()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	in := bufio.NewReader(conn)
	response, err := http.ReadResponse(in, nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusSwitchingProtocols, response.StatusCode)
	_, _ = io.WriteString(conn, "hello\n")
	line, err := in.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "you said hello\n", line)
}

// calling is a listener whose connections come from an address of our choice.
type calling struct {
	net.Listener
	from netip.AddrPort
}

type calledBy struct {
	net.Conn
	from netip.AddrPort
}

func (l calling) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return calledBy{c, l.from}, nil
}

func (c calledBy) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.from) }

// serverFor serves connections as if they came from an address.
func serverFor(t *testing.T, address string, h http.Handler) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Listener = calling{s.Listener, netip.MustParseAddrPort(address)}
	s.Start()
	t.Cleanup(s.Close)
	return s
}

// Browsers with cookies and kept connections, behind a proxy that says for whom it calls: each has a bucket of its own, and
// what a client writes into the field itself gets it neither a fresh bucket nor somebody else's.
func TestBrowsersBehindAProxy(t *testing.T) {
	keys := map[string]*tb.RateLimiter{}
	store := tb.NewMemoryStore()
	clients := &spy{}
	clients.enter = func(ctx context.Context, key string) (*gate.Admission, error) {
		clients.mu.Lock()
		if keys[key] == nil {
			l, err := tb.NewSmoothBursty(key, 0.001, tb.WithStore(store), tb.WithMaxPermits(3), tb.WithInitialPermits(3))
			if err != nil {
				clients.mu.Unlock()
				return nil, err
			}
			keys[key] = l
		}
		l := keys[key]
		clients.mu.Unlock()
		return gate.One(l, 0).Enter(ctx, key)
	}
	h := limited(t, clients, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		visits := "1"
		if c, err := r.Cookie("visits"); err == nil {
			visits = c.Value + "1"
		}
		http.SetCookie(w, &http.Cookie{Name: "visits", Value: visits})
		_, _ = io.WriteString(w, visits)
	}), httplimit.WithKey(httplimit.ByClient(netip.MustParsePrefix("10.0.0.0/8"))))
	shop := serverFor(t, "10.0.0.1:8080", h) // where the proxy calls from
	open := serverFor(t, "203.0.113.66:666", h)

	target, err := url.Parse(shop.URL)
	require.NoError(t, err)
	upstream := &http.Transport{}
	defer upstream.CloseIdleConnections()
	proxy := &httputil.ReverseProxy{Transport: upstream, Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.Out.Header["X-Forwarded-For"] = r.In.Header["X-Forwarded-For"] // as many proxies do
		r.SetXForwarded()
	}}
	visit := func(client *http.Client, url, forged string) (int, string) {
		t.Helper()
		r := get(t, url)
		if forged != "" {
			r.Header.Set("X-Forwarded-For", forged)
		}
		response, err := client.Do(r)
		require.NoError(t, err)
		require.Regexp(t, `^"default";r=\d;t=\d+$`, response.Header.Get("RateLimit"), "the proxy passes it on")
		return response.StatusCode, text(t, response)
	}
	browser := func() *http.Client {
		jar, err := cookiejar.New(nil)
		require.NoError(t, err)
		tr := &http.Transport{}
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Jar: jar, Transport: tr}
	}
	for _, address := range []string{"203.0.113.7:1111", "[2001:db8::7]:2222"} {
		front := serverFor(t, address, proxy)
		one := browser()
		for i, forged := range []string{"", "198.51.100.1", "10.0.0.2", "203.0.113.7, 10.9.9.9"} {
			status, body := visit(one, front.URL, forged)
			if i < 3 {
				require.Equal(t, http.StatusOK, status)
				require.Equal(t, strings.Repeat("1", i+1), body, "the cookies come back")
			} else {
				require.Equal(t, http.StatusTooManyRequests, status)
			}
		}
	}
	direct := browser()
	for i, forged := range []string{"198.51.100.1", "198.51.100.2", "203.0.113.7", "198.51.100.3"} {
		status, _ := visit(direct, open.URL, forged)
		require.Equal(t, i < 3, status == http.StatusOK)
	}
	require.Len(t, keys, 3)
	for _, key := range []string{"203.0.113.7", "2001:db8::7", "203.0.113.66"} {
		require.Contains(t, keys, key)
	}
}

// A registry is a gate: each path has what its row says, and a path without a row what the registry does with such.
func TestRegistryIsAGate(t *testing.T) {
	limits := registry.Static{
		{Name: "/fares", Rate: 0.1},
		{Name: "/free", Rate: 0.1, Disabled: true},
		{Name: "/upstream", Rate: 1000},
	}
	for name, c := range map[string]struct {
		unknown registry.Otherwise
		status  int
		policy  string
	}{
		"pass":    {registry.Pass(), 200, ""},
		"refuse":  {registry.Refuse(), 429, ""},
		"default": {registry.Default(registry.Limit{Rate: 5}), 200, `"default";q=5;w=1`},
	} {
		t.Run(name, func(t *testing.T) {
			gate, err := registry.New(limits, tb.NewMemoryStore(), registry.WithUnknown(c.unknown))
			require.NoError(t, err)
			defer gate.Close()
			h := limited(t, gate, ok)
			at := func(path string) *http.Response {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
				return w.Result()
			}
			for _, status := range []int{200, 429} {
				response := at("/fares")
				require.Equal(t, status, response.StatusCode)
				require.Equal(t, `"default";q=1;w=10`, response.Header.Get("RateLimit-Policy"))
			}
			for range 2 {
				response := at("/free")
				require.Equal(t, 200, response.StatusCode)
				require.Empty(t, response.Header["Ratelimit"])
			}
			response := at("/hotels")
			require.Equal(t, c.status, response.StatusCode)
			require.Equal(t, c.policy, response.Header.Get("RateLimit-Policy"))
			require.Equal(t, c.status == 429, response.Header.Get("Retry-After") == "1")

			tr := transport(t, gate, httplimit.WithBase(base(func(r *http.Request) (*http.Response, error) {
				return respond(r, 429, "Retry-After", "50"), nil
			})))
			response, err = tr.RoundTrip(get(t, "http://upstream.test/upstream"))
			require.NoError(t, err)
			response.Body.Close()
			_, err = tr.RoundTrip(get(t, "http://upstream.test/upstream"))
			var refused *httplimit.RefusedError
			require.ErrorAs(t, err, &refused)
			require.InDelta(t, 50, refused.RetryAfter.Seconds(), 20)
		})
	}
}

// A nil handler is the default one, as it is for http.Server.
func TestNilHandler(t *testing.T) {
	response := serve(t, limited(t, &spy{}, nil))
	require.Equal(t, http.StatusNotFound, response.StatusCode)
}

// A middleware over a Transport: what a gateway is. The upstream's Retry-After holds back the upstream's bucket alone.
func TestGateway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := tb.NewMemoryStore()
		inbound, err := tb.NewSmoothBursty("inbound", 1000, tb.WithStore(store), tb.WithInitialPermits(3))
		require.NoError(t, err)
		outbound, err := tb.NewSmoothBursty("outbound", 10, tb.WithStore(store))
		require.NoError(t, err)
		calls := 0
		tr := transport(t, gate.One(outbound, time.Second), httplimit.WithBase(base(func(r *http.Request) (*http.Response, error) {
			if calls++; calls == 1 {
				return respond(r, http.StatusServiceUnavailable, "Retry-After", "5"), nil
			}
			return respond(r, http.StatusOK), nil
		})))
		h := limited(t, gate.One(inbound, time.Second), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			out := r.Clone(r.Context())
			out.URL.Scheme, out.URL.Host = "http", "upstream.test"
			response, err := tr.RoundTrip(out)
			if errors.Is(err, httplimit.ErrRefused) {
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			require.NoError(t, err)
			response.Body.Close()
			w.WriteHeader(response.StatusCode)
		}))
		require.Equal(t, http.StatusServiceUnavailable, serve(t, h).StatusCode)
		require.Equal(t, http.StatusBadGateway, serve(t, h).StatusCode)
		require.Equal(t, 1, calls)
		time.Sleep(4500 * time.Millisecond)
		start := time.Now()
		require.Equal(t, http.StatusOK, serve(t, h).StatusCode)
		require.Equal(t, 600*time.Millisecond, time.Since(start), "five seconds, and the tenth in which a permit comes")
	})
}
