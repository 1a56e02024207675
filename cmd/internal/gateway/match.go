package gateway

import "strings"

// matches are the values of --match.
var matches = []string{"exact", "clean", "prefix"}

// rowOf returns the name by which the row of a path is found, or the path's own key if no row matches. A row with exactly that name comes
// first, then the longest row that matches: one that ends with *, or, with --match prefix, also one without.
func (c *config) rowOf(path string, match matcher) string {
	exact := cleanPath(path)
	if c.match == "exact" {
		return exact
	}
	has := func(name string) bool {
		_, exact, ok := match(name)
		return ok && exact
	}
	clean := plainPath(exact)                                  // of the forwarded path: upstreams resolve .. before they drop parameters
	for _, name := range []string{exact, clean, clean + "/"} { // a row may have a slash at its end
		if has(name) {
			return name
		}
	}
	short := clean[:min(len(clean), maxKey+1)] // no row has a longer name, and a path may have a megabyte
	pattern, least := below(short, match)
	if c.match == "prefix" {
		for prefix := short; prefix != ""; {
			if prefix = prefix[:strings.LastIndexByte(prefix, '/')]; len(prefix)+1 <= least {
				break
			}
			for _, name := range []string{prefix, prefix + "/"} {
				if has(name) {
					return name
				}
			}
		}
	}
	if pattern == "" {
		return clean
	}
	return pattern
}

// below looks for a row with a * that matches everything below a path, and so the path itself. It returns the name by which that row is found,
// and the row's length without its *. The name is "" if the path itself finds the row, or if there is no such row.
func below(path string, match matcher) (name string, length int) {
	name = strings.TrimSuffix(path, "/") + "/"
	row, exact, ok := match(name)
	if !ok || exact {
		return "", 0
	}
	if own, _, _ := match(path); own == row {
		name = ""
	}
	return name, len(row) - 1
}

// plainPath removes parameters (;x=1) from the segments of a path, and a slash at its end.
func plainPath(path string) string {
	if strings.Contains(path, ";") {
		segments := strings.Split(path, "/")
		for i, s := range segments {
			segments[i], _, _ = strings.Cut(s, ";")
		}
		path = strings.Join(segments, "/")
	}
	if path = cleanPath(path); path != "/" {
		path = strings.TrimSuffix(path, "/")
	}
	return path
}
