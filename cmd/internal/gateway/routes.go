package gateway

import (
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"strings"
	"unicode/utf8"
)

// route is an upstream and the prefix of its paths.
type route struct {
	prefix string // without a slash at its end; "" matches all paths
	target *url.URL
}

type routes []route

// add adds [prefix=]URL. If that is invalid, want describes what is accepted.
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

// find returns the route with the longest prefix of the path, in whole segments, or nil if there is none.
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

// cleanPath resolves // and dot segments, as httplimit.Canonical does for requests. It keeps a slash at the end.
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

const maxKey = 512

// fit turns any text into a valid name of a bucket, so that no text from a client makes the limiter fail.
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

// fromTrustedProxy reports whether a trusted proxy has sent the request.
func fromTrustedProxy(r *http.Request, proxies []netip.Prefix) bool {
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
