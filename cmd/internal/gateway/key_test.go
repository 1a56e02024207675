package gateway

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

func TestParseKey(t *testing.T) {
	for _, key := range []string{"path", "client", "header:X-A", "path+header:X-A", "header:X-A+path", "path+client+header:a+header:b"} {
		k, wrong := parseKey(key, nil)
		require.Nil(t, wrong, key)
		require.Len(t, k.parts, strings.Count(key, "+")+1)
	}
	for key, want := range map[string]KeyError{
		"pth":                   {Part: "pth", Want: wantKey, Nearest: "path"},
		"path+clent":            {Part: "clent", Want: wantKey, Nearest: "client"},
		"path+haeder:X-Tenant":  {Part: "haeder:X-Tenant", Want: wantKey, Nearest: "header:X-Tenant"},
		"path+Header:X-Tenant":  {Part: "Header:X-Tenant", Want: wantKey, Nearest: "header:X-Tenant"},
		"path+header:":          {Part: "header:", Want: wantKey},
		"header:a b":            {Part: "header:a b", Want: wantKey},
		"":                      {Want: wantKey},
		"path+":                 {Want: wantKey},
		"+":                     {Want: wantKey},
		"cookie":                {Part: "cookie", Want: wantKey},
		"path+path":             {Part: "path", Want: "each part once"},
		"header:x-a+header:X-A": {Part: "header:X-A", Want: "each part once"},
	} {
		_, wrong := parseKey(key, nil)
		want.Key = key
		require.Equal(t, &want, wrong, key)
	}
	_, err := parseArgs(t, "--key", "path+clent")
	var wrong *KeyError
	require.ErrorAs(t, err, &wrong)
	require.EqualError(t, err, `--key "path+clent": part "clent": want path, client or header:NAME, or several of them with + between: did you mean client?`)
	_, err = parseArgs(t, "--key", "pth")
	require.EqualError(t, err, `--key "pth": want path, client or header:NAME, or several of them with + between: did you mean path?`)
	_, err = parseArgs(t, "--key", strings.Repeat("client+", 9))
	require.True(t, errors.As(err, &wrong))
}

func parseArgs(t testing.TB, args ...string) (*config, error) {
	t.Helper()
	o := new(options)
	cmd := Command()
	for _, g := range o.flags() {
		cmd.ResetFlags()
		cmd.Flags().AddFlagSet(g.flags)
		var own []string
		for i := 0; i < len(args); i += 2 {
			if cmd.Flags().Lookup(strings.TrimPrefix(args[i], "--")) != nil {
				own = append(own, args[i], args[i+1])
			}
		}
		require.NoError(t, cmd.Flags().Parse(own))
	}
	o.upstreams, o.limits, o.store = []string{"http://u:1"}, "file:///limits.yaml", "memory"
	return o.parse()
}

// request has a path and a tenant.
func request(path, tenant string) *http.Request {
	return &http.Request{URL: &url.URL{Path: path}, Header: http.Header{"X-Tenant": {tenant}}}
}

func TestKeyOfSeveralParts(t *testing.T) {
	c, err := parseArgs(t, "--key", "path+header:X-Tenant")
	require.NoError(t, err)
	limits, err := registry.New(registry.Static{{Name: "/ibe/*", Rate: 1, PerKey: true}, {Name: "/slash/", Rate: 1}, {Name: `/p\|q`, Rate: 1}, {Name: "/ibe/Book|vip", Rate: 1}},
		tokenbucket.NewMemoryStore(), registry.WithParts())
	require.NoError(t, err)
	defer limits.Close()
	for _, r := range []struct{ path, tenant, key, row string }{
		{"/ibe/a", "acme", "/ibe/a|acme", "/ibe/*"},
		{"/ibe//./a/;x=1", "acme", "/ibe/a|acme", "/ibe/*"},
		{"/ibe", "acme", "/ibe/|acme", "/ibe/*"},
		{"/ibe/Book", "vip", "/ibe/Book|vip", "/ibe/Book|vip"},
		{"/ibe/Book/", "vip", "/ibe/Book|vip", "/ibe/Book|vip"},
		{"/ibe/Book", "other", "/ibe/Book|other", "/ibe/*"},
		{"/slash", "x", "/slash/|x", "/slash/"},
		{"/p|q/", `a\b`, `/p\|q|a\\b`, `/p\|q`},
		{"/p", "q|x", `/p|q\|x`, ""},
		{"/no", "", "/no|", ""},
		{"/no\xff", "\xfe", `/no\xff|\xfe`, ""},
	} {
		require.Equal(t, r.key, c.key.of(c, request(r.path, r.tenant), limits.Match), "%q %q", r.path, r.tenant)
		row, _, _ := limits.Match(r.key)
		require.Equal(t, r.row, row, r.key)
	}
}

// The row that says most of the key counts, however a path is written, and whatever shorter rows say of the other parts.
func TestShorterRowsHideNone(t *testing.T) {
	for _, r := range []struct {
		key, match string
		rows       []string
		path, row  string
	}{
		{"header:X-Tenant+path", "clean", []string{"acme", "acme|/ibe/Book"}, "/ibe/Book/", "acme|/ibe/Book"},
		{"header:X-Tenant+path", "clean", []string{"acme", "acme|/ibe/Book"}, "/ibe/Book;x=1", "acme|/ibe/Book"},
		{"header:X-Tenant+path", "clean", []string{"acme", "acme|/ibe/*"}, "/ibe", "acme|/ibe/*"},
		{"header:X-Tenant+path", "clean", []string{"acme", "ac*"}, "/ibe", "acme"},
		{"header:X-Tenant+path", "prefix", []string{"acme", "acme|/ibe/Book"}, "/ibe/Book/1", "acme|/ibe/Book"},
		{"header:X-Tenant+path", "prefix", []string{"acme|/ibe/*", "acme|/ibe/Book"}, "/ibe/Book/1", "acme|/ibe/Book"},
		{"header:X-Tenant+path", "prefix", []string{"acme|/ibe/Book/*", "acme|/ibe/Book"}, "/ibe/Book/1", "acme|/ibe/Book/*"},
		{"path+header:X-Tenant", "clean", []string{"/ibe/*", "/ibe/Book|ac*"}, "/ibe/Book", "/ibe/Book|ac*"},
		{"path+header:X-Tenant", "clean", []string{"/ibe/*", "/ibe/Book|ac*"}, "/ibe/Book/", "/ibe/Book|ac*"},
		{"path+header:X-Tenant", "prefix", []string{"/ibe/*", "/ibe/Book|ac*"}, "/ibe/Book/1", "/ibe/Book|ac*"},
	} {
		c, err := parseArgs(t, "--key", r.key, "--match", r.match)
		require.NoError(t, err)
		var rows registry.Static
		for _, name := range r.rows {
			rows = append(rows, registry.Limit{Name: name, Rate: 1})
		}
		limits, err := registry.New(rows, tokenbucket.NewMemoryStore(), registry.WithParts())
		require.NoError(t, err)
		row, _, _ := limits.Match(c.key.of(c, request(r.path, "acme"), limits.Match))
		limits.Close()
		require.Equal(t, r.row, row, "%+v", r)
	}
}

// However a path is written, a row that holds for all paths has one bucket for it.
func TestPathIsCleanBehindOtherParts(t *testing.T) {
	c, err := parseArgs(t, "--key", "header:X-Tenant+path")
	require.NoError(t, err)
	limits, err := registry.New(registry.Static{{Name: "acme", Rate: 1, PerKey: true}}, tokenbucket.NewMemoryStore(), registry.WithParts())
	require.NoError(t, err)
	defer limits.Close()
	for _, path := range []string{"/ibe", "/ibe/", "/ibe;x=1", "//ibe/.;y/"} {
		require.Equal(t, "acme|/ibe", c.key.of(c, request(path, "acme"), limits.Match), path)
	}
}

func TestPartOf(t *testing.T) {
	for _, c := range []struct {
		row  string
		i    int
		says string
		all  bool
	}{
		{"/a", 0, "/a", true}, {"/a*", 0, "/a*", false}, {"/a|x", 0, "/a", true}, {"/a|x*", 0, "/a", true}, {"*", 0, "*", false},
		{"x", 1, "", false}, {"x*", 1, "", false}, {"x|/a", 1, "/a", true}, {"x|/a*", 1, "/a*", false}, {"x|/a|y*", 1, "/a", true}, {"x|", 1, "", true},
		{`x\|y|/a\|b\\`, 1, `/a|b\`, true}, {`x\|y`, 1, "", false},
	} {
		says, all := partOf(c.row, c.i)
		require.Equal(t, c.says, says, "%+v", c)
		require.Equal(t, c.all, all, "%+v", c)
	}
}

// A proxy that is trusted for the key is believed in what it passes on, however its network is written.
func TestTrustedProxies(t *testing.T) {
	for _, network := range []string{"10.0.0.0/8", "10.1.2.3", "::ffff:10.0.0.0/104", "::ffff:10.1.2.3", "::ffff:a01:203"} {
		c, err := parseArgs(t, "--trusted-proxy", network, "--key", "client")
		require.NoError(t, err)
		for _, peer := range []string{"10.1.2.3:4", "[::ffff:10.1.2.3]:4"} {
			r := &http.Request{RemoteAddr: peer, Header: http.Header{"X-Forwarded-For": {"192.0.2.1"}}}
			require.Equal(t, "192.0.2.1", c.key.of(c, r, names()), "%s %s", network, peer)
			require.True(t, fromTrustedProxy(r, c.proxies), "%s %s", network, peer)
		}
	}
}

// Single keys are what they were, whatever is in them.
func TestSingleKeysAsBefore(t *testing.T) {
	for key, want := range map[string]string{"path": "/a|b\\", "header:X-Tenant": "x|y\\\uFFFD"} {
		c, err := parseArgs(t, "--key", key)
		require.NoError(t, err)
		require.Equal(t, want, c.key.of(c, request("/a|b\\", "x|y\\\xff"), names()))
	}
}

// No two pairs of a path and a tenant have one key, nor, whatever row counts, one bucket of that row.
func FuzzKey(f *testing.F) {
	long := "/" + strings.Repeat("x", 2000)
	f.Add("/a|b", "c", "/a", "b|c")
	f.Add(`/a\`, "|b", "/a", `\|b`)
	f.Add("/a\xff", "b", "/a\xfe", "b")
	f.Add(`/a`, `\xff`, "/a", "\xff")
	f.Add(long+"a", "x", long+"b", "x")
	f.Add("/a", long+"a", "/a", long+"b")
	f.Add(long, "", keyPart(long), "")
	f.Add("/ibe/x", "", "/ibe/y", "")
	c, err := parseArgs(f, "--key", "path+header:X-Tenant", "--match", "exact")
	require.NoError(f, err)
	limits, err := registry.New(registry.Static{{Name: "/ibe/*", Rate: 1, PerKey: true}}, tokenbucket.NewMemoryStore(),
		registry.WithParts(), registry.WithUnknown(registry.Default(registry.Limit{Rate: 1})))
	require.NoError(f, err)
	f.Cleanup(limits.Close)
	f.Fuzz(func(t *testing.T, path1, tenant1, path2, tenant2 string) {
		if tenant1 == httplimit.NoKey || tenant2 == httplimit.NoKey { // net/http lets none in
			t.Skip()
		}
		key := func(path, tenant string) (key, bucket, row string) {
			key = c.key.of(c, request(path, tenant), limits.Match)
			l, err := limits.Limiter(key)
			require.NoError(t, err)
			row, _, _ = limits.Match(key)
			return key, l.Name(), row
		}
		key1, bucket1, row1 := key(path1, tenant1)
		key2, bucket2, row2 := key(path2, tenant2)
		same := cleanPath(path1) == cleanPath(path2) && tenant1 == tenant2
		require.Equal(t, same, key1 == key2)
		switch {
		case row1 != row2:
			require.NotEqual(t, bucket1, bucket2)
		case row1 == "":
			require.Equal(t, same, bucket1 == bucket2)
		default: // the row's tenants
			require.Equal(t, tenant1 == tenant2, bucket1 == bucket2)
		}
	})
}

// A path of a megabyte: what it costs, against the single key.
func BenchmarkLongPath(b *testing.B) {
	r := request(strings.Repeat("/a", 1<<19), "acme")
	for _, key := range []string{"path", "path+header:X-Tenant"} {
		c, err := parseArgs(b, "--key", key)
		require.NoError(b, err)
		limits, err := registry.New(registry.Static{{Name: "/ibe/*", Rate: 1}, {Name: "/a/a", Rate: 1}}, tokenbucket.NewMemoryStore(), registry.WithParts())
		require.NoError(b, err)
		b.Run(key, func(b *testing.B) {
			for b.Loop() {
				c.key.of(c, r, limits.Match)
			}
		})
		limits.Close()
	}
}

// Host names have no case, and may end with a dot.
func TestHostKeys(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer upstream.Close()
	for key, want := range map[string]string{"header:Host": "shop.test", "path+header:Host": "/|shop.test"} {
		var asked keys
		server := newTestProxy(t, &asked, "--upstream", upstream.URL, "--key", key)
		for _, host := range []string{"shop.test", "SHOP.test", "shop.test."} {
			_, _ = raw(t, server, "GET / HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
		}
		require.Equal(t, []string{want, want, want}, asked.all)
	}
}
