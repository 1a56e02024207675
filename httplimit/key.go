package httplimit

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// KeyFunc returns the key of a request. Requests with the same key share a bucket. It returns [NoKey] if the request must not
// pass. It must be safe for concurrent use and must not change the request.
type KeyFunc func(*http.Request) string

// ByPath returns the URL's path, unescaped and without the query. For an outgoing request without a path it returns "/",
// which is what is sent. For a target with an opaque part or without a path, such as * or the target of CONNECT, it returns
// [NoKey], because the path does not identify the resource.
//
// The path is not cleaned. If the handlers or upstreams behind it resolve //, dots or escapes, clients can write one path in
// several ways: use [CanonicalHandler] in front.
func ByPath(r *http.Request) string {
	switch u := r.URL; {
	case u == nil:
		return "/"
	case u.Opaque != "" || r.Method == http.MethodConnect:
		return NoKey
	case u.Path == "" && r.RequestURI == "":
		return "/"
	case !strings.HasPrefix(u.Path, "/"):
		return NoKey
	default:
		return u.Path
	}
}

// ByHeader returns a KeyFunc for the value of a header field; requests without the field share the key "". A request with
// several values gets [NoKey], because upstreams differ in which of them they read. A client that chooses the value chooses
// its bucket: validate it first, or use a gate with known keys only. ByHeader returns nil, which constructors refuse, if the
// name is empty.
//
// The key of a Host is in lower case and without a dot at its end, which hosts may have. A port is kept.
func ByHeader(name string) KeyFunc {
	switch name = http.CanonicalHeaderKey(name); name {
	case "":
		return nil
	case "Host": // net/http keeps it apart from the header
		return func(r *http.Request) string { return canonicalHost(r.Host) }
	}
	return func(r *http.Request) string {
		switch values := r.Header[name]; len(values) {
		case 0:
			return ""
		case 1:
			return values[0]
		}
		return NoKey
	}
}

// canonicalHost returns a host, with or without a port, in lower case and without the dot that may end its name.
func canonicalHost(host string) string {
	host = strings.ToLower(host)
	port := ""
	if i := strings.LastIndexByte(host, ':'); i > strings.LastIndexByte(host, ']') {
		host, port = host[:i], host[i:]
	}
	return strings.TrimSuffix(host, ".") + port
}

// ByClient returns a KeyFunc for the client's IP address, for requests that are served. That is the connection's peer, unless
// the peer is a trusted proxy. Then X-Forwarded-For is read from its end, where each trusted proxy has added the address of
// its own client. The key is the first address that is not trusted, or the first of the list if all are trusted. So an
// untrusted peer cannot choose its key with that field. An entry that is not an address ends the walk, and the key is the
// proxy that passed it on.
//
// Ports and IPv6 zones are dropped, and IPv4 addresses in IPv6 form count as IPv4 addresses. A peer without an address, on a
// Unix socket, is never trusted, and its RemoteAddr is the key. The field Forwarded of RFC 7239 is not read.
//
// A client with IPv6 commonly has 2^64 addresses, and as many keys: ByClientNetwork counts them as one.
//
// ByClient returns nil, which constructors refuse, if a prefix is not valid.
func ByClient(trusted ...netip.Prefix) KeyFunc {
	return byClient(forwardedFor, 32, 128, false, trusted)
}

// ByClientNetwork is like ByClient, but the key is the network of the client's address, such as 2001:db8:1:2::/64: its first
// v4 bits (1 to 32) or v6 bits (1 to 128). With 32 and 64 there is one key for each IPv4 address and one for each IPv6
// customer. Hosts of one network share a key.
func ByClientNetwork(v4, v6 int, trusted ...netip.Prefix) KeyFunc {
	return byClient(forwardedFor, v4, v6, true, trusted)
}

// ByClientField is like ByClientNetwork, for trusted proxies that write the client's address to another header field than
// X-Forwarded-For, such as X-Real-IP. It returns nil, which constructors refuse, if the name is empty.
func ByClientField(field string, v4, v6 int, trusted ...netip.Prefix) KeyFunc {
	return byClient(http.CanonicalHeaderKey(field), v4, v6, true, trusted)
}

const forwardedFor = "X-Forwarded-For"

func byClient(field string, v4, v6 int, network bool, trusted []netip.Prefix) KeyFunc {
	if field == "" || v4 < 1 || v4 > 32 || v6 < 1 || v6 > 128 {
		return nil
	}
	trusted = slices.Clone(trusted)
	for i, p := range trusted {
		if !p.IsValid() {
			return nil
		}
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			trusted[i] = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
	}
	return func(r *http.Request) string {
		client := clientAddr(r.RemoteAddr, r.Header[field], trusted)
		switch {
		case !client.IsValid():
			return r.RemoteAddr
		case !network:
			return client.String()
		case client.Is4():
			return netip.PrefixFrom(client, v4).Masked().String()
		}
		return netip.PrefixFrom(client, v6).Masked().String()
	}
}

// clientAddr returns the client's address as described at ByClient. The result is not valid if the peer has no address.
func clientAddr(peer string, forwarded []string, trusted []netip.Prefix) netip.Addr {
	client := parseAddr(peer)
	for i := len(forwarded) - 1; i >= 0; i-- {
		for rest, more := forwarded[i], true; more; {
			if !client.IsValid() || !slices.ContainsFunc(trusted, func(p netip.Prefix) bool { return p.Contains(client) }) {
				return client
			}
			entry := rest
			comma := strings.LastIndexByte(rest, ',')
			if more = comma >= 0; more {
				rest, entry = rest[:comma], rest[comma+1:]
			}
			next := parseAddr(strings.Trim(entry, " \t"))
			if !next.IsValid() {
				return client
			}
			client = next
		}
	}
	return client
}

// parseAddr parses an address with or without a port; an IPv6 address may be in brackets.
func parseAddr(s string) netip.Addr {
	addr, err := netip.ParseAddr(s)
	if err != nil {
		if port, err := netip.ParseAddrPort(s); err == nil {
			addr = port.Addr()
		} else if n := len(s); n > 2 && s[0] == '[' && s[n-1] == ']' && strings.IndexByte(s, ':') >= 0 {
			addr, _ = netip.ParseAddr(s[1 : n-1])
		}
	}
	return addr.WithZone("").Unmap()
}

// Join returns a KeyFunc that combines several: its key is gate.Key of the parts, or [NoKey] if a part is. It returns nil,
// which constructors refuse, without parts or if a part is nil.
func Join(parts ...KeyFunc) KeyFunc {
	if len(parts) == 0 || slices.ContainsFunc(parts, func(f KeyFunc) bool { return f == nil }) {
		return nil
	}
	parts = slices.Clone(parts)
	return func(r *http.Request) string {
		keys := make([]string, len(parts))
		for i, part := range parts {
			if keys[i] = part(r); keys[i] == NoKey {
				return NoKey
			}
		}
		return gate.Key(keys...)
	}
}
