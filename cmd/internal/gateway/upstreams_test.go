package gateway

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// server is an upstream that answers with the path that it has served, as it understands it.
type server struct {
	url    string
	served func() int // requests so far
}

// begin runs a program until the test ends, and waits until it listens.
func begin(t *testing.T, addr, path string, args ...string) {
	t.Helper()
	var errors bytes.Buffer
	cmd := exec.Command(path, args...)
	cmd.Stderr = &errors
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}, 30*time.Second, 20*time.Millisecond, "%s: %s", path, &errors)
}

// lines counts the lines of a file.
func lines(t *testing.T, path string) func() int {
	return func() int {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		return bytes.Count(text, []byte("\n"))
	}
}

func goServer(t testing.TB) server {
	var served atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		served.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, r.URL.Path)
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return server{s.URL, func() int { return int(served.Load()) }}
}

// nginxProgram is where Debian has nginx, which is not in every user's PATH.
func nginxProgram() string {
	const path = "/usr/sbin/nginx"
	if _, err := os.Stat(path); err == nil {
		return path
	}
	return "nginx"
}

func nginxServer(t *testing.T) server {
	path, dir, addr := redistest.Program(t, nginxProgram()), t.TempDir(), redistest.FreeAddr()
	log := filepath.Join(dir, "served")
	config := fmt.Sprintf(`daemon off; master_process off; pid %[1]s/pid; error_log %[1]s/error;
events { worker_connections 64; }
http {
  client_body_temp_path %[1]s/a; proxy_temp_path %[1]s/b; fastcgi_temp_path %[1]s/c; uwsgi_temp_path %[1]s/d; scgi_temp_path %[1]s/e;
  log_format served '$uri'; access_log %[2]s served;
  server { listen %[3]s; default_type text/plain; location / { return 200 $uri; } }
}`, dir, log, addr)
	file := filepath.Join(dir, "nginx.conf")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	begin(t, addr, path, "-p", dir, "-c", file, "-e", filepath.Join(dir, "error"))
	return server{"http://" + addr, lines(t, log)}
}

// nodeServer resolves targets as references, as programs for Node do.
func nodeServer(t *testing.T) server {
	path, dir, addr := redistest.Program(t, "node"), t.TempDir(), redistest.FreeAddr()
	log := filepath.Join(dir, "served")
	require.NoError(t, os.WriteFile(log, nil, 0o600))
	host, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	begin(t, addr, path, "-e", fmt.Sprintf(`
const fs = require('fs');
require('http').createServer((q, s) => {
  fs.appendFileSync(%q, 'x\n');
  let path = new URL(q.url, 'http://upstream').pathname;
  try { path = decodeURIComponent(path) } catch {}
  q.resume();
  q.on('end', () => s.end(path));
}).listen(%s, %q)`, log, port, host))
	return server{"http://" + addr, lines(t, log)}
}

// tableRows are rows whose limits must not be mistaken for one another.
var tableRows = registry.Static{
	{Name: "/ibe/AvailFare", Row: "1", Rate: 1e6}, {Name: "/ibe/Book", Row: "2", Rate: 1e6}, {Name: "/ibe/*", Row: "3", Rate: 1e6},
	{Name: "/x/*", Row: "4", Rate: 1e6}, {Name: "*", Row: "5", Rate: 1e6},
}

// rowServed is the row of a path that an upstream has served, by the words of docs/gateway.md: without parameters and the slash at the end.
func rowServed(path string) string {
	path = withoutParameters(path)
	switch {
	case path == "/ibe/AvailFare", path == "/ibe/Book":
		return path
	case path == "/ibe", strings.HasPrefix(path, "/ibe/"):
		return "/ibe/*"
	case path == "/x", strings.HasPrefix(path, "/x/"):
		return "/x/*"
	}
	return "*"
}

func withoutParameters(path string) string {
	segments := strings.Split(path, "/")
	for i, s := range segments {
		segments[i], _, _ = strings.Cut(s, ";")
	}
	return strings.TrimSuffix(strings.Join(segments, "/"), "/")
}

// requests are what clients send: targets, methods, versions and headers.
func requests() (all []string) {
	paths := []string{
		"/ibe/AvailFare", "/ibe/Book", "/ibe/AvailFare/", "/ibe/AvailFare?x=1", "/ibe/AvailFare?", "/ibe/AvailFare?a=/../Book", "/", "//", "///", "/.", "/..",
		"//x/ibe/AvailFare", "//ibe/AvailFare", "///ibe/AvailFare", "/ibe//AvailFare", "/ibe/AvailFare//", "/x//ibe/AvailFare", "//x//ibe/Book",
		"/./ibe/AvailFare", "/ibe/./AvailFare", "/ibe/AvailFare/.", "/ibe/AvailFare/..", "/ibe/Book/../AvailFare", "/../ibe/AvailFare", "/x/../ibe/AvailFare",
		"/ibe/x/../../ibe/Book", "/ibe/..", "/ibe/../", "/ibe/...", "/ibe/AvailFare.", "/ibe/.AvailFare", "/ibe/AvailFare/../../x/y",
		"/%2e/ibe/AvailFare", "/ibe/%2e%2e/ibe/AvailFare", "/ibe/%2E%2e/x/y", "/ibe/.%2e/x", "/x/%2e./ibe/AvailFare", "/%252e%252e/ibe/AvailFare", "/ibe/%2e",
		"/ibe%2fAvailFare", "/ibe%2FBook", "/x/..%2fibe/AvailFare", "/x%2f..%2fibe/AvailFare", "/ibe%252fAvailFare", "/%2fibe/AvailFare", "/ibe/AvailFare%2f",
		`/ibe\AvailFare`, "/ibe%5cAvailFare", "/ibe%5CBook", `\ibe\AvailFare`, `/x\..\ibe\AvailFare`, "/x%5c..%5cibe/AvailFare", `/\x/ibe/AvailFare`, "/ibe%255cBook",
		"/ibe/AvailFare;x=1", "/ibe/AvailFare;", "/ibe;x/AvailFare", "/ibe/;x/AvailFare", "/;/ibe/AvailFare", "/..;/ibe/AvailFare", "/x/..;/ibe/AvailFare",
		"/ibe/..;x=1/x/y", "/ibe/.;/AvailFare", "/ibe/AvailFare%3bx=1", "/x/..%3b/ibe/Book", "/ibe/;x", "/ibe/Book;a;b", "/ibe/Book;x=/../AvailFare", "/;",
		"/ibe/%41vailFare", "/%69be/AvailFare", "/ibe/Avail%46are/", "/ibe/AvailFar%65", "/ibe/%42ook", "/ibe/Boo%6B", "/%69%62%65/%42%6f%6f%6b", "/ibe/Book%",
		"/ibe/AvailFare%", "/ibe/AvailFare%2", "/ibe/AvailFare%zz", "/ibe/AvailFare%u0041", "/ibe/AvailFare%00", "/ibe/AvailFare%0a", "/ibe/AvailFare%0d%0aX: y",
		"/ibe/AvailFare%20", "/ibe/AvailFare%09", "/ibe/AvailFare%7f", "/ibe/AvailFare%3fx", "/ibe/AvailFare%3Fx=1", "/ibe/AvailFare%23", "/ibe/AvailFare#x",
		"/ibe/Availfare", "/IBE/AvailFare", "/ibe/AVAILFARE", "/Ibe/Book", "/ibe/%ff", "/%ff/ibe/AvailFare", "/ibe/\xff", "/ibe/é", "/ibe/%c3%a9", "/ibe%c0%afAvailFare",
		"/%c0%ae%c0%ae/ibe/Book", "/ibe/%ef%bc%8e", "/ibe/a|b", "/ibe/a\"b", "/ibe/<x>", "/ibe/{x}", "/ibe/[x]", "/ibe/a^b", "/ibe/`", "/ibe/!$&'()*+,=:@", "/ibe/a%2cb",
		"/ibe/http://x/ibe/Book", "/x/y", "/x", "/x/", "/other", "/ibe", "/ibe/", "/ibeX", "/ibe/AvailFareX", "/ibe/AvailFare/x",
	}
	for _, p := range paths {
		all = append(all, "GET "+p+" HTTP/1.1\r\nHost: h\r\n\r\n")
	}
	for _, p := range paths { // absolute form; other text makes another authority, or none
		all = append(all, "GET http://h"+p+" HTTP/1.1\r\nHost: other\r\n\r\n")
	}
	for _, target := range []string{
		"http:http://h/ibe/AvailFare", "http:ibe/AvailFare", "x:y", "h:80", "http:/ibe/AvailFare", "http:///ibe/AvailFare", "https://h/ibe/AvailFare", "ftp://h/ibe/Book",
		"http://h", "http://h?/ibe/Book", "http://h#/ibe/Book", "http://h:80/ibe/AvailFare", "http://me:pw@h/ibe/AvailFare", "http://[::1]/ibe/Book", "http://h\\x/ibe/Book",
		"HTTP://h/ibe/AvailFare", "*", "h", "ibe/AvailFare", "", "?x", ";", "%2fibe/AvailFare", ".", "javascript:/ibe/Book", "urn:a/ibe/Book", "file:///ibe/Book",
	} {
		for _, method := range []string{"GET", "OPTIONS", "CONNECT", "POST"} {
			all = append(all, method+" "+target+" HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
		}
	}
	for _, method := range []string{"HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PRI", "PURGE", "get", "G@T", "M-SEARCH", "PROPFIND", "CONNECT"} {
		all = append(all, method+" //ibe/./AvailFare HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
	}
	for _, version := range []string{"HTTP/1.0", "HTTP/0.9", "HTTP/1.2", "HTTP/2.0", "HTTP/3", "http/1.1", "HTTP/1.1 x", ""} {
		all = append(all, "GET /x/../ibe/AvailFare "+version+"\r\nHost: h\r\n\r\n")
	}
	all = append(all, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET /ibe/AvailFare\r\n\r\n", "GET  /ibe/AvailFare HTTP/1.1\r\nHost: h\r\n\r\n", "\r\nGET /ibe/AvailFare HTTP/1.1\r\nHost: h\r\n\r\n")
	const smuggled = "GET /ibe/Book HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
	for _, rest := range []string{
		"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx", "Content-Length: 1\r\nContent-Length: 2\r\n\r\nxy", "Content-Length: 1, 1\r\n\r\nx", "Content-Length: +1\r\n\r\nx",
		"Content-Length: 0x1\r\n\r\nx", "Content-Length: -1\r\n\r\nx", "Content-Length:\r\n\r\n", "Content-Length : 1\r\n\r\nx",
		"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", "Transfer-Encoding: chunked\r\nTrailer: X-T, X-Original-Url\r\n\r\n1\r\nx\r\n0\r\nX-T: /ibe/Book\r\nX-Original-Url: /ibe/Book\r\n\r\n",
		"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + smuggled, "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
		"Transfer-Encoding: identity\r\n\r\n", "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
		"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", "Transfer-Encoding:\tchunked\r\n\r\n0\r\n\r\n", "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
		"Transfer-Encoding: chunked\r\n\r\n1;x=\n\r\nx\r\n0\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n0x1\r\nx\r\n0\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n-1\r\nx\r\n0\r\n\r\n",
		"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n", "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
		"Connection: Upgrade\r\nUpgrade: foo/2\r\n\r\n", "Upgrade: websocket\r\n\r\n", "Connection: Content-Length, Host\r\nContent-Length: 1\r\n\r\nx", "Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"Expect: 100-continue\r\nContent-Length: 1\r\n\r\nx", "Expect: 200-ok\r\n\r\n", "Expect: 100-continue\r\n\r\n", "X-Original-Url: /ibe/Book\r\nX-Rewrite-Url: /ibe/Book\r\n\r\n",
		"X-Http-Method-Override: DELETE\r\n\r\n", "X-Forwarded-Prefix: /ibe/Book\r\nX-Forwarded-Uri: /ibe/Book\r\n\r\n", "Host: i\r\n\r\n", "Host:\r\n\r\n", " folded: x\r\n\r\n", "X: a\r\n b\r\n\r\n", "X: a\n\r\n", "X: a\rb\r\n\r\n",
		"X\x00: a\r\n\r\n", ": a\r\n\r\n", "X: \x00\r\n\r\n", "X y: a\r\n\r\n", "Range: bytes=0-0\r\n\r\n", "Te: trailers\r\n\r\n", "Max-Forwards: 0\r\n\r\n", "Via: 1.1 x\r\n\r\n",
	} {
		all = append(all, "POST /x/../ibe/AvailFare HTTP/1.1\r\nHost: h\r\n"+rest)
	}
	return all
}

// exchange sends a request as it is and returns the final responses. If text holds a second request, the connection must end with its response.
func exchange(t testing.TB, addr, text string) (statuses []int, bodies []string) {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer func() { _ = c.Close() }()
	require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
	_, err = io.WriteString(c, text)
	require.NoError(t, err)
	method, _, _ := strings.Cut(text, " ")
	from := bufio.NewReader(c)
	for first := true; ; {
		answer, err := http.ReadResponse(from, &http.Request{Method: method})
		if err != nil {
			require.False(t, first, "%q has no answer: %v", text, err)
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "%q", text)
			return statuses, bodies
		}
		if answer.StatusCode < 200 && answer.StatusCode != http.StatusSwitchingProtocols {
			continue
		}
		first = false
		body, err := io.ReadAll(answer.Body)
		require.NoError(t, err, "%q", text)
		statuses, bodies = append(statuses, answer.StatusCode), append(bodies, string(body))
		if strings.Count(text, "HTTP/1.1\r\n") < 2 { // there is no second request in it
			return statuses, bodies
		}
	}
}

// newTable is a gateway with tableRows, as its command runs it.
func newTable(t testing.TB, upstream string) (addr string, asked *keys, row func(key string) string) {
	limits, err := registry.New(tableRows, tokenbucket.NewMemoryStore(), registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	c, err := parseArgs(t)
	require.NoError(t, err)
	c.routes = nil
	require.Empty(t, c.routes.add(upstream))
	p, err := newProxy(c, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(p.base.CloseIdleConnections)
	p.metrics.limits.Store(limits)
	asked = new(keys)
	require.NoError(t, p.open(asked))
	server := httptest.NewUnstartedServer(p)
	server.Config = c.server(p)
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.Start()
	t.Cleanup(server.Close)
	return server.Listener.Addr().String(), asked, func(key string) string {
		row, _, _ := limits.Match(key)
		return row
	}
}

// taken returns the keys that were asked for since the last time.
func (k *keys) taken() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := k.all
	k.all = nil
	return all
}

// Whatever a client sends, the row that counts it is that of the path that the upstream serves, or the client has an error. No request is
// served that was not counted.
func TestRowsOfWhatUpstreamsServe(t *testing.T) {
	all := requests()
	require.Greater(t, len(all), 200)
	for name, begin := range map[string]func(*testing.T) server{
		"net/http": func(t *testing.T) server { return goServer(t) }, "nginx": nginxServer, "Node": nodeServer,
	} {
		t.Run(name, func(t *testing.T) {
			upstream := begin(t)
			addr, asked, row := newTable(t, upstream.url)
			before, counted, served := upstream.served(), 0, 0
			for _, text := range all {
				statuses, bodies := exchange(t, addr, text)
				keys := asked.taken()
				counted += len(keys)
				for i, status := range statuses {
					if status >= 400 {
						continue
					}
					served++
					require.Equal(t, http.StatusOK, status, "%q", text)
					require.Less(t, i, len(keys), "%q was served, and not counted", text)
					if !strings.HasPrefix(text, "HEAD") && !strings.HasPrefix(text, "TRACE") {
						require.Equal(t, row(keys[i]), rowServed(bodies[i]), "%q is counted as %q and served as %q", text, keys[i], bodies[i])
					}
				}
			}
			require.Greater(t, served, 100)
			require.Eventually(t, func() bool { return upstream.served()-before <= counted }, 10*time.Second, 10*time.Millisecond)
			require.LessOrEqual(t, upstream.served()-before, counted, "each request that was served was counted")
			t.Logf("%d requests, %d counted, %d served", len(all), counted, served)
		})
	}
}

// FuzzTargets is the same of any target, with net/http as the upstream.
func FuzzTargets(f *testing.F) {
	for _, text := range requests() {
		if _, rest, ok := strings.Cut(text, " "); ok {
			target, _, _ := strings.Cut(rest, " ")
			f.Add(target)
		}
	}
	upstream := goServer(f)
	addr, asked, row := newTable(f, upstream.url)
	f.Fuzz(func(t *testing.T, target string) {
		if strings.ContainsAny(target, "\r\n") || len(target) > 4096 { // a line of its own
			return
		}
		asked.taken()
		before := upstream.served()
		statuses, bodies := exchange(t, addr, "GET "+target+" HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
		keys := asked.taken()
		require.LessOrEqual(t, upstream.served()-before, len(keys))
		if statuses[0] >= 400 {
			return
		}
		require.Len(t, keys, 1)
		require.Equal(t, row(keys[0]), rowServed(bodies[0]))
	})
}
