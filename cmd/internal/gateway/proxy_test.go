package gateway

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

func TestRoutes(t *testing.T) {
	var rs routes
	for _, s := range []string{"http://all", "/ibe/=http://ibe", "/ibe/slow=http://slow/base"} {
		require.Empty(t, rs.add(s))
	}
	for path, want := range map[string]string{
		"/": "all", "/ibex": "all", "/ib": "all", "/ibe": "ibe", "/ibe/": "ibe", "/ibe/AvailFare": "ibe", "/ibe/slower": "ibe",
		"/ibe/slow": "slow", "/ibe/slow/x": "slow",
	} {
		require.Equal(t, want, rs.find(path).target.Host, path)
	}
	require.Nil(t, routes{{prefix: "/ibe"}}.find("/other"))
}

func TestCleanPath(t *testing.T) {
	for given, want := range map[string]string{
		"": "/", "/": "/", "//": "/", "/a": "/a", "/a/": "/a/", "//a": "/a", "/./a": "/a", "/x/../a": "/a", "/a//b/": "/a/b/", "/../..": "/", "*": "/*",
	} {
		require.Equal(t, want, cleanPath(given), given)
	}
}

// Whatever a client sends, a bucket can have that name: the limiter never fails for it.
func TestFit(t *testing.T) {
	require.Equal(t, "/ibe/AvailFare", fit("/ibe/AvailFare"))
	require.Equal(t, "-", fit(""))
	require.Equal(t, strings.Repeat("é", 256), fit(strings.Repeat("é", 300)))
	require.Equal(t, "a"+strings.Repeat("é", 255), fit("a"+strings.Repeat("é", 300)), "not within a character")
	rapid.Check(t, func(t *rapid.T) {
		key := fit(string(rapid.SliceOfN(rapid.Byte(), 0, 2000).Draw(t, "key")))
		if len(key) < 1 || len(key) > 512 || !utf8.ValidString(key) {
			t.Fatalf("%q of %d bytes", key, len(key))
		}
	})
}

// keys is a gate that lets all pass and notes who asked.
type keys struct {
	mu  sync.Mutex
	all []string
}

func (k *keys) Enter(_ context.Context, key string) (*gate.Admission, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.all = append(k.all, key)
	return &gate.Admission{OK: true}, nil
}

func (k *keys) Penalize(context.Context, string, time.Duration) error { return nil }

// openProxy makes a proxy, whose gate is open unless it is nil.
func openProxy(t *testing.T, gate gate.Gate, args ...string) *proxy {
	t.Helper()
	o, err := given(t, append([]string{"--limits", "sqlite://f", "--store", "memory"}, args...), nil, "")
	require.NoError(t, err)
	c, err := o.parse()
	require.NoError(t, err)
	p, err := newProxy(c, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(p.base.CloseIdleConnections)
	if gate != nil {
		require.NoError(t, p.open(gate))
	}
	return p
}

func newTestProxy(t *testing.T, gate gate.Gate, args ...string) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(openProxy(t, gate, args...))
	t.Cleanup(server.Close)
	return server
}

func send(t *testing.T, server *httptest.Server, target string, header http.Header) (status int, answer http.Header, body string) {
	t.Helper()
	u, err := url.Parse(target)
	require.NoError(t, err)
	base, err := url.Parse(server.URL)
	require.NoError(t, err)
	u.Scheme, u.Host = base.Scheme, base.Host
	response, err := server.Client().Do((&http.Request{Method: http.MethodGet, URL: u, Header: header, Host: "shop.example"}).WithContext(t.Context()))
	require.NoError(t, err)
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, response.Header, string(text)
}

// echo returns an upstream that replies with the header fields and the target that it received.
func echo(t *testing.T) *httptest.Server {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, field := range []string{"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "Forwarded", "Connection"} {
			_, _ = io.WriteString(w, field+"="+strings.Join(r.Header[field], ",")+"\n")
		}
		_, _ = io.WriteString(w, "Host="+r.Host+"\nPath="+r.URL.EscapedPath()+"\nQuery="+r.URL.RawQuery+"\n")
	}))
	t.Cleanup(server.Close)
	return server
}

func TestForwarded(t *testing.T) {
	upstream := echo(t)
	forged := http.Header{
		"X-Forwarded-For": {"192.0.2.7"}, "X-Forwarded-Host": {"forged.example"}, "X-Forwarded-Proto": {"https"}, "Forwarded": {"for=192.0.2.7"},
	}
	for _, tt := range []struct {
		args        []string
		key, fields string
	}{
		{nil, "127.0.0.1", "X-Forwarded-For=127.0.0.1\nX-Forwarded-Host=shop.example\nX-Forwarded-Proto=http\n"},
		{[]string{"--trusted-proxy", "10.0.0.0/8"}, "127.0.0.1", "X-Forwarded-For=127.0.0.1\nX-Forwarded-Host=shop.example\nX-Forwarded-Proto=http\n"},
		{[]string{"--trusted-proxy", "127.0.0.0/8"}, "192.0.2.7",
			"X-Forwarded-For=192.0.2.7, 127.0.0.1\nX-Forwarded-Host=forged.example\nX-Forwarded-Proto=https\n"},
	} {
		for _, way := range [][]string{nil, {"--inbound"}} {
			var asked keys
			server := newTestProxy(t, &asked, append(append([]string{"--upstream", upstream.URL + "/base/", "--key", "client"}, tt.args...), way...)...)
			status, _, body := send(t, server, "/ibe/Avail%3FFare?a=1&b=%20", forged)
			require.Equal(t, http.StatusOK, status)
			require.True(t, strings.HasPrefix(body, tt.fields+"Forwarded=\n"), "%q", body)
			require.Contains(t, body, "Host="+strings.TrimPrefix(upstream.URL, "http://")+"\nPath=/base/ibe/Avail%3FFare\nQuery=a=1&b=%20\n")
			require.Equal(t, []string{tt.key}, asked.all)
		}
	}
}

func TestKeys(t *testing.T) {
	upstream := echo(t)
	for target, want := range map[string]string{
		"/ibe/AvailFare": "/ibe/AvailFare", "//ibe/./x/../AvailFare": "/ibe/AvailFare", "/ibe/Avail%46are?x": "/ibe/AvailFare", "/%ff": "/\uFFFD",
		"/ibe/AvailFare;x=1": "/ibe/AvailFare",
	} {
		var asked keys
		server := newTestProxy(t, &asked, "--upstream", upstream.URL+"/base")
		status, _, _ := send(t, server, "http://h"+target, nil)
		require.Equal(t, http.StatusOK, status)
		require.Equal(t, []string{want}, asked.all, "the path as the client sent it, not as the upstream gets it")
	}
	var asked keys
	server := newTestProxy(t, &asked, "--upstream", upstream.URL, "--key", "header:X-Agency")
	send(t, server, "/", http.Header{"X-Agency": {"MU"}})
	send(t, server, "/", nil)
	require.Equal(t, []string{"MU", "-"}, asked.all)
}

// A query is sent on as it came, though Go cannot parse it. A path is sent on as it was limited, and leads out of no base.
func TestSentOnAsItIs(t *testing.T) {
	upstream := echo(t)
	for target, want := range map[string]string{
		"/x?a=1;b=2&c=%zz": "Path=/base/x\nQuery=a=1;b=2&c=%zz\n", "/x?": "Path=/base/x\nQuery=\n", "/../secret": "Path=/base/secret\n",
		"/a/%2e%2E/../secret/": "Path=/base/secret/\n", "//a/.b/..c/b%3fc%41": "Path=/base/a/.b/..c/b%3FcA\n", "/a;x=1/": "Path=/base/a;x=1/\n",
	} {
		for _, way := range [][]string{nil, {"--inbound"}} {
			server := newTestProxy(t, &keys{}, append([]string{"--upstream", upstream.URL + "/base"}, way...)...)
			status, _, body := send(t, server, "http://h"+target, nil)
			require.Equal(t, http.StatusOK, status)
			require.Contains(t, body, want, target)
		}
	}
}

func TestAnswers(t *testing.T) {
	upstream := echo(t)
	store := tokenbucket.NewMemoryStore()
	limits, err := registry.New(registry.Static{{Name: "/slow", Rate: 0.001}}, store)
	require.NoError(t, err)
	defer limits.Close()

	for _, way := range [][]string{nil, {"--inbound"}} {
		server := newTestProxy(t, limits, append([]string{"--upstream", "/slow=" + upstream.URL, "--upstream", "/dead=http://127.0.0.1:1"}, way...)...)
		if way == nil {
			status, _, _ := send(t, server, "/slow", nil)
			require.Equal(t, http.StatusOK, status)
		}
		status, header, _ := send(t, server, "/slow", nil)
		require.Equal(t, http.StatusTooManyRequests, status)
		require.Regexp(t, "^(1000|9[0-9]{2})$", header.Get("Retry-After"))
		require.Equal(t, way != nil, header.Get("RateLimit") != "", "only a limit of the client's own shows")
		status, _, _ = send(t, server, "/dead", nil)
		require.Equal(t, http.StatusBadGateway, status)
		status, _, _ = send(t, server, "/other", nil)
		require.Equal(t, http.StatusNotFound, status)
	}

	closed := newTestProxy(t, nil, "--upstream", upstream.URL)
	status, header, body := send(t, closed, "/", nil)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.Equal(t, "1", header.Get("Retry-After"))
	require.Equal(t, "limits are not loaded yet\n", body)
}

// An upstream's Retry-After holds the bucket back.
func TestRetryAfter(t *testing.T) {
	calls := 0
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		calls++
		w.Header().Set("Retry-After", "600")
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	defer upstream.Close()
	limits, err := registry.New(registry.Static{{Name: "/x", Rate: 1000}}, tokenbucket.NewMemoryStore())
	require.NoError(t, err)
	defer limits.Close()
	server := newTestProxy(t, limits, "--upstream", upstream.URL, "--max-retry-after", "300s")
	_, header, _ := send(t, server, "/x", nil)
	require.Equal(t, "600", header.Get("Retry-After"), "the upstream's own")
	_, header, _ = send(t, server, "/x", nil)
	require.Regexp(t, "^(30[01]|29[0-9])$", header.Get("Retry-After"), "ours: that, and until the next permit")
	require.Equal(t, 1, calls)
}

// A client that has used up a bucket gets a Retry-After, whatever the bucket is of: a row, a key without a row, or a bad row.
func TestRefusedByABucket(t *testing.T) {
	p := openProxy(t, nil, "--upstream", "http://127.0.0.1:1", "--unknown", "0.001", "--bad-rows", "0.001", "--inbound")
	rows := registry.Static{{Name: "/row", Rate: 0.001}, {Name: "/bad", Rate: -1}, {Name: "/zero"}}
	limits, err := registry.New(rows, tokenbucket.NewMemoryStore(), registry.WithUnknown(p.config.unknown), registry.WithBadRows(p.config.badRows),
		registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	p.metrics.limits.Store(limits)
	require.NoError(t, p.open(limits))
	for path, want := range map[string]int{"/row": 429, "/unknown": 429, "/bad": 429, "/zero": 503} {
		var answer *httptest.ResponseRecorder
		for range 3 { // the first has a permit, and its upstream is away
			answer = httptest.NewRecorder()
			p.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
		}
		require.Equal(t, want, answer.Code, "%s: %s", path, answer.Body)
		require.Equal(t, want == 429, answer.Header().Get("Retry-After") != "", path)
	}
}

// A body that the client does not send as it should is no failure of the upstream.
func TestBrokenBodies(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }))
	t.Cleanup(upstream.Close)
	for name, test := range map[string]struct {
		request string
		hangsUp bool
		want    string
	}{
		"chunks that are none": {"Transfer-Encoding: chunked\r\n\r\nzz\r\n", false, "HTTP/1.1 400"},
		"the client has gone":  {"Content-Length: 1000\r\n\r\nshort", true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := openProxy(t, &keys{}, "--upstream", upstream.URL)
			server := httptest.NewServer(p)
			conn, err := net.Dial("tcp", server.Listener.Addr().String())
			require.NoError(t, err)
			_, err = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"+test.request)
			require.NoError(t, err)
			if test.hangsUp {
				require.NoError(t, conn.(*net.TCPConn).CloseWrite())
			}
			answer, _ := io.ReadAll(conn)
			require.True(t, strings.HasPrefix(string(answer), test.want), "%s", answer)
			require.NoError(t, conn.Close())
			server.Close()
			require.Zero(t, p.calls.upstreamErrors.Load(), "%s", answer)
			require.EqualValues(t, 1, p.calls.badBodies.Load())
		})
	}
}

func TestKindOf(t *testing.T) {
	for want, errs := range map[string][]error{
		"refused": {&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, &net.OpError{Op: "dial", Err: syscall.Errno(10061)}}, // the latter of Windows
		"timeout": {&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, context.DeadlineExceeded},
		"name":    {&net.OpError{Op: "dial", Err: &net.DNSError{IsTimeout: true}}},
		"other":   {io.EOF, &net.OpError{Op: "dial", Err: syscall.EHOSTUNREACH}},
	} {
		for _, err := range errs {
			require.Equal(t, want, kindOf(err), "%v", err)
		}
	}
}
