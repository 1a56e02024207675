package postgres

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Any bytes become printable ASCII, which decode restores. Rows of a database in use have these names, so that they must not change.
func TestEncode(t *testing.T) {
	for name, want := range map[string]string{
		"":                "",
		"/ibe/AvailFare?": "/ibe/AvailFare?",
		"{a b}%\t\x7f":    "%7Ba%20b%7D%25%09%7F",
		"ä\xff\x00":       "%C3%A4%FF%00",
	} {
		require.Equal(t, want, encode(name))
	}
	rapid.Check(t, func(t *rapid.T) {
		name := string(rapid.SliceOf(rapid.Byte()).Draw(t, "name"))
		require.Regexp(t, "^[!-~]*$", encode(name))
		require.Equal(t, name, decode(encode(name)))
	})
}
