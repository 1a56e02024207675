package console_test

import (
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
)

// TestWhoMayRead checks which requests may read.
func TestWhoMayRead(t *testing.T) {
	open := console.Access{Users: users(), Readers: networks("127.0.0.0/8", "10.1.0.0/16"), Proxies: networks("10.9.0.0/16"), Hosts: []string{"console.example.com"}}
	for name, test := range map[string]struct {
		access       console.Access
		from, host   string
		headers      []string
		more         http.Header
		user, secret string
		want         int
		says         string
	}{
		"this machine":                                     {from: "127.0.0.1:1", host: "127.0.0.1:8081", want: 200},
		"this machine by name":                             {from: "[::1]:1", host: "localhost:8081", want: 200},
		"this machine by its IPv6 address":                 {from: "[::1]:1", host: "[::1]:8081", want: 200},
		"IPv4 in IPv6":                                     {from: "[::ffff:127.0.0.1]:1", host: "localhost", want: 200},
		"another machine":                                  {from: "10.0.0.1:1", host: "10.0.0.9:8081", want: 403, says: "this machine"},
		"no address at all":                                {from: "@", host: "localhost", want: 403},
		"another name for this machine":                    {from: "127.0.0.1:1", host: "evil.example", want: 421, says: "not known under the name"},
		"a name that only ends like ours":                  {access: open, from: "127.0.0.1:1", host: "evil-console.example.com", want: 421},
		"another name, with a token":                       {access: open, from: "127.0.0.1:1", host: "evil.example", user: "ann", secret: writerToken, want: 421},
		"a name that is allowed":                           {access: open, from: "127.0.0.1:1", host: "Console.example.com.:8081", want: 200},
		"a network that may read":                          {access: open, from: "10.1.2.3:1", host: "10.1.0.1", want: 200},
		"one that may not":                                 {access: open, from: "10.2.2.3:1", host: "10.1.0.1", want: 401},
		"through a proxy of this machine":                  {from: "127.0.0.1:1", host: "localhost", headers: []string{"X-Forwarded-For", "10.0.0.1"}, want: 403},
		"through a proxy that has a name for whom":         {from: "127.0.0.1:1", host: "localhost", headers: []string{"X-Forwarded-User", "ann"}, want: 403},
		"through a proxy, after an empty header":           {from: "127.0.0.1:1", host: "localhost", more: http.Header{"X-Forwarded-For": {"", "10.0.0.1"}}, want: 403},
		"through a proxy that tells only how it was asked": {from: "127.0.0.1:1", host: "localhost", headers: []string{"X-Forwarded-Proto", "https"}, want: 403},
		"through a proxy with a header of its own":         {access: console.Access{ProxyHeader: "x-who"}, from: "127.0.0.1:1", host: "localhost", headers: []string{"X-Who", "ann"}, want: 403},
		"a user from anywhere":                             {access: open, from: "192.0.2.1:1", host: "10.1.0.1", user: "bob", secret: readerToken, want: 200},
		"a wrong token":                                    {access: open, from: "127.0.0.1:1", host: "localhost", user: "bob", secret: writerToken, want: 401, says: "no user with this name and token"},
		"an empty token":                                   {access: open, from: "127.0.0.1:1", host: "localhost", user: "bob", want: 401},
		"a bearer token":                                   {access: open, from: "192.0.2.1:1", host: "10.1.0.1", headers: []string{"Authorization", "Bearer " + readerToken}, want: 200},
		"a wrong bearer token":                             {access: open, from: "192.0.2.1:1", host: "10.1.0.1", headers: []string{"Authorization", "Bearer nonsense"}, want: 401},
		"a trusted proxy":                                  {access: open, from: "10.9.0.1:1", host: "10.1.0.1", headers: []string{"X-Forwarded-User", "eve"}, want: 200},
		"a trusted proxy that has asked for a password":    {access: open, from: "10.9.0.1:1", host: "10.1.0.1", headers: []string{"X-Forwarded-User", "eve"}, user: "eve", secret: "the proxy's own", want: 200},
		"a trusted proxy that does not know a user":        {access: open, from: "10.9.0.1:1", host: "10.1.0.1", headers: []string{"X-Forwarded-User", ""}, user: "bob", secret: readerToken, want: 200},
		"a trusted proxy with two names":                   {access: open, from: "10.9.0.1:1", host: "10.1.0.1", more: http.Header{"X-Forwarded-User": {"ann", "eve"}}, want: 403, says: "not one name"},
		"a trusted proxy without a name":                   {access: open, from: "10.9.0.1:1", host: "10.1.0.1", want: 401},
		"a proxy that nobody trusts":                       {access: open, from: "10.8.0.1:1", host: "10.1.0.1", headers: []string{"X-Forwarded-User", "eve"}, want: 401},
	} {
		t.Run(name, func(t *testing.T) {
			c := newConsole(t, console.Config{Access: test.access})
			for _, path := range []string{"/", "/limit?name=x", "/health", "/api/history?name=x", "/signin"} {
				r := local("GET", path, test.headers...)
				r.RemoteAddr, r.Host = test.from, test.host
				maps.Copy(r.Header, test.more)
				if test.user != "" {
					r.SetBasicAuth(test.user, test.secret)
				}
				w := ask(c, r)
				if test.want == 200 {
					require.Contains(t, []int{200, 303, 401, 403, 404}, w.Code, path)
					if path != "/signin" {
						require.NotEqual(t, 403, w.Code, path)
						require.NotEqual(t, 401, w.Code, path)
					}
					continue
				}
				require.Equal(t, test.want, w.Code, path)
				contains(t, w, test.says)
				require.Equal(t, test.want == 401, w.Header().Get("WWW-Authenticate") != "")
				require.NotContains(t, w.Body.String(), "AvailFare")
			}
		})
	}
}

func TestParseUsers(t *testing.T) {
	got, err := console.ParseUsers([]byte("# who may\n\nwrite ann " + writerToken + "\r\n  read\tbob " + readerToken + "  \n"))
	require.NoError(t, err)
	require.Equal(t, users(), got)
	for text, says := range map[string]string{
		"write ann":                                   "line 1: want write or read, a name and a token",
		"admin ann " + writerToken:                    "line 1: want write or read",
		"\nwrite ann short":                           "line 2: token of 5 bytes: want at least 16",
		"read a:b " + readerToken:                     "line 1: name",
		"read a " + readerToken + " x":                "line 1: want",
		strings.Repeat("read a "+readerToken+"\n", 2): "line 2: the name of line 1: want each name once",
		"write " + writerToken + " ann":               "line 1: token of 3 bytes",
		"write " + writerToken + ":x " + readerToken:  "line 1: name: want",
		"read " + readerToken + " " + writerToken + "\nwrite " + readerToken + " " + writerToken + "x": "line 2: the name of line 1",
	} {
		_, err := console.ParseUsers([]byte(text))
		require.ErrorContains(t, err, says)
		for _, secret := range []string{readerToken[:10], writerToken[:10], "short"} {
			require.NotContains(t, err.Error(), secret)
		}
	}
}

func TestBadConfigurations(t *testing.T) {
	_, err := console.New(console.Config{})
	require.ErrorIs(t, err, console.ErrInvalid)
	_, err = console.New(console.Config{Source: none{}, Beat: 1})
	require.ErrorContains(t, err, "Beat 1ns: want 100ms to 1m")
	_, err = console.New(console.Config{Source: none{}, Access: console.Access{Users: []console.User{{Name: "ann", Token: "x"}}}})
	require.ErrorContains(t, err, "want at least 16")
}

// The policy lets no inline script or style run, and no other host be asked.
func TestHeaders(t *testing.T) {
	c := newConsole(t, console.Config{Access: console.Access{Users: users()}})
	for _, r := range []*http.Request{
		local("GET", "/"), local("GET", "/limit?name=x"), local("GET", "/nowhere"), local("POST", "/"), local("GET", "/api/history?name=x"), local("GET", "/", "Host", "evil"),
		local("GET", "/", "Authorization", "Bearer wrong"),
	} {
		w := ask(c, r)
		policy := w.Header().Get("Content-Security-Policy")
		for _, part := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'self'", "require-trusted-types-for 'script'"} {
			require.Contains(t, policy, part)
		}
		require.NotContains(t, policy, "unsafe")
		require.NotContains(t, policy, "http")
		require.Equal(t, "nosniff", w.Header().Get("X-Content-Type-Options"))
		require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
		require.NotContains(t, bare(w), "style=")
		require.NotContains(t, bare(w), "<style")
		require.NotRegexp(t, `<script(?:[^>]*)>[^<]`, w.Body.String())
		require.NotRegexp(t, `<[^>]*\son[a-z]+=`, bare(w))
	}
}

// No page contains a secret, not even a page for its owner.
func TestNoSecrets(t *testing.T) {
	c := newConsole(t, console.Config{Access: console.Access{Users: users()}})
	for _, path := range []string{"/", "/limit?name=%2Fibe%2FAvailFare", "/health", "/api/history?name=x", "/nowhere"} {
		r := local("GET", path)
		r.SetBasicAuth("ann", writerToken)
		body := ask(c, r).Body.String()
		require.NotContains(t, body, writerToken)
		require.NotContains(t, body, readerToken)
		require.NotContains(t, body, "bob")
	}
}

// A token identifies one user, so two users cannot share one.
func TestTokensAreDifferent(t *testing.T) {
	_, err := console.New(console.Config{Source: fleettest.Example(), Access: console.Access{Users: []console.User{
		{Name: "ann", Token: writerToken, Write: true}, {Name: "bob", Token: writerToken},
	}}})
	require.ErrorContains(t, err, "same token")
	require.NotContains(t, err.Error(), writerToken)
	_, err = console.New(console.Config{Source: fleettest.Example(), Access: console.Access{Key: []byte("too short")}})
	require.ErrorContains(t, err, "key of 9 bytes: want at least 16")
	require.NotContains(t, err.Error(), "too short")
}
