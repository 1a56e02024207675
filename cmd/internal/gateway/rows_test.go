package gateway

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Rows that no call can have are told before a gateway starts.
func TestRowsThatNeverMatch(t *testing.T) {
	for _, c := range []struct{ key, match, row, want string }{
		{"path", "clean", "/a", ""},
		{"path", "clean", "/a/", ""},
		{"path", "clean", "/a;x=1", ""},
		{"path", "clean", "/", ""},
		{"path", "clean", "*", ""},
		{"path", "clean", "/*", ""},
		{"path", "clean", "/a/*", ""},
		{"path", "clean", "/a|b*", ""},
		{"path", "clean", "a", "a path begins with a slash"},
		{"path", "clean", "a/*", "a path begins with a slash"},
		{"path", "clean", "", "a path begins with a slash"},
		{"path", "clean", "/a//b", "a path is cleaned first, to /a/b"},
		{"path", "clean", "/a/../b*", "a path is cleaned first, to /b"},
		{"path", "clean", "/a;x*", "with --match clean parameters are dropped first"},
		{"path", "exact", "/a;x*", ""},
		{"path", "clean", "/a?x=1", "a path ends before a ? or a #, but if it has %3F or %23"},
		{"path", "exact", "/a#top*", "a path ends before a ? or a #, but if it has %3F or %23"},
		{"path", "clean", "/a%20b", "a path is unescaped first, to /a b"},
		{"path", "clean", "/a%2Fb*", "a path is unescaped first, to /a/b"},
		{"path", "clean", "/a/100%", ""},
		{"path", "clean", "/a b", ""},
		{"path", "clean", "/a ", "a path ends with no blank, but if it has %20"},
		{"path", "clean", "/a *", ""},
		{"path", "clean", "/other/x", "no --upstream is for such a path"},
		{"path", "clean", "/oth*", "no --upstream is for such a path"},
		{"path", "clean", "/a*", ""},
		{"path", "clean", "/b/deep", ""},
		{"path", "clean", "/b/*", ""},
		{"path", "clean", "/b/d*", ""},
		{"client", "clean", "10.0.0.1", ""},
		{"client", "clean", "10.*", ""},
		{"client", "clean", "/a", "--key client makes addresses"},
		{"client", "clean", "2001:DB8::1", "--key client makes 2001:db8::1 of that address"},
		{"client", "clean", "::ffff:10.0.0.1", "--key client makes 10.0.0.1 of that address"},
		{"client", "clean", "2001:db8::1", ""},
		{"client", "clean", "2001:db8:*", ""},
		{"header:X-A", "clean", "anything", ""},
		{"header:X-A", "clean", "a b", ""},
		{"header:X-A", "clean", "anything ", "a header's value has no blanks around it"},
		{"header:X-A", "clean", " any*", "a header's value has no blanks around it"},
		{"header:X-A", "clean", "any *", ""},
		{"path+header:X-A", "clean", "/a", ""},
		{"path+header:X-A", "clean", "/a|x", ""},
		{"path+header:X-A", "clean", "/a|x*", ""},
		{"path+header:X-A", "clean", `/a\|x`, ""},
		{"path+header:X-A", "clean", "x|/a", "a path begins with a slash"},
		{"header:X-A+path", "clean", "x|/a", ""},
		{"header:X-A+path", "clean", "x|a", "a path begins with a slash"},
		{"header:X-A+path", "clean", "x*", ""},
		{"path+header:X-A", "clean", "/a|x|y", "it has 3 parts, and --key path+header:X-A makes 2"},
		{"path+header:X-A", "clean", "/c|*", "row /c holds for the same, and comes first"},
		{"path+header:X-A", "clean", "/a|*", ""},
		{"path+header:X-A", "clean", "/c*", ""},
	} {
		config, err := parseArgs(t, "--key", c.key, "--match", c.match)
		require.NoError(t, err)
		config.routes = nil
		for _, upstream := range []string{"/a=http://u", "/b/deep=http://u", "/c=http://u", "/=http://u"} {
			require.Empty(t, config.routes.add(upstream))
		}
		if c.want == "no --upstream is for such a path" {
			config.routes = config.routes[:3]
		}
		k := &checker{config: config}
		got := k.neverMatches(c.row, func(name string) (string, bool, bool) {
			if name == "/c|" {
				return "/c", true, true
			}
			return names(c.row)(name)
		})
		require.Equal(t, c.want, got, "%s %s %s", c.key, c.match, c.row)
	}
}
