package gateway

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Rows that no call can match are reported before a gateway starts.
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
		{"path", "clean", "/a?x=1", "a path ends before a ? or a #, unless these are escaped as %3F or %23"},
		{"path", "exact", "/a#top*", "a path ends before a ? or a #, unless these are escaped as %3F or %23"},
		{"path", "clean", "/a%20b", "a path is unescaped first, to /a b"},
		{"path", "clean", "/a%2Fb*", "a path is unescaped first, to /a/b"},
		{"path", "clean", "/a/100%", ""},
		{"path", "clean", "/a b", ""},
		{"path", "clean", "/a ", "a path does not end with a blank, unless it is escaped as %20"},
		{"path", "clean", "/a *", ""},
		{"path", "clean", "/other/x", "no --upstream serves such a path"},
		{"path", "clean", "/oth*", "no --upstream serves such a path"},
		{"path", "clean", "/a*", ""},
		{"path", "clean", "/b/deep", ""},
		{"path", "clean", "/b/*", ""},
		{"path", "clean", "/b/d*", ""},
		{"client", "clean", "10.0.0.1", ""},
		{"client", "clean", "10.*", ""},
		{"client", "clean", "/a", "--key client gives addresses"},
		{"client", "clean", "2001:DB8::1", "--key client gives 2001:db8::/64 for that address"},
		{"client", "clean", "::ffff:10.0.0.1", "--key client gives 10.0.0.1 for that address"},
		{"client", "clean", "2001:db8::1", "--key client gives 2001:db8::/64 for that address"},
		{"client", "clean", "2001:db8:1:2::/64", ""},
		{"client", "clean", "2001:db8:1:2::7/64", "--key client gives 2001:db8:1:2::/64 for that address"},
		{"client", "clean", "2001:db8:1::/48", "--key client gives 2001:db8:1::/64 for that address"},
		{"client", "clean", "10.0.0.0/24", "--key client gives 10.0.0.0 for that address"},
		{"client", "clean", "2001:db8:*", ""},
		{"header:X-A", "clean", "anything", ""},
		{"header:X-A", "clean", "a b", ""},
		{"header:X-A", "clean", "anything ", "a header's value has no leading or trailing blanks"},
		{"header:X-A", "clean", " any*", "a header's value has no leading or trailing blanks"},
		{"header:X-A", "clean", "any *", ""},
		{"path+header:X-A", "clean", "/a", ""},
		{"path+header:X-A", "clean", "/a|x", ""},
		{"path+header:X-A", "clean", "/a|x*", ""},
		{"path+header:X-A", "clean", `/a\|x`, ""},
		{"path+header:X-A", "clean", "x|/a", "a path begins with a slash"},
		{"header:X-A+path", "clean", "x|/a", ""},
		{"header:X-A+path", "clean", "x|a", "a path begins with a slash"},
		{"header:X-A+path", "clean", "x*", ""},
		{"path+header:X-A", "clean", "/a|x|y", "it has 3 parts, but --key path+header:X-A gives 2"},
		{"path+header:X-A", "clean", "/c|*", "row /c matches the same keys and takes precedence"},
		{"path+header:X-A", "clean", "/a|*", ""},
		{"path+header:X-A", "clean", "/c*", ""},
	} {
		config, err := parseArgs(t, "--key", c.key, "--match", c.match)
		require.NoError(t, err)
		config.routes = nil
		for _, upstream := range []string{"/a=http://u", "/b/deep=http://u", "/c=http://u", "/=http://u"} {
			require.Empty(t, config.routes.add(upstream))
		}
		if c.want == "no --upstream serves such a path" {
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
