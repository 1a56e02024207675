package gateway

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// names matches the very names, and those with a * at their end.
func names(rows ...string) matcher {
	return func(name string) (string, bool, bool) {
		if slices.Contains(rows, name) {
			return name, !strings.HasSuffix(name, "*"), true
		}
		best := ""
		for _, row := range rows {
			if text, star := strings.CutSuffix(row, "*"); star && strings.HasPrefix(name, text) && len(row) > len(best) {
				best = row
			}
		}
		return best, false, best != ""
	}
}

func TestRowOf(t *testing.T) {
	rows := []string{"/a", "/a/b", "/slash/", "/p;v=1", "/"}
	for _, c := range []struct{ path, exact, clean, prefix string }{
		{"/a", "/a", "/a", "/a"},
		{"/a/", "/a/", "/a", "/a"},
		{"//a/./x/../", "/a/", "/a", "/a"},
		{"/a;x=1", "/a;x=1", "/a", "/a"},
		{"/a;x=1/b;y", "/a;x=1/b;y", "/a/b", "/a/b"},
		{"/x/..;/a", "/x/..;/a", "/a", "/a"},
		{"/slash", "/slash", "/slash/", "/slash/"},
		{"/slash/", "/slash/", "/slash/", "/slash/"},
		{"/p;v=1", "/p;v=1", "/p;v=1", "/p;v=1"},
		{"/a/b/c/d", "/a/b/c/d", "/a/b/c/d", "/a/b"},
		{"/a/bb", "/a/bb", "/a/bb", "/a"},
		{"/slash/x/", "/slash/x/", "/slash/x", "/slash/"},
		{"/A", "/A", "/A", "/"},
		{"", "/", "/", "/"},
		{";", "/;", "/", "/"},
	} {
		for match, want := range map[string]string{"exact": c.exact, "clean": c.clean, "prefix": c.prefix} {
			o := &config{}
			o.match = match
			require.Equal(t, want, o.rowOf(c.path, names(rows...)), "%s %q", match, c.path)
		}
	}
	o := &config{}
	o.match = "prefix"
	require.Equal(t, "/x/y", o.rowOf("/x/y/", names()))
}

// A row with a * holds for all that begins so, and for the path itself; a row of the very name comes first, then the longest.
func TestRowOfPatterns(t *testing.T) {
	rows := []string{"/ibe/*", "/ibe/Book", "/ibe/Avail*", "/ibe/x/y/*", "/fares", "/fares/*", "/q/r", "/q/*"}
	for _, c := range []struct{ path, exact, clean, prefix string }{
		{"/ibe/Price", "/ibe/*", "/ibe/*", "/ibe/*"},
		{"/ibe/Price/;x=1", "/ibe/*", "/ibe/*", "/ibe/*"},
		{"/ibe/", "/ibe/*", "/ibe/*", "/ibe/*"},
		{"/ibe", "", "/ibe/*", "/ibe/*"},
		{"/ibe;x", "", "/ibe/*", "/ibe/*"},
		{"/ibex", "", "", ""},
		{"/IBE/Price", "", "", ""},
		{"/ibe/Book", "/ibe/Book", "/ibe/Book", "/ibe/Book"},
		{"/ibe/Book/", "/ibe/*", "/ibe/Book", "/ibe/Book"},
		{"/ibe/Book/1", "/ibe/*", "/ibe/*", "/ibe/Book"},
		{"/ibe/AvailFare/1", "/ibe/Avail*", "/ibe/Avail*", "/ibe/Avail*"},
		{"/ibe/x/y", "/ibe/*", "/ibe/x/y/*", "/ibe/x/y/*"},
		{"/ibe/x/y/z", "/ibe/x/y/*", "/ibe/x/y/*", "/ibe/x/y/*"},
		{"/ibe/*", "/ibe/*", "/ibe/*", "/ibe/*"},
		{"/fares", "/fares", "/fares", "/fares"},
		{"/fares/", "/fares/*", "/fares", "/fares"},
		{"/fares/1", "/fares/*", "/fares/*", "/fares/*"},
		{"/q/r/s", "/q/*", "/q/*", "/q/r"},
		{"/" + strings.Repeat("x", 1<<20), "", "", ""},
		{"/ibe/" + strings.Repeat("x/", 1<<19), "/ibe/*", "/ibe/*", "/ibe/*"},
	} {
		for match, want := range map[string]string{"exact": c.exact, "clean": c.clean, "prefix": c.prefix} {
			o := &config{}
			o.match = match
			row, _, _ := names(rows...)(o.rowOf(c.path, names(rows...)))
			require.Equal(t, want, row, "%s %.40q", match, c.path)
		}
	}
	o := &config{}
	o.match = "prefix"
	require.Equal(t, "/x", o.rowOf("/x", names("*")), "a key of its own, for a limit for each key")
	require.Equal(t, "/x", o.rowOf("/x/y", names("*", "/x")))
}

// No path is asked for more often than it has slashes within the longest name that a row can have: one of a megabyte must not keep a
// gateway busy.
func TestPrefixOfALongPath(t *testing.T) {
	o := &config{}
	o.match = "prefix"
	asked := 0
	has := func(name string) (string, bool, bool) {
		asked++
		return names("/a", "/a/a")(name)
	}
	require.Equal(t, "/a/a", o.rowOf(strings.Repeat("/a", 1<<18), has))
	require.Less(t, asked, 2*maxKey)
	require.Equal(t, "/a/a", o.rowOf("/a/a/"+strings.Repeat("b", 2*maxKey), has))
}
