package gateway

import (
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// registryOptions returns the options that decide which row matches a call.
func (c *config) registryOptions() (opts []registry.Option) {
	opts = append(opts, registry.WithMaxKeys(c.maxKeys))
	if c.shadow {
		opts = append(opts, registry.WithShadow())
	}
	if c.key.joined() {
		opts = append(opts, registry.WithParts())
	}
	k := &checker{config: c}
	return append(opts, registry.WithNames(func(row string) string {
		return k.neverMatches(row, func(string) (string, bool, bool) { return "", false, false })
	}))
}

// inShadow returns the number of limits in shadow.
func inShadow(s *registry.Stats) int {
	if s.AllShadow {
		return s.Limits
	}
	return len(s.Shadow)
}

// shadows reports the limits in shadow.
func (r *readiness) shadows(s *registry.Stats) {
	const most = 5
	switch n := len(s.Shadow); {
	case s.AllShadow:
		r.line(true, "shadow: all limits, by --shadow: calls are counted, none is refused")
	case n > most:
		r.line(true, "shadow: %d limits refuse no call: %s and %d more", n, strings.Join(s.Shadow[:most], ", "), n-most)
	case n > 0:
		r.line(true, "shadow: %d limits refuse no call: %s", n, strings.Join(s.Shadow, ", "))
	}
}

// row prints the limit of a row, and warns of what is probably a mistake.
func (k *checker) row(limits *registry.Registry, l *registry.Limit) {
	report := k.ok
	if l.Shadow && !l.Disabled {
		report = k.warn
	}
	report("row %s: %s: %s", l.Row, l.Name, l.String())
	if why := k.neverMatches(l.Name, limits.Match); why != "" {
		k.warn("row %s: %s matches no call: %s", l.Row, l.Name, why)
	}
	if l.PerKey && !k.config.key.joined() && !strings.HasSuffix(l.Name, "*") {
		k.warn("row %s: %s has one bucket although per_key is set: --key %s has one part, and the row names all of it", l.Row, l.Name, k.options.key)
	}
	if l.Name == "*" {
		k.warn("row %s: * matches all calls without another row, so --unknown has no effect", l.Row)
	}
}

// neverMatches returns why a row cannot match any key, or "" if it may match one.
func (k *checker) neverMatches(row string, match matcher) string {
	key := k.config.key
	text, star := strings.CutSuffix(row, "*")
	parts := []string{text}
	if key.joined() {
		parts = splitParts(text)
	}
	if n := len(parts); n > len(key.parts) {
		return fmt.Sprintf("it has %d parts, but --key %s gives %d", n, k.options.key, len(key.parts))
	}
	for i, part := range parts {
		if why := k.neverPart(i, part, star && i == len(parts)-1); why != "" {
			return why
		}
	}
	if star && len(parts) > 1 && parts[len(parts)-1] == "" {
		if other, _, ok := match(text); ok && other != row {
			return fmt.Sprintf("row %s matches the same keys and takes precedence", other)
		}
	}
	return ""
}

// neverPart returns why part i of a key never equals part, or, if begins, never begins with it. It returns "" if it may.
func (k *checker) neverPart(i int, part string, begins bool) string {
	part = unescaped(part, k.config.key.joined())
	switch kind := strings.Split(k.options.key, "+")[i]; kind {
	case "path":
		return k.neverPath(part, begins)
	case "client":
		return k.neverClient(part, begins)
	default:
		if part != strings.TrimLeft(part, " \t") || !begins && part != strings.TrimRight(part, " \t") {
			return "a header's value has no leading or trailing blanks"
		}
	}
	return ""
}

// neverClient returns why no client's address or network equals part, or, if begins, begins with it. It returns "" if one may.
func (k *checker) neverClient(part string, begins bool) string {
	addr, err := netip.ParseAddr(part)
	if prefix, isNetwork := netip.ParsePrefix(part); isNetwork == nil {
		addr, err = prefix.Addr(), nil
	}
	switch {
	case begins:
		return ""
	case err != nil:
		return "--key client gives addresses"
	}
	peer := netip.AddrPortFrom(addr, 0).String()
	if key := k.config.clientKey()(&http.Request{RemoteAddr: peer}); key != part {
		return fmt.Sprintf("--key client gives %s for that address", key)
	}
	return ""
}

// neverPath returns why no path equals path, or, if begins, begins with it. It returns "" if one may.
func (k *checker) neverPath(path string, begins bool) string {
	whole := path
	if begins {
		whole += "x"
	}
	switch {
	case begins && path == "":
		return ""
	case !strings.HasPrefix(path, "/"):
		return "a path begins with a slash"
	case strings.ContainsAny(path, "?#"):
		return "a path ends before a ? or a #, unless these are escaped as %3F or %23"
	case !begins && strings.HasSuffix(path, " "):
		return "a path does not end with a blank, unless it is escaped as %20"
	case unescapedPath(path) != path:
		return fmt.Sprintf("a path is unescaped first, to %s", unescapedPath(path))
	case cleanPath(whole) != whole:
		return fmt.Sprintf("a path is cleaned first, to %s", strings.TrimSuffix(cleanPath(whole), "x"))
	case begins && strings.Contains(path, ";") && k.match != "exact":
		return "with --match " + k.match + " parameters are dropped first"
	case k.routes.find(path) == nil && !(begins && k.routes.below(path)):
		return "no --upstream serves such a path"
	}
	return ""
}

// unescapedPath resolves the %XX of a path. It returns the path unchanged if an escape is invalid.
func unescapedPath(path string) string {
	if text, err := url.PathUnescape(path); err == nil {
		return text
	}
	return path
}

// below reports whether a path that begins with path has a route.
func (rs routes) below(path string) bool {
	for i := range rs {
		if strings.HasPrefix(rs[i].prefix, path) {
			return true
		}
	}
	return rs.find(path+"x") != nil
}

// splitParts splits at each | that is not escaped by a \.
func splitParts(s string) (parts []string) {
	for {
		end := endOfPart(s)
		if parts = append(parts, s[:end]); end == len(s) {
			return parts
		}
		s = s[end+1:]
	}
}

// endOfPart returns the index of the first | that is not escaped by a \, or len(s).
func endOfPart(s string) int {
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '|':
			return i
		}
	}
	return len(s)
}

var unescape = strings.NewReplacer(`\\`, `\`, `\|`, `|`)

// unescaped undoes the escapes \\ and \| of a part of a joined key. It leaves \x escapes unchanged.
func unescaped(part string, joined bool) string {
	if !joined {
		return part
	}
	return unescape.Replace(part)
}
