package gateway

import "strings"

// matches are the values of --match.
var matches = []string{"exact", "clean", "prefix"}

// rowOf returns the name by which the row that counts for a path is found, or what is its key if there is none. A row of the very
// name comes first, then the longest that holds for it: with a * at its end, or, with --match prefix, without.
func (c *config) rowOf(path string, match matcher) string {
	exact := cleanPath(path)
	if c.match == "exact" {
		return exact
	}
	has := func(name string) bool {
		_, exact, ok := match(name)
		return ok && exact
	}
	clean := plainPath(exact)                                  // of what is sent on: there .. is resolved before anybody drops parameters
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

// below returns the name by which a row with a * is found that holds for all below a path, and so for the path, and how long the row is
// without its *. The name is "" if the path's own will do, or if there is no such row.
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

// plainPath is a path without parameters (;x=1) in its segments, and without a slash at its end.
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
