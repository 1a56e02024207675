package gateway

import "strings"

// matches are the values of --match.
var matches = []string{"exact", "clean", "prefix"}

// rowOf returns the name of the row that counts for a path, or what is its key if there is none. has tells whether there is
// a row of that name.
func (c *config) rowOf(path string, has func(name string) bool) string {
	exact := cleanPath(path)
	if c.match == "exact" {
		return exact
	}
	clean := plainPath(path)
	for _, name := range []string{exact, clean, clean + "/"} { // a row may have a slash at its end
		if has(name) {
			return name
		}
	}
	if c.match == "prefix" {
		prefix := clean[:min(len(clean), maxKey+1)] // no row has a longer name, and a path may have a megabyte
		for prefix != "" {
			prefix = prefix[:strings.LastIndexByte(prefix, '/')]
			for _, name := range []string{prefix, prefix + "/"} {
				if has(name) {
					return name
				}
			}
		}
	}
	return clean
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
