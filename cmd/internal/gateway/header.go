package gateway

import (
	"maps"
	"net/http"
	"slices"
	"strings"
)

// proxyFields and proxyPrefixes name the header fields in which proxies tell upstreams a request's client and route. Upstreams trust these
// fields, so the gateway forwards them only from trusted proxies. Otherwise any client could forge them.
var (
	proxyFields = []string{
		"Forwarded", "Proxy", "Client-Ip", "True-Client-Ip", "X-Client-Ip", "X-Cluster-Client-Ip", "X-Originating-Ip", "X-Proxyuser-Ip",
		"Cf-Connecting-Ip", "Cf-Connecting-Ipv6", "Fastly-Client-Ip", "X-Azure-Clientip", "X-Appengine-User-Ip", "X-Host", "X-Http-Host-Override",
		"Http-Client-Ip", "Fly-Client-Ip",
	}
	proxyPrefixes = []string{
		"X-Forwarded", "X-Forward-", "Http-X-Forwarded", "Proxy-", "Wl-Proxy-", "X-Real-", "X-Original-", "X-Rewrite-", "X-Remote-", "Remote-", "X-Auth-Request-", "X-Webauth-", "X-Authenticated-",
		"X-Authentik-", "X-Envoy-", "X-Ssl-", "Ssl-", "X-Client-Cert", "X-Goog-Authenticated-", "X-Goog-Iap-", "X-Amzn-Oidc-", "X-Ms-Client-Principal",
		"Tailscale-User-",
	}
)

// fields are the configured header fields that only proxies may send, and those that name a call's bucket.
type fields struct {
	proxies []string // in addition to proxyFields; canonical names
	keys    []string // fields of --key; canonical names
}

// ofProxies reports whether only trusted proxies may send a field. name is canonical.
func (f *fields) ofProxies(name string) bool {
	return slices.Contains(proxyFields, name) || slices.Contains(f.proxies, name) ||
		slices.ContainsFunc(proxyPrefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// forged reports whether an upstream might read a client's field as one that only proxies may send. From a trusted proxy, only names with
// other characters than hyphens are forged.
func (f *fields) forged(name string, trusted bool) bool {
	plain := asCGI(name)
	return f.ofProxies(plain) && (plain != name || !trusted)
}

// scrub removes the fields that must not reach an upstream: proxy fields, unless the client is a trusted proxy, and fields whose name in CGI
// equals that of a proxy field or of a key's field.
func (f *fields) scrub(h http.Header, trusted bool) {
	for name := range h {
		if f.forged(name, trusted) || f.likeKey(name) {
			delete(h, name)
		}
	}
}

// likeKey reports whether a field is not a key's field, but has the same name as one in CGI.
func (f *fields) likeKey(name string) bool {
	return !slices.Contains(f.keys, name) && slices.ContainsFunc(f.keys, func(key string) bool { return asCGI(key) == asCGI(name) })
}

// asCGI returns the canonical field name that has the same variable in CGI as name. CGI replaces hyphens by underscores; some servers replace
// every character except letters and digits.
func asCGI(name string) string {
	return http.CanonicalHeaderKey(strings.Map(func(c rune) rune {
		if 'a' <= c|0x20 && c|0x20 <= 'z' || '0' <= c && c <= '9' {
			return c
		}
		return '-'
	}, name))
}

// counted returns the header from which keys are made. It lacks those of the keys' fields that are not forwarded to the upstream.
func (f *fields) counted(h http.Header, trusted bool) http.Header {
	forged := func(key string) bool { return h[key] != nil && f.forged(key, trusted) }
	if !slices.ContainsFunc(f.keys, forged) {
		return h
	}
	kept := maps.Clone(h)
	for _, key := range f.keys {
		if forged(key) {
			delete(kept, key)
		}
	}
	return kept
}

// hopByHop reports whether a request lists one of the keys' fields in Connection. Such a field would not be forwarded to the upstream.
func (f *fields) hopByHop(h http.Header) bool {
	for _, list := range h["Connection"] {
		for name := range strings.SplitSeq(list, ",") {
			if slices.Contains(f.keys, http.CanonicalHeaderKey(strings.Trim(name, " \t"))) {
				return true
			}
		}
	}
	return false
}

// hopFields are the fields that concern one connection only.
var hopFields = []string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// dropHopByHop removes the fields that concern one connection only, and those that Connection names.
func dropHopByHop(h http.Header) {
	for _, list := range h["Connection"] {
		for name := range strings.SplitSeq(list, ",") {
			h.Del(strings.Trim(name, " \t"))
		}
	}
	for _, name := range hopFields {
		delete(h, name)
	}
}

// restrictUpgrade removes an upgrade to a protocol that is not allowed. Without that, calls on an HTTP/2 connection to the upstream would not
// be counted.
func restrictUpgrade(h http.Header, allowed []string) {
	h.Del("HTTP2-Settings")
	asked := h.Get("Upgrade")
	if asked == "" || slices.ContainsFunc(allowed, func(protocol string) bool { return strings.EqualFold(protocol, asked) }) {
		return
	}
	h.Del("Upgrade")
	h.Del("Connection") // set by ReverseProxy, for the upgrade alone
}
