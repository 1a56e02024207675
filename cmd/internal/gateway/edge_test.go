package gateway

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// raw sends text to a server as it is, and returns the first line of the answer and its body.
func raw(t *testing.T, server *httptest.Server, text string) (status int, body string) {
	t.Helper()
	c, err := net.Dial("tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	require.NoError(t, c.SetDeadline(time.Now().Add(30*time.Second)))
	_, err = io.WriteString(c, text)
	require.NoError(t, err)
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	defer func() { _ = answer.Body.Close() }()
	all, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	return answer.StatusCode, string(all)
}

// The gateway sends the target that it has limited: the key and the upstream have the same path, or the client gets a 400.
func TestTargets(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, "%s %s", r.Host, r.RequestURI)
	}))
	defer upstream.Close()
	host := strings.TrimPrefix(upstream.URL, "http://")
	for _, way := range [][]string{nil, {"--inbound"}} {
		var asked keys
		p := openProxy(t, &asked, append([]string{"--upstream", upstream.URL + "/base"}, way...)...)
		server := httptest.NewUnstartedServer(p)
		server.Config.DisableGeneralOptionsHandler = true
		server.Start()
		t.Cleanup(server.Close)
		for line, want := range map[string]struct{ sent, key string }{
			"GET http:http://h/ibe/AvailFare":      {},
			"GET http:ibe":                         {},
			"GET http://h":                         {},
			"GET http://h?/ibe/AvailFare":          {},
			"OPTIONS *":                            {},
			"GET *":                                {},
			"GET /ibe%2FAvailFare":                 {},
			`GET /ibe\AvailFare`:                   {},
			"GET /ibe/AvailFare%00":                {},
			"GET /x/..;/ibe/AvailFare":             {},
			"GET /%zz":                             {},
			"GET //x/ibe/AvailFare":                {"/base/x/ibe/AvailFare", "/x/ibe/AvailFare"},
			"GET http://me:pw@other/ibe/AvailFare": {"/base/ibe/AvailFare", "/ibe/AvailFare"},
			"GET http:/ibe/AvailFare":              {"/base/ibe/AvailFare", "/ibe/AvailFare"},
			"GET /ibe/%41vailFare/./?a=//b":        {"/base/ibe/AvailFare/?a=//b", "/ibe/AvailFare"},
			"GET /x/%2e%2e/ibe//AvailFare;x=1":     {"/base/ibe/AvailFare;x=1", "/ibe/AvailFare"},
		} {
			asked.all = nil
			bad := p.calls.badTargets.Load()
			status, body := raw(t, server, line+" HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n")
			if want.sent == "" {
				require.Equal(t, http.StatusBadRequest, status, line)
				require.Empty(t, asked.all, line)
				require.LessOrEqual(t, p.calls.badTargets.Load()-bad, int64(1))
				continue
			}
			require.Equal(t, http.StatusOK, status, line)
			require.Equal(t, host+" "+want.sent, body, "the vhost is the upstream's")
			require.Equal(t, []string{want.key}, asked.all, line)
		}
		status, _ := raw(t, server, "CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\n\r\n")
		require.Equal(t, http.StatusMethodNotAllowed, status)
	}
}

// A field that names the bucket reaches the upstream as it was counted: once, and not only in appearance.
func TestKeyFields(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprint(w, r.Header["X-Tenant"], r.Header["X_tenant"], r.Trailer)
	}))
	defer upstream.Close()
	var asked keys
	server := newTestProxy(t, &asked, "--upstream", upstream.URL, "--key", "path+header:X-Tenant")
	for header, want := range map[string]string{
		"X-Tenant: a\r\n":                                "[a] [] map[]",
		"X-Tenant: a, b\r\n":                             "[a, b] [] map[]",
		"X-Tenant: a\r\nx_tenant: b\r\n":                 "[a] [] map[]",
		"X-Tenant: a\r\nX-Tenant: b\r\n":                 "",
		"X-Tenant: a\r\nx-tenant: a\r\n":                 "",
		"X-Tenant: a\r\nConnection: close, x-tenant\r\n": "",
		"": "[] [] map[]",
	} {
		status, body := raw(t, server, "GET / HTTP/1.1\r\nHost: h\r\n"+header+"\r\n")
		if want == "" {
			require.Equal(t, http.StatusBadRequest, status, header)
			continue
		}
		require.Equal(t, want, body, header)
	}
	status, body := raw(t, server, "POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: a\r\nTrailer: X-Tenant\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Tenant: b\r\n\r\n")
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, "[a] [] map[]", body, "without trailers")
	require.ElementsMatch(t, []string{"/|a", "/|a, b", "/|a", "/|", "/|a"}, asked.all)
}

// An upstream gets no fields of proxies but from proxies.
func TestFieldsOfProxies(t *testing.T) {
	var got http.Header
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.Header }))
	defer upstream.Close()
	forged := []string{
		"X-Forwarded-User", "X-Forwarded-Port", "X-Forwarded-Prefix", "X-Forwarded", "X-Real-Ip", "X-Original-Url", "X-Rewrite-Url", "X-Client-Ip",
		"True-Client-Ip", "X-Remote-User", "Remote-User", "X-Auth-Request-Email", "Cf-Connecting-Ip", "X-Ours", "X-Whose",
	}
	header := http.Header{"Forwarded": {"for=x"}, "X_forwarded_user": {"forged"}, "X-Custom": {"kept"}, "Authorization": {"kept"}}
	for _, name := range forged {
		header[name] = []string{"forged"}
	}
	names := func(h http.Header) (all []string) {
		for name, values := range h {
			if slices.Contains(values, "forged") {
				all = append(all, name)
			}
		}
		return all
	}
	send(t, newTestProxy(t, &keys{}, "--upstream", upstream.URL, "--drop-header", "x-ours", "--client-header", "x-whose"), "http://h/", header)
	require.Empty(t, names(got))
	require.Equal(t, "kept", got.Get("X-Custom")+"", got)
	require.Equal(t, "kept", got.Get("Authorization"))
	require.Equal(t, "127.0.0.1", got.Get("X-Forwarded-For"))

	send(t, newTestProxy(t, &keys{}, "--upstream", upstream.URL, "--drop-header", "x-ours", "--trusted-proxy", "127.0.0.1"), "http://h/", header)
	require.ElementsMatch(t, forged, names(got), "but for the name that only CGI reads so")
	require.Empty(t, got["Forwarded"])
}

// Addresses of one customer are one client, and the field that names it is the operator's to choose.
func TestClientNetworks(t *testing.T) {
	for _, tt := range []struct {
		args          []string
		peer, address string
		want          string
	}{
		{nil, "[2001:db8:1:2::7]:1", "", "2001:db8:1:2::/64"},
		{nil, "[2001:db8:1:2:ffff::9]:1", "", "2001:db8:1:2::/64"},
		{nil, "[2001:db8:1:3::7]:1", "", "2001:db8:1:3::/64"},
		{nil, "[::ffff:192.0.2.7]:1", "", "192.0.2.7"},
		{[]string{"--client-ipv6", "128"}, "[2001:db8:1:2::7]:1", "", "2001:db8:1:2::7"},
		{[]string{"--client-ipv6", "48", "--client-ipv4", "24"}, "[2001:db8:1:2::7]:1", "", "2001:db8:1::/48"},
		{[]string{"--client-ipv4", "24"}, "192.0.2.7:1", "", "192.0.2.0/24"},
		{[]string{"--client-header", "X-Real-IP"}, "192.0.2.7:1", "198.51.100.1", "192.0.2.7"},
		{[]string{"--client-header", "X-Real-IP", "--trusted-proxy", "192.0.2.0/24"}, "192.0.2.7:1", "198.51.100.1", "198.51.100.1"},
	} {
		c, err := parseArgs(t, append([]string{"--key", "client"}, tt.args...)...)
		require.NoError(t, err)
		r := &http.Request{RemoteAddr: tt.peer, Header: http.Header{"X-Real-Ip": {tt.address}, "X-Forwarded-For": {"203.0.113.1"}}}
		require.Equal(t, tt.want, c.key.of(c, r, nil), "%+v", tt)
	}
	for _, args := range [][]string{{"--client-ipv6", "0"}, {"--client-ipv4", "33"}, {"--client-header", "a b"}, {"--drop-header", "a:b"}, {"--upgrade", "a/b"}} {
		_, err := parseArgs(t, args...)
		require.ErrorContains(t, err, args[0])
	}
}

// Only websocket is upgraded: calls of a connection that speaks HTTP/2 would not be counted.
func TestUpgrades(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked := r.Header.Get("Upgrade"); asked != "" {
			c, _, err := w.(http.Hijacker).Hijack()
			if err == nil {
				_, _ = fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", asked)
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}
			return
		}
		_, _ = fmt.Fprint(w, r.Header["Connection"], r.Header["Http2-Settings"])
	}))
	defer upstream.Close()
	for _, tt := range []struct {
		args   []string
		header string
		want   int
	}{
		{nil, "Connection: Upgrade\r\nUpgrade: websocket\r\n", 101},
		{nil, "Connection: upgrade\r\nUpgrade: WebSocket\r\n", 101},
		{nil, "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n", 200},
		{nil, "Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n", 200},
		{nil, "Connection: Upgrade\r\nUpgrade: h2c, websocket\r\n", 200},
		{nil, "Connection: Upgrade\r\nUpgrade: h2c\r\nUpgrade: websocket\r\n", 200},
		{nil, "Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n", 200},
		{nil, "Upgrade: h2c\r\n", 200},
		{[]string{"--upgrade", "websocket", "--upgrade", "h2c"}, "Connection: Upgrade\r\nUpgrade: h2c\r\n", 101},
		{[]string{"--upgrade", ""}, "Connection: Upgrade\r\nUpgrade: websocket\r\n", 200},
	} {
		server := newTestProxy(t, &keys{}, append([]string{"--upstream", upstream.URL}, tt.args...)...)
		c, err := net.Dial("tcp", server.Listener.Addr().String())
		require.NoError(t, err)
		require.NoError(t, c.SetDeadline(time.Now().Add(30*time.Second)))
		_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n"+tt.header+"\r\n")
		require.NoError(t, err)
		from := bufio.NewReader(c)
		answer, err := http.ReadResponse(from, nil)
		require.NoError(t, err)
		require.Equal(t, tt.want, answer.StatusCode, "%+v", tt)
		if tt.want == 200 {
			text, err := io.ReadAll(answer.Body)
			require.NoError(t, err)
			require.Equal(t, "[] []", string(text), tt.header)
		} else {
			_, err = io.WriteString(c, "ping")
			require.NoError(t, err)
			echoed := make([]byte, 4)
			_, err = io.ReadFull(from, echoed)
			require.NoError(t, err)
			require.Equal(t, "ping", string(echoed))
		}
		require.NoError(t, c.Close())
	}
}

// endless is an upstream that writes as much as it is let.
func endless(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Length", "1000000000000")
	block := make([]byte, 64<<10)
	for {
		if _, err := w.Write(block); err != nil {
			return
		}
	}
}

// A client that does not take its answer, or hardly, has its place for the time that docs/gateway.md says. A stream has it for ever.
func TestClientsThatDoNotRead(t *testing.T) {
	for name, test := range map[string]struct {
		args    []string
		read    func(c net.Conn) // until it is over
		upgrade bool
		atMost  time.Duration
	}{
		"reads nothing":             {atMost: 2 * time.Minute},
		"reads nothing, inbound":    {args: []string{"--inbound"}, atMost: 2 * time.Minute},
		"reads a byte now and then": {read: slowly1, atMost: 3 * time.Minute},
		"reads nothing of a stream": {upgrade: true, atMost: 2 * time.Minute},
		"is silent, and so is all":  {upgrade: true, read: func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }, atMost: 10 * time.Minute, args: []string{"--response-timeout", "0"}},
		"has half a minute":         {args: []string{"--response-timeout", "30s", "--response-rate", "0"}, atMost: 31 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				silent := strings.Contains(name, "silent")
				upstream := endless
				if test.upgrade {
					upstream = func(w http.ResponseWriter, r *http.Request) {
						c, _, err := w.(http.Hijacker).Hijack()
						if err != nil {
							return
						}
						_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
						if silent {
							_, _ = c.Read(make([]byte, 1))
						}
						for !silent && err == nil {
							_, err = c.Write(make([]byte, 1<<10))
						}
						_ = c.Close()
					}
				}
				s := newSlowly(t, upstream, test.args...)
				began := time.Now()
				c := s.dial()
				_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
				require.NoError(t, err)
				var reading sync.WaitGroup
				defer reading.Wait()
				defer func() { _ = c.Close() }()
				if test.read != nil {
					reading.Go(func() { test.read(c) })
				}
				synctest.Wait()
				require.EqualValues(t, 1, s.calls.inFlight.Load())
				s.running.Wait()
				require.LessOrEqual(t, time.Since(began), test.atMost)
				require.Greater(t, time.Since(began), 29*time.Second)
				if !silent {
					require.EqualValues(t, 1, s.calls.slowClients.Load())
				}
				require.Zero(t, s.calls.upstreamErrors.Load())
			})
		})
	}
}

// slowly1 reads a byte every two seconds.
func slowly1(c net.Conn) {
	for {
		if _, err := c.Read(make([]byte, 1)); err != nil {
			return
		}
		time.Sleep(2 * time.Second)
	}
}

// Streams that pause, and downloads of clients that are slow but not too slow, go on for as long as they like.
func TestStreamsGoOn(t *testing.T) {
	const events = 50
	for name, upstream := range map[string]http.HandlerFunc{
		"events": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for range events {
				_, _ = io.WriteString(w, "data: x\n\n")
				_ = http.NewResponseController(w).Flush()
				time.Sleep(7 * time.Minute)
			}
		},
		"a long download": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", strconv.Itoa(events*64<<10))
			for range events {
				if _, err := w.Write(make([]byte, 64<<10)); err != nil {
					t.Error(err)
				}
			}
		},
		"a slow answer": func(w http.ResponseWriter, _ *http.Request) {
			time.Sleep(time.Hour)
			_, _ = io.WriteString(w, "x")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSlowly(t, upstream)
				c := s.dial()
				_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
				require.NoError(t, err)
				answer, err := http.ReadResponse(bufio.NewReader(c), nil)
				require.NoError(t, err)
				for {
					n, err := answer.Body.Read(make([]byte, 2000)) // 2000 bytes a second
					if err == io.EOF {
						break
					}
					require.NoError(t, err)
					time.Sleep(time.Duration(n) * time.Second / 2000)
				}
				require.Zero(t, s.calls.slowClients.Load())
			})
		})
	}
}

// A body that comes more slowly than --body-rate is no reason to keep a place for ever.
func TestSlowBodiesEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSlowly(t, read)
		began := time.Now()
		c, from := s.post(t, "Content-Length: 1000000")
		var sending sync.WaitGroup
		defer sending.Wait()
		defer func() { _ = c.Close() }()
		sending.Go(func() {
			for {
				if _, err := c.Write([]byte("x")); err != nil {
					return
				}
				time.Sleep(time.Second)
			}
		})
		answer, err := http.ReadResponse(from, nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusRequestTimeout, answer.StatusCode)
		require.InDelta(t, time.Minute, time.Since(began), float64(5*time.Second))
		_, _ = io.Copy(io.Discard, from)
	})
}

// Bytes that came fast earn no hours in which a client may keep its place with a byte a minute.
func TestFastBodiesThatTurnSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSlowly(t, read)
		c, from := s.post(t, "Content-Length: 20000000")
		go func() { _, _ = io.Copy(io.Discard, from) }()
		defer func() { _ = c.Close() }()
		_, err := io.WriteString(c, strings.Repeat("x", 10_000_000))
		require.NoError(t, err)
		began := time.Now()
		for err == nil && time.Since(began) < 3*time.Hour {
			time.Sleep(50 * time.Second)
			_, err = io.WriteString(c, "x")
		}
		require.Less(t, time.Since(began), 4*time.Minute)
	})
}

func TestPace(t *testing.T) {
	p := pace{patience: time.Minute, rate: 1000}
	d, limited := p.left(2000)
	require.True(t, limited)
	require.Equal(t, 62*time.Second, d)
	p.note(2000, time.Second)
	d, _ = p.left(0)
	require.Equal(t, time.Minute, d, "one wait is never longer")
	p.note(0, 30*time.Second)
	d, _ = p.left(0)
	require.Equal(t, 31*time.Second, d, "60 s and 2 s for 2000 bytes, of which 31 have passed")
	p.note(1<<30, 0)
	d, _ = p.left(1 << 30)
	require.Positive(t, d)
	p.note(0, 90*time.Second)
	d, _ = p.left(0)
	require.Equal(t, 30*time.Second, d, "fast bytes count for a minute, whatever their number")
	p = pace{patience: time.Minute}
	p.note(0, time.Hour)
	d, _ = p.left(0)
	require.Equal(t, time.Minute, d, "any rate")
	_, limited = new(pace).left(1)
	require.False(t, limited)
}

// Three clients that never read do not keep a row of three places.
func TestPlacesOfClientsThatNeverRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limits, err := registry.New(registry.Static{{Name: "/", NoRate: true, Concurrent: 3}}, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores())
		require.NoError(t, err)
		defer limits.Close()
		p := openProxy(t, limits, "--upstream", "/=http://u")
		there := inMemory(t, &http.Server{Handler: http.HandlerFunc(endless)})
		p.base.DialContext = func(context.Context, string, string) (net.Conn, error) { return there(), nil }
		dial := inMemory(t, &http.Server{Handler: p})
		ask := func() net.Conn {
			c := dial()
			_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
			require.NoError(t, err)
			return c
		}
		for range 3 {
			defer ask().Close()
		}
		synctest.Wait()
		u, _, err := limits.Usage(t.Context(), "/")
		require.NoError(t, err)
		require.Equal(t, 3, u.Inside)
		time.Sleep(2 * time.Minute)
		u, _, err = limits.Usage(t.Context(), "/")
		require.NoError(t, err)
		require.Zero(t, u.Inside)
	})
}

// A page of another site cannot have its own name point at the admin port.
func TestAdminHosts(t *testing.T) {
	p := openProxy(t, nil, "--upstream", "http://u:1", "--admin-host", "gateway-a", "--console-host", "console.example")
	a := &admin{config: p.config, proxy: p}
	p.metrics.add(a)
	own, err := os.Hostname()
	require.NoError(t, err)
	for host, known := range map[string]bool{
		"127.0.0.1:8081": true, "[::1]:8081": true, "10.1.2.3": true, "localhost:8081": true, "gateway-a:8081": true, "GATEWAY-A": true,
		"console.example": true, own: true, "evil.example": false, "evil.example:8081": false, "gateway-a.evil.example": false, "": true, "127.0.0.1.evil.example": false,
	} {
		for _, path := range []string{"/healthz", "/readyz", "/stats", "/metrics", "/console/", "/console", "/none"} {
			r := httptest.NewRequest(http.MethodGet, path, nil)
			r.Host = host
			w := httptest.NewRecorder()
			a.handler().ServeHTTP(w, r)
			require.Equal(t, known, w.Code != http.StatusMisdirectedRequest, "%s %s: %s", host, path, w.Body)
		}
	}
}

// An upstream's 429 to one client is that client's, unless the row's column says that the upstream counts the fleet as one.
func TestPenaltyOfOneClient(t *testing.T) {
	status := 429
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Tenant") == "bad" {
			w.Header().Set("Retry-After", "3600")
			w.WriteHeader(status)
		}
	}))
	defer upstream.Close()
	for _, tt := range []struct {
		key    string
		row    registry.Limit
		status int
		bad    bool // the client of whom the upstream has enough is held back here, too
		others bool // and so are the others
	}{
		{"path", registry.Limit{Name: "/a"}, 429, false, false},
		{"path", registry.Limit{Name: "/*", PerKey: true}, 429, false, false},
		{"path", registry.Limit{Name: "/a"}, 503, true, true},
		{"path", registry.Limit{Name: "/a", Penalty: registry.PenaltyBoth}, 429, true, true},
		{"path", registry.Limit{Name: "/a", Penalty: registry.PenaltyBoth}, 503, true, true},
		{"path", registry.Limit{Name: "/a", Penalty: registry.PenaltyNone}, 503, false, false},
		{"path", registry.Limit{Name: "/a", Penalty: registry.Penalty429}, 503, false, false},
		{"header:X-Tenant", registry.Limit{Name: "*"}, 429, false, false},
		{"header:X-Tenant", registry.Limit{Name: "*", PerKey: true}, 429, true, false},
		{"header:X-Tenant", registry.Limit{Name: "bad"}, 429, true, false},
		{"header:X-Tenant", registry.Limit{Name: "*", PerKey: true, Penalty: registry.Penalty503}, 429, false, false},
		{"path+header:X-Tenant", registry.Limit{Name: "/a"}, 429, false, false},
		{"path+header:X-Tenant", registry.Limit{Name: "/a", PerKey: true}, 429, true, false},
		{"path+header:X-Tenant", registry.Limit{Name: "/a|bad"}, 429, true, false},
	} {
		status = tt.status
		tt.row.Rate, tt.row.Row = 1_000_000, "1"
		opts := []registry.Option{registry.WithLogger(slog.New(slog.DiscardHandler))}
		if strings.Contains(tt.key, "+") {
			opts = append(opts, registry.WithParts())
		}
		limits, err := registry.New(registry.Static{tt.row}, tokenbucket.NewMemoryStore(), opts...)
		require.NoError(t, err)
		p := openProxy(t, nil, "--upstream", upstream.URL, "--key", tt.key, "--max-retry-after", "1h")
		p.metrics.limits.Store(limits)
		require.NoError(t, p.open(limits))
		ask := func(tenant string) string {
			r := httptest.NewRequest(http.MethodGet, "/a", nil)
			r.Header.Set("X-Tenant", tenant)
			w := httptest.NewRecorder()
			p.ServeHTTP(w, r)
			return fmt.Sprint(w.Code, " ", strings.TrimSpace(w.Body.String()))
		}
		require.Equal(t, fmt.Sprint(tt.status, " "), ask("bad"), "the upstream's own")
		require.Equal(t, tt.bad, strings.Contains(ask("bad"), "too many requests"), "%+v", tt)
		require.Equal(t, tt.others, strings.Contains(ask("good"), "too many requests"), "%+v", tt)
		limits.Close()
	}
}
