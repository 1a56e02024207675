package gateway

import (
	"fmt"
	"net/netip"
	"net/url"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// registryOptions are those of the settings that say how rows and calls come together.
func (c *config) registryOptions() (opts []registry.Option) {
	if c.shadow {
		opts = append(opts, registry.WithShadow())
	}
	if c.key.joined() {
		opts = append(opts, registry.WithParts())
	}
	return opts
}

// inShadow is how many limits refuse nothing.
func inShadow(s *registry.Stats) int {
	if s.AllShadow {
		return s.Limits
	}
	return len(s.Shadow)
}

// shadows tells that limits refuse nothing.
func (r *readiness) shadows(s *registry.Stats) {
	const most = 5
	switch n := len(s.Shadow); {
	case s.AllShadow:
		r.line(true, "shadow: all limits, by --shadow: calls are counted, and none is refused")
	case n > most:
		r.line(true, "shadow: %d limits refuse nothing: %s and %d more", n, strings.Join(s.Shadow[:most], ", "), n-most)
	case n > 0:
		r.line(true, "shadow: %d limits refuse nothing: %s", n, strings.Join(s.Shadow, ", "))
	}
}

// row tells what a row would come to, and what about it is probably not meant.
func (k *checker) row(limits *registry.Registry, l *registry.Limit) {
	tell := k.ok
	if l.Shadow && !l.Disabled {
		tell = k.warn
	}
	tell("row %s: %s: %s", l.Row, l.Name, l.String())
	if why := k.neverMatches(l.Name, limits.Match); why != "" {
		k.warn("row %s: %s holds for no call: %s", l.Row, l.Name, why)
	}
	if l.PerKey && !k.config.key.joined() && !strings.HasSuffix(l.Name, "*") {
		k.warn("row %s: %s has one bucket, though it says one for each key: --key %s has one part, and the row names all of it", l.Row, l.Name, k.options.key)
	}
	if l.Name == "*" {
		k.warn("row %s: * holds for all that have no row, so that --unknown never counts", l.Row)
	}
}

// neverMatches tells why no key is one that a row holds for; "" if there may be one.
func (k *checker) neverMatches(row string, match matcher) string {
	key := k.config.key
	text, star := strings.CutSuffix(row, "*")
	parts := []string{text}
	if key.joined() {
		parts = splitParts(text)
	}
	if n := len(parts); n > len(key.parts) {
		return fmt.Sprintf("it has %d parts, and --key %s makes %d", n, k.options.key, len(key.parts))
	}
	for i, part := range parts {
		if why := k.neverPart(i, part, star && i == len(parts)-1); why != "" {
			return why
		}
	}
	if star && len(parts) > 1 && parts[len(parts)-1] == "" {
		if other, _, ok := match(text); ok && other != row {
			return fmt.Sprintf("row %s holds for the same, and comes first", other)
		}
	}
	return ""
}

// neverPart tells why a part of a key is never that; begins: or begins with it.
func (k *checker) neverPart(i int, part string, begins bool) string {
	part = unescaped(part, k.config.key.joined())
	switch kind := strings.Split(k.options.key, "+")[i]; kind {
	case "path":
		return k.neverPath(part, begins)
	case "client":
		return neverClient(part, begins)
	default:
		if part != strings.TrimLeft(part, " \t") || !begins && part != strings.TrimRight(part, " \t") {
			return "a header's value has no blanks around it"
		}
	}
	return ""
}

// neverClient tells why no client's address is this part of a row's name, or begins with it; "": one may.
func neverClient(part string, begins bool) string {
	addr, err := netip.ParseAddr(part)
	switch {
	case begins:
		return ""
	case err != nil:
		return "--key client makes addresses"
	case addr.WithZone("").Unmap().String() != part:
		return fmt.Sprintf("--key client makes %s of that address", addr.WithZone("").Unmap())
	}
	return ""
}

// neverPath tells why no path is this, or begins with it; "": one may.
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
		return "a path ends before a ? or a #, but if it has %3F or %23"
	case !begins && strings.HasSuffix(path, " "):
		return "a path ends with no blank, but if it has %20"
	case unescapedPath(path) != path:
		return fmt.Sprintf("a path is unescaped first, to %s", unescapedPath(path))
	case cleanPath(whole) != whole:
		return fmt.Sprintf("a path is cleaned first, to %s", strings.TrimSuffix(cleanPath(whole), "x"))
	case begins && strings.Contains(path, ";") && k.match != "exact":
		return "with --match " + k.match + " parameters are dropped first"
	case k.routes.find(path) == nil && !(begins && k.routes.below(path)):
		return "no --upstream is for such a path"
	}
	return ""
}

// unescapedPath is a path without its %XX; as it is if one of them is wrong.
func unescapedPath(path string) string {
	if text, err := url.PathUnescape(path); err == nil {
		return text
	}
	return path
}

// below tells whether there is a route for a path that begins so.
func (rs routes) below(path string) bool {
	for i := range rs {
		if strings.HasPrefix(rs[i].prefix, path) {
			return true
		}
	}
	return rs.find(path+"x") != nil
}

// splitParts splits at each | that has no \ before it.
func splitParts(s string) (parts []string) {
	for {
		end := endOfPart(s)
		if parts = append(parts, s[:end]); end == len(s) {
			return parts
		}
		s = s[end+1:]
	}
}

// endOfPart is where the first | is that has no \ before it, or else the end.
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

// unescaped is a part as it was before it was joined, as far as rows are concerned.
func unescaped(part string, joined bool) string {
	if !joined {
		return part
	}
	return unescape.Replace(part)
}
