package httplimit

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// KeyFunc makes the key of a request: requests of one key share a bucket. It returns [NoKey] if the request must not pass. It must be safe
// for concurrent use and must not change the request.
type KeyFunc func(*http.Request) string

// ByPath keys by the URL's path, unescaped and without the query. A request that a program makes without a path has the key "/", as it is
// sent. A target with an opaque part or without a path, such as * or that of CONNECT, has [NoKey]: what it leads to is not in its path.
//
// The path is not cleaned. If what is behind resolves //, dots or escapes, clients can write a path in several ways: put
// [CanonicalHandler] in front.
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

// ByHeader keys by a header field; requests without it share the key "". One that has it several times has [NoKey], because upstreams
// differ in which of them they read. A client that chooses the field's value chooses its bucket: check it first, or use a gate that knows
// its keys. It is nil, which constructors refuse, if the name is empty.
//
// A Host has no case and may end with a dot: its key is in lower case and without the dot. A port stays.
func ByHeader(name string) KeyFunc {
	switch name = http.CanonicalHeaderKey(name); name {
	case "":
		return nil
	case "Host": // a server keeps it apart
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

// canonicalHost returns a host, perhaps with a port, in lower case and without the dot that may end its name.
func canonicalHost(host string) string {
	host = strings.ToLower(host)
	port := ""
	if i := strings.LastIndexByte(host, ':'); i > strings.LastIndexByte(host, ']') {
		host, port = host[:i], host[i:]
	}
	return strings.TrimSuffix(host, ".") + port
}

// ByClient keys requests that are served by the client's IP address. That is the connection's peer, unless the peer is a
// trusted proxy: then X-Forwarded-For is read from its end, where each trusted proxy has put who it was called by, up to the
// first address that is not trusted, or the last that there is. So what an untrusted peer writes into the field is not
// looked at. An entry that is no address ends the walk at the proxy that passed it on.
//
// Ports and IPv6 zones are dropped, and IPv4 addresses in IPv6 form are IPv4 addresses. A peer without an address, on a
// Unix socket, is never trusted, and its RemoteAddr is the key. The field Forwarded of RFC 7239 is not read.
//
// A client with IPv6 commonly has 2^64 addresses, and as many keys: ByClientNetwork counts them as one.
//
// It is nil, which constructors refuse, if a prefix is not valid.
func ByClient(trusted ...netip.Prefix) KeyFunc {
	return byClient(forwardedFor, 32, 128, false, trusted)
}

// ByClientNetwork is ByClient, keyed by the network of the client's address, such as 2001:db8:1:2::/64: that of its first
// v4 bits (1 to 32), or v6 bits (1 to 128). 32 and 64 is one key for each IPv4 address, and one for each IPv6 customer; but
// where many hosts share a network, they share the key.
func ByClientNetwork(v4, v6 int, trusted ...netip.Prefix) KeyFunc {
	return byClient(forwardedFor, v4, v6, true, trusted)
}

// ByClientField is ByClientNetwork for trusted proxies that write the client's address into another header field than X-Forwarded-For, such
// as X-Real-IP. It is nil, which constructors refuse, if the name is empty.
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

// clientAddr walks the forwarded addresses from the end, as ByClient says. It is not valid if the peer is no address.
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

// parseAddr reads an address with or without a port; one of IPv6 with or without brackets.
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

// Join keys by several things at once: the key is gate.Key of the parts. It is [NoKey] if a part is. The function is nil, which
// constructors refuse, without parts or if a part is nil.
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
