package gateway

import (
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"strings"
	"unicode/utf8"
)

// route is an upstream and the paths that go there.
type route struct {
	prefix string // "" is all; without a slash at its end
	target *url.URL
}

type routes []route

// add adds [prefix=]URL. It returns what was wanted if that is something else.
func (rs *routes) add(s string) (want string) {
	want = "http://host:port or https://host, or /prefix= before that"
	var r route
	target := s
	if prefix, rest, ok := strings.Cut(s, "="); ok && strings.HasPrefix(prefix, "/") {
		r.prefix, target = strings.TrimRight(prefix, "/"), rest
	}
	u, err := url.Parse(target)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		return want
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return want + "; no user, query or fragment"
	}
	for _, other := range *rs {
		if other.prefix == r.prefix {
			return "one upstream for each prefix"
		}
	}
	r.target = u
	*rs = append(*rs, r)
	return ""
}

// find returns the route with the longest prefix that holds the path, in whole segments; nil if there is none.
func (rs routes) find(path string) *route {
	var best *route
	for i := range rs {
		r := &rs[i]
		rest, ok := strings.CutPrefix(path, r.prefix)
		if ok && (rest == "" || rest[0] == '/') && (best == nil || len(r.prefix) > len(best.prefix)) {
			best = r
		}
	}
	return best
}

// cleanPath is a path as an upstream understands it: /ibe//./AvailFare must not have another bucket than /ibe/AvailFare. A
// slash at its end stays.
func cleanPath(p string) string {
	if p == "" || p[0] != '/' {
		p = "/" + p
	}
	clean := path.Clean(p)
	if clean != "/" && strings.HasSuffix(p, "/") {
		clean += "/"
	}
	return clean
}

// dotted tells whether a path has segments that stand for others.
func dotted(path string) bool {
	for segment := range strings.SplitSeq(path, "/") {
		if segment == "." || segment == ".." {
			return true
		}
	}
	return false
}

const maxKey = 512

// fit makes any text the name of a bucket: what a client sends must not make the limiter fail.
func fit(key string) string {
	if key == "" {
		return "-"
	}
	key = strings.ToValidUTF8(key, "\uFFFD")
	if len(key) <= maxKey {
		return key
	}
	cut := maxKey
	for !utf8.RuneStart(key[cut]) {
		cut--
	}
	return key[:cut]
}

// believed tells whether X-Forwarded-* of a request were written by a proxy that is ours.
func believed(r *http.Request, proxies []netip.Prefix) bool {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return false
	}
	addr := peer.Addr().WithZone("").Unmap()
	for _, p := range proxies {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}
