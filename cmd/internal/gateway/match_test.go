package gateway

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

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
			require.Equal(t, want, o.rowOf(c.path, func(name string) bool { return slices.Contains(rows, name) }), "%s %q", match, c.path)
		}
	}
	o := &config{}
	o.match = "prefix"
	require.Equal(t, "/x/y", o.rowOf("/x/y/", func(string) bool { return false }))
}

// No path is asked for more often than it has slashes within the longest name that a row can have: one of a megabyte must not keep a
// gateway busy.
func TestPrefixOfALongPath(t *testing.T) {
	o := &config{}
	o.match = "prefix"
	asked := 0
	has := func(name string) bool {
		asked++
		return name == "/a" || name == "/a/a"
	}
	require.Equal(t, "/a/a", o.rowOf(strings.Repeat("/a", 1<<18), has))
	require.Less(t, asked, 2*maxKey)
	require.Equal(t, "/a/a", o.rowOf("/a/a/"+strings.Repeat("b", 2*maxKey), has))
}
