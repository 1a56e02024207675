package httplimit_test

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// proxies are trusted in these tests: 10.0.0.0/8, and 2001:db8:ffff::/48.
var proxies = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8:ffff::/48")}

func from(peer string, forwarded ...string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.RemoteAddr = peer
	if forwarded != nil {
		r.Header["X-Forwarded-For"] = forwarded
	}
	return r
}

func TestByClient(t *testing.T) {
	for name, c := range map[string]struct {
		peer      string
		forwarded []string
		want      string
	}{
		"peer":                        {"203.0.113.7:1234", nil, "203.0.113.7"},
		"forged":                      {"203.0.113.7:1234", []string{"198.51.100.1"}, "203.0.113.7"},
		"forged with a proxy's":       {"203.0.113.7:1234", []string{"198.51.100.1, 10.0.0.1"}, "203.0.113.7"},
		"behind a proxy":              {"10.0.0.1:80", []string{"203.0.113.7"}, "203.0.113.7"},
		"behind two":                  {"10.0.0.1:80", []string{"203.0.113.7, 10.0.0.2"}, "203.0.113.7"},
		"forged behind a proxy":       {"10.0.0.1:80", []string{"198.51.100.1, 203.0.113.7"}, "203.0.113.7"},
		"forged field behind a proxy": {"10.0.0.1:80", []string{"198.51.100.1", "203.0.113.7"}, "203.0.113.7"},
		"two fields":                  {"10.0.0.1:80", []string{"203.0.113.7", "10.0.0.3,10.0.0.2"}, "203.0.113.7"},
		"proxies only":                {"10.0.0.1:80", []string{"10.0.0.3, 10.0.0.2"}, "10.0.0.3"},
		"nothing forwarded":           {"10.0.0.1:80", nil, "10.0.0.1"},
		"empty":                       {"10.0.0.1:80", []string{""}, "10.0.0.1"},
		"unknown":                     {"10.0.0.1:80", []string{"203.0.113.7, unknown, 10.0.0.2"}, "10.0.0.2"},
		"empty entry":                 {"10.0.0.1:80", []string{"203.0.113.7,,10.0.0.2"}, "10.0.0.2"},
		"host name":                   {"10.0.0.1:80", []string{"localhost"}, "10.0.0.1"},
		"quoted":                      {"10.0.0.1:80", []string{`"203.0.113.7"`}, "10.0.0.1"},
		"octal":                       {"10.0.0.1:80", []string{"203.0.113.007"}, "10.0.0.1"},
		"tabs":                        {"10.0.0.1:80", []string{"\t203.0.113.7\t ,\t10.0.0.2 "}, "203.0.113.7"},
		"port":                        {"10.0.0.1:80", []string{"203.0.113.7:4321"}, "203.0.113.7"},
		"bad port":                    {"10.0.0.1:80", []string{"203.0.113.7:port"}, "10.0.0.1"},
		"IPv6":                        {"[2001:db8:ffff::1]:80", []string{"2001:db8::7"}, "2001:db8::7"},
		"IPv6 in brackets":            {"10.0.0.1:80", []string{"[2001:db8::7]"}, "2001:db8::7"},
		"IPv6 with a port":            {"10.0.0.1:80", []string{"[2001:db8::7]:80"}, "2001:db8::7"},
		"IPv6 spelled out":            {"10.0.0.1:80", []string{"2001:0DB8:0:0::0007"}, "2001:db8::7"},
		"IPv4 in brackets":            {"10.0.0.1:80", []string{"[203.0.113.7]"}, "10.0.0.1"},
		"zone":                        {"[fe80::1%eth0]:80", nil, "fe80::1"},
		"zone forwarded":              {"10.0.0.1:80", []string{"fe80::1%evil"}, "fe80::1"},
		"IPv4 in IPv6":                {"[::ffff:10.0.0.1]:80", []string{"::ffff:203.0.113.7"}, "203.0.113.7"},
		"Unix socket":                 {"@", []string{"203.0.113.7"}, "@"},
		"no peer":                     {"", nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, httplimit.ByClient(proxies...)(from(c.peer, c.forwarded...)))
		})
	}
	mapped := httplimit.ByClient(netip.MustParsePrefix("::ffff:10.0.0.0/104"))
	require.Equal(t, "203.0.113.7", mapped(from("10.0.0.1:80", "203.0.113.7")), "the prefix in IPv6 form, too")
	require.Equal(t, "10.0.0.1", httplimit.ByClient()(from("10.0.0.1:80", "203.0.113.7")), "nobody is trusted by default")

	list := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	key := httplimit.ByClient(list...)
	list[0] = netip.MustParsePrefix("192.0.2.0/24")
	require.Equal(t, "203.0.113.7", key(from("10.0.0.1:80", "203.0.113.7")), "the caller's list may change")
}

func TestByClientNetwork(t *testing.T) {
	key := httplimit.ByClientNetwork(24, 64, proxies...)
	require.Equal(t, "203.0.113.0/24", key(from("203.0.113.7:1234")))
	require.Equal(t, "2001:db8:1:2::/64", key(from("[2001:db8:1:2:3:4:5:6]:80")))
	require.Equal(t, "2001:db8:1:2::/64", key(from("10.0.0.1:80", "2001:db8:1:2:ffff::1")))
	require.Equal(t, "203.0.113.7/32", httplimit.ByClientNetwork(32, 64)(from("[::ffff:203.0.113.7]:80")))
	require.Equal(t, "@", key(from("@")))

	real := httplimit.ByClientField("x-real-ip", 32, 64, proxies...)
	r := from("10.0.0.1:80", "192.0.2.1")
	r.Header.Set("X-Real-IP", "203.0.113.7")
	require.Equal(t, "203.0.113.7/32", real(r))
	r.RemoteAddr = "192.0.2.9:80"
	require.Equal(t, "192.0.2.9/32", real(r), "of a peer that is not trusted")
	require.Nil(t, httplimit.ByClientField("", 32, 64))
}

func TestByPathAndHeader(t *testing.T) {
	at := func(target string) *http.Request { return httptest.NewRequest(http.MethodGet, target, nil) }
	require.Equal(t, "/ibe/Avail Fare", httplimit.ByPath(at("/ibe/Avail%20Fare?from=FRA")))
	require.Equal(t, "/", httplimit.ByPath(get(t, "http://upstream.test")))
	require.Equal(t, "/", httplimit.ByPath(&http.Request{}))
	for _, target := range []string{"http:http://h/ibe/AvailFare", "h:a", "*", "http://h"} {
		require.Equal(t, httplimit.NoKey, httplimit.ByPath(at(target)), target)
	}
	require.Equal(t, httplimit.NoKey, httplimit.ByPath(&http.Request{Method: http.MethodConnect, URL: &url.URL{Host: "h:443"}}))

	r := at("http://shop.test/")
	r.Header.Add("X-Api-Key", "one")
	r.Header.Add("X-Api-Key", "two")
	require.Equal(t, httplimit.NoKey, httplimit.ByHeader("x-api-key")(r), "upstreams differ in which of them they read")
	require.Equal(t, httplimit.NoKey, httplimit.Join(httplimit.ByPath, httplimit.ByHeader("x-api-key"))(r))
	r.Header.Set("X-Api-Key", "one")
	require.Equal(t, "one", httplimit.ByHeader("x-api-key")(r))
	require.Equal(t, "", httplimit.ByHeader("Authorization")(r))
	for host, want := range map[string]string{
		"shop.test": "shop.test", "SHOP.Test.": "shop.test", "Shop.test.:8080": "shop.test:8080", "shop.test..": "shop.test.",
		"[2001:DB8::1]": "[2001:db8::1]", "[2001:DB8::1]:80": "[2001:db8::1]:80", "": "", ".": "", ":80": ":80",
	} {
		r.Host = host
		require.Equal(t, want, httplimit.ByHeader("host")(r), host)
	}
}

// Different parts never make one key.
func TestJoin(t *testing.T) {
	fixed := func(s string) httplimit.KeyFunc { return func(*http.Request) string { return s } }
	join := func(parts ...string) string {
		var keys []httplimit.KeyFunc
		for _, p := range parts {
			keys = append(keys, fixed(p))
		}
		return httplimit.Join(keys...)(nil)
	}
	require.Equal(t, "203.0.113.7|/fares", join("203.0.113.7", "/fares"))
	seen := map[string][]string{}
	pieces := []string{"", "a", "|", `\`, `\|`, `a|`, `|a`, `\\`}
	for _, a := range pieces {
		for _, b := range pieces {
			for _, parts := range [][]string{{a}, {a, b}, {a, b, a}} {
				key := join(parts...)
				if other, ok := seen[key]; ok {
					require.Equal(t, other, parts)
				}
				seen[key] = parts
			}
		}
	}
}

// FuzzForwardedFor compares the walk with one that takes the whole field apart first and reads addresses another way, and
// checks what an attacker must not achieve.
func FuzzForwardedFor(f *testing.F) {
	for _, peer := range []string{"203.0.113.7:1", "10.0.0.1:1", "[2001:db8:ffff::1]:1", "[::ffff:10.0.0.1]:1", "[fe80::1%eth0]:1", "@", ""} {
		for _, field := range []string{"", "198.51.100.1", "198.51.100.1,10.0.0.1", "10.0.0.2\n10.0.0.3", "a,10.0.0.3", "[2001:db8::1]:80 , 10.1.1.1", "1.2.3.4:80,::ffff:10.2.3.4"} {
			f.Add(peer, field)
		}
	}
	key := httplimit.ByClient(proxies...)
	f.Fuzz(func(t *testing.T, peer, field string) {
		fields := strings.Split(field, "\n")
		got := key(from(peer, fields...))
		require.Equal(t, naiveClient(peer, strings.Split(strings.Join(fields, ","), ",")), got)

		addr, err := netip.ParseAddr(got)
		if err != nil {
			require.Equal(t, peer, got, "what is no address is the peer as it is")
		}
		if trustsIt := err == nil && (proxies[0].Contains(addr) || proxies[1].Contains(addr)); !trustsIt {
			longer := append([]string{"192.0.2.1, 10.9.9.9"}, fields...)
			require.Equal(t, got, key(from(peer, longer...)), "what a client puts before changes nothing")
		}
	})
}

func naiveClient(peer string, entries []string) string {
	client := peer
	for hop := peer; ; {
		addr, ok := naiveAddr(hop)
		if !ok {
			return client
		}
		client = addr.String()
		if len(entries) == 0 || !proxies[0].Contains(addr) && !proxies[1].Contains(addr) {
			return client
		}
		hop = strings.Trim(entries[len(entries)-1], " \t")
		entries = entries[:len(entries)-1]
	}
}

// naiveAddr tries every form one after the other.
func naiveAddr(s string) (netip.Addr, bool) {
	candidates := []string{s}
	if rest, ok := strings.CutPrefix(s, "["); ok {
		if i := strings.LastIndex(rest, "]"); i >= 0 && strings.Contains(rest[:i], ":") {
			port, colon := strings.CutPrefix(rest[i+1:], ":")
			if !colon && port == "" || colon && isPort(port) {
				candidates = append(candidates, rest[:i])
			}
		}
	} else if host, port, ok := strings.Cut(s, ":"); ok && isPort(port) && !strings.Contains(host, ":") {
		candidates = append(candidates, host)
	}
	for _, c := range candidates {
		if a, err := netip.ParseAddr(c); err == nil {
			return a.WithZone("").Unmap(), true
		}
	}
	return netip.Addr{}, false
}

func isPort(s string) bool {
	n := 0
	for _, c := range s {
		if c < '0' || c > '9' {
			return false
		}
		if n = n*10 + int(c-'0'); n > 65535 {
			return false
		}
	}
	return s != ""
}
