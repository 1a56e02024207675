package httplimit

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
)

// NoKey is returned by a KeyFunc for a request that must not pass, because no key can limit it. The middleware responds with
// 400, and the Transport returns [ErrNoKey]. [Join] returns it if one of its parts does.
const NoKey = "\x00"

// TargetError reports a request target that has no canonical form.
type TargetError struct {
	// Target is the URL as it was received.
	Target string
	// Part is the invalid part, and Want is what would be valid.
	Part, Want string
}

func (e *TargetError) Error() string {
	return fmt.Sprintf("httplimit: target %.200q: %s: want %s", e.Target, e.Part, e.Want)
}

// Canonical returns the path and the query of a request's URL in the one form that is both limited and sent on, or a *TargetError. Scheme,
// user and host, which an absolute target has, are dropped: a proxy has an upstream of its own.
//
// Routers differ in how they read an unusual path. If a key is made by one reading and the upstream uses another, a client passes by its
// limit. So the canonical path has a single reading, and paths that no rewriting makes unambiguous are refused:
//
//	/a//b  /a/./b  /a/x/../b   resolved: /a/b
//	/a/%62  /a/%2e%2e          letters, digits and -._~ are unescaped, then dots are resolved
//	/a%2fb  /a%5cb  /a\b       refused: some upstreams separate segments by them
//	/a/%00  /a/%0a  /a/%7f     refused: control characters end a path early in some upstreams
//	/..;x/a  /.;/a  /;x/a      refused: resolved or skipped by upstreams that drop parameters
//	/a;x=1  /a/  /A  /a%3Fb    kept: other names, for rows to match
//	opaque, * or no path       refused
//
// Escapes that stay have capital digits. The query is not read. The result of Canonical is its own canonical form.
func Canonical(u *url.URL) (*url.URL, error) {
	bad := func(part, want string) (*url.URL, error) { return nil, &TargetError{u.Redacted(), part, want} }
	switch {
	case u.Opaque != "":
		return bad("opaque part", "a path that begins with /")
	case !strings.HasPrefix(u.Path, "/"):
		return bad("no path", "a path that begins with /")
	}
	escaped, wrong := canonicalPath(rawPath(u))
	if wrong != "" {
		return bad(wrong, "a path with one meaning")
	}
	path, err := url.PathUnescape(escaped)
	if err != nil {
		return bad("escape", "% and two hexadecimal digits")
	}
	return &url.URL{Path: path, RawPath: escaped, RawQuery: u.RawQuery, ForceQuery: u.ForceQuery}, nil
}

// CanonicalHandler calls next with the canonical URL of each request, and responds with 400 to requests without one
// ([Canonical]). Use it around a reverse proxy that is limited by path, so that the path that is limited is also the one that
// is sent. CONNECT gets 400, and so does OPTIONS * unless the server responds to it
// (http.Server.DisableGeneralOptionsHandler).
func CanonicalHandler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u, err := Canonical(r.URL)
		if err != nil || r.Method == http.MethodConnect {
			http.Error(w, badTarget, http.StatusBadRequest)
			return
		}
		canonical := *r
		canonical.URL = u
		next.ServeHTTP(w, &canonical)
	})
}

const badTarget = "the request target has no path with one meaning"

// rawPath returns the path as escaped in the request, even if Go would escape it differently.
func rawPath(u *url.URL) string {
	if u.RawPath != "" {
		if path, err := url.PathUnescape(u.RawPath); err == nil && path == u.Path {
			return u.RawPath
		}
	}
	return (&url.URL{Path: u.Path}).EscapedPath()
}

// canonicalPath returns the canonical form of an escaped path, or the name of the part that is wrong.
func canonicalPath(escaped string) (path, wrong string) {
	if plain(escaped) {
		return escaped, ""
	}
	normal, wrong := normalized(escaped)
	if wrong != "" {
		return "", wrong
	}
	segments := strings.Split(normal, "/")[1:]
	kept := segments[:0]
	for i, s := range segments {
		last := i == len(segments)-1
		name, parameters := s, false
		if at := strings.IndexByte(strings.ReplaceAll(s, "%3B", ";"), ';'); at >= 0 {
			name, parameters = s[:at], true
		}
		switch dots := name == "." || name == ".."; {
		case parameters && (dots || name == "" && !last):
			return "", "segment of parameters alone"
		case name == ".." && len(kept) > 0:
			kept = kept[:len(kept)-1]
		case dots || s == "":
		default:
			kept = append(kept, s)
			continue
		}
		if last {
			kept = append(kept, "") // keeps the slash at the end
		}
	}
	return "/" + strings.Join(kept, "/"), ""
}

// plain reports whether a path is its own canonical form, as most are: segments of letters, digits, _, ~ and -, with dots
// within.
func plain(path string) bool {
	for i := range len(path) {
		switch c := path[i]; {
		case c == '.', c == '/':
			if i > 0 && path[i-1] == '/' {
				return false
			}
		case !unreserved(c):
			return false
		}
	}
	return path != "" && path[0] == '/'
}

// normalized returns an escaped path with every byte either unescaped or escaped with capital digits, or the name of the part
// that is wrong.
func normalized(escaped string) (path, wrong string) {
	var b strings.Builder
	for i := 0; i < len(escaped); i++ {
		c, isEscape := escaped[i], escaped[i] == '%'
		if isEscape {
			if i+2 >= len(escaped) || !isHex(escaped[i+1]) || !isHex(escaped[i+2]) {
				return "", "escape"
			}
			c = hexValue(escaped[i+1])<<4 | hexValue(escaped[i+2])
			i += 2
		}
		switch {
		case c < ' ' || c == 0x7f:
			return "", "control character"
		case c == '\\':
			return "", "backslash"
		case c == '/' && isEscape:
			return "", "escaped slash"
		case unreserved(c), !isEscape && strings.IndexByte("/!$&'()*+,;=:@[]", c) >= 0:
			b.WriteByte(c)
		default:
			b.WriteString("%" + string(capitals[c>>4]) + string(capitals[c&15]))
		}
	}
	return b.String(), ""
}

const capitals = "0123456789ABCDEF"

// unreserved reports whether the escaped and the unescaped byte mean the same, by RFC 3986.
func unreserved(c byte) bool {
	return 'a' <= c|0x20 && c|0x20 <= 'z' || '0' <= c && c <= '9' || c == '-' || c == '.' || c == '_' || c == '~'
}

func isHex(c byte) bool { return '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'f' }

func hexValue(c byte) byte {
	if c <= '9' {
		return c - '0'
	}
	return c | 0x20 - 'a' + 10
}
