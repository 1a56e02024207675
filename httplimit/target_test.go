package httplimit_test

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

func TestCanonical(t *testing.T) {
	for target, want := range map[string]string{
		"/": "/", "//": "/", "/a": "/a", "/a/": "/a/", "/a//": "/a/", "//a/b": "/a/b", "///a": "/a", "http://h//a/b": "/a/b", "http:/a": "/a",
		"/./a": "/a", "/a/.": "/a/", "/a/..": "/", "/../../a": "/a", "/a/./b/../c/": "/a/c/", "/a/%2e%2E/b": "/b", "/%2e/a": "/a",
		"/%61%7e": "/a~", "/a%2cb%3Fc": "/a%2Cb%3Fc", "/a%25b": "/a%25b", "/a%252fb": "/a%252fb", "/a.": "/a.", "/...": "/...", "/.a": "/.a",
		"/a;x=1/b;y": "/a;x=1/b;y", "/a/;x": "/a/;x", "/a%3bb": "/a%3Bb", "/A": "/A", "/a!$&'()*+,=:@": "/a!$&'()*+,=:@", "/a%21": "/a%21",
		"/%ff": "/%FF", "/\xff": "/%FF", "/é": "/%C3%A9", `/a"b`: "/a%22b", "/a|b": "/a%7Cb", "/a#b": "/a%23b", "/a%20": "/a%20",
		"/a?x=//../%2f": "/a?x=//../%2f", "/a?": "/a?", "/a//b?c": "/a/b?c",
	} {
		u, err := url.ParseRequestURI(target)
		require.NoError(t, err, target)
		got, err := httplimit.Canonical(u)
		require.NoError(t, err, target)
		require.Equal(t, want, got.RequestURI(), target)
	}
	for target, part := range map[string]string{
		"http:http://h/ibe/AvailFare": "opaque part", "h:a": "opaque part", "*": "no path", "http://h": "no path", "http://h?/a": "no path",
		"/a%2fb": "escaped slash", "/a/..%2Fb": "escaped slash", `/a\b`: "backslash", "/a%5cb": "backslash", `/a\b%2fc`: "backslash",
		"/a%00": "control character", "/a%0a": "control character", "/%7f": "control character",
		"/a/..;/b": "segment of parameters alone", "/.;x/a": "segment of parameters alone", "/;x/a": "segment of parameters alone",
		"/..%3b/a": "segment of parameters alone", "/%2e%2e;/a": "segment of parameters alone", "/a/..;x": "segment of parameters alone",
	} {
		u, err := url.ParseRequestURI(target)
		require.NoError(t, err, target)
		_, err = httplimit.Canonical(u)
		var wrong *httplimit.TargetError
		require.ErrorAs(t, err, &wrong, target)
		require.Equal(t, part, wrong.Part, target)
		require.Contains(t, err.Error(), "want a path")
	}
	got, err := httplimit.Canonical(&url.URL{Path: "/a b", RawPath: "/of/another", User: url.User("me"), Host: "h", Scheme: "http"})
	require.NoError(t, err)
	require.Equal(t, "/a%20b", got.String(), "a program changed the path alone")
}

// FuzzCanonical compares the readings of upstreams that differ: of a canonical path all give the same.
func FuzzCanonical(f *testing.F) {
	for _, s := range []string{
		"/ibe/AvailFare", "//x/ibe/AvailFare", "http:http://h/ibe/AvailFare", "/ibe/%2e%2E/x/./y", "/a%2fb", `/a\b`, "/;/a", "/a/..;/b", "/a;b/../c",
		"/%00", "/%ff%c0%af", "*", "http://me@h/a?b", "/a%3b/..%3bx", "/a%zz", "/%252e%252e/a", "/a/;x", "/a;/", "/.%2e;a",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, target string) {
		u, err := url.ParseRequestURI(target)
		if err != nil {
			return
		}
		got, err := httplimit.Canonical(u)
		if err != nil {
			return
		}
		escaped := got.EscapedPath()
		require.Equal(t, got.RawPath, escaped, "net/http sends it as it is")
		require.Empty(t, got.Scheme+got.Host+got.Opaque)
		sent, err := url.ParseRequestURI(got.RequestURI())
		require.NoError(t, err)
		again, err := httplimit.Canonical(sent)
		require.NoError(t, err)
		require.Equal(t, got.RequestURI(), again.RequestURI(), "it is its own canonical form")
		require.Equal(t, got.Path, sent.Path)

		unescape := func(s string) string { s, err := url.PathUnescape(s); require.NoError(t, err); return s }
		tail := ""
		if escaped != "/" && strings.HasSuffix(escaped, "/") {
			tail = "/"
		}
		require.Equal(t, got.Path, path.Clean(got.Path)+tail, "unescaped, then resolved")
		require.Equal(t, got.Path, unescape(path.Clean(escaped))+tail, "resolved, then unescaped")
		reference, err := (&url.URL{Scheme: "http", Host: "upstream", Path: "/"}).Parse(escaped)
		require.NoError(t, err)
		require.Equal(t, "upstream", reference.Host)
		require.Equal(t, got.Path, reference.Path, "resolved as a reference")
		require.Equal(t, got.Path, unescape(strings.ReplaceAll(escaped, `\`, "/")), "with backslashes for slashes")
		require.Equal(t, path.Clean(withoutParameters(got.Path)), withoutParameters(path.Clean(got.Path)), "parameters dropped before or after")
		raw := withoutParameters(escaped)
		require.Equal(t, path.Clean(raw), strings.TrimSuffix(raw, "/")+map[bool]string{true: "/"}[strings.Trim(raw, "/") == ""],
			"without parameters there is nothing to resolve")
		require.NotContains(t, got.Path, "\x00")
	})
}

// withoutParameters drops ; and what follows from each segment.
func withoutParameters(p string) string {
	segments := strings.Split(p, "/")
	for i, s := range segments {
		segments[i], _, _ = strings.Cut(s, ";")
	}
	if p = strings.Join(segments, "/"); p != "/" {
		return strings.TrimSuffix(p, "/")
	}
	return p
}

// What was limited is what is sent, also behind a reverse proxy of a program's own.
func TestCanonicalHandler(t *testing.T) {
	var served []string
	h := httplimit.CanonicalHandler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		served = append(served, httplimit.ByPath(r)+" "+r.URL.String())
	}))
	for target, want := range map[string]int{"//x/%61?q": 200, "http:http://h/a": 400, "/a%2fb": 400, "http://h": 400, "http://h/b": 200} {
		r := httptest.NewRequest(http.MethodGet, target, nil)
		answer := httptest.NewRecorder()
		h.ServeHTTP(answer, r)
		require.Equal(t, want, answer.Code, target)
		require.Equal(t, target, r.RequestURI)
	}
	answer := httptest.NewRecorder()
	h.ServeHTTP(answer, &http.Request{Method: http.MethodConnect, URL: &url.URL{Host: "h:443", Path: "/a"}})
	require.Equal(t, http.StatusBadRequest, answer.Code)
	require.ElementsMatch(t, []string{"/x/a /x/a?q", "/b /b"}, served)
}

// A request that no key limits neither passes nor costs a permit.
func TestNoKey(t *testing.T) {
	l, err := tokenbucket.NewSmoothBursty("one", 0.001)
	require.NoError(t, err)
	gate := gate.One(l, time.Hour)
	limit, err := httplimit.NewMiddleware(gate)
	require.NoError(t, err)
	answer := httptest.NewRecorder()
	limit(http.NotFoundHandler()).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "http:http://h/a", nil))
	require.Equal(t, http.StatusBadRequest, answer.Code)

	transport, err := httplimit.NewTransport(gate)
	require.NoError(t, err)
	body := &bodyClosed{Reader: strings.NewReader("x")}
	_, err = transport.RoundTrip(&http.Request{Method: http.MethodPost, URL: &url.URL{Scheme: "http", Opaque: "//h/a"}, Body: body})
	require.True(t, errors.Is(err, httplimit.ErrNoKey), "%v", err)
	require.True(t, body.closed)
	ok, err := l.TryAcquire(t.Context(), 1, 0)
	require.NoError(t, err)
	require.True(t, ok, "its permit is still there")
}

type bodyClosed struct {
	io.Reader
	closed bool
}

func (c *bodyClosed) Close() error { c.closed = true; return nil }
