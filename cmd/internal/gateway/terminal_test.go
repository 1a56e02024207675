package gateway

import (
	"bytes"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// TestNamesOnATerminal: a name of a row neither ends a line of check or /readyz, nor moves the cursor, nor turns the text round.
func TestNamesOnATerminal(t *testing.T) {
	const name = "/a\nok    all is well \x1b[2J\u202etxt"
	o, err := given(t, []string{"--upstream", "http://u:1", "--limits", "sqlite://f", "--store", "memory"}, nil, "")
	require.NoError(t, err)
	c, err := o.parse()
	require.NoError(t, err)
	rows := registry.Static{{Name: name, Row: "1", Rate: 5}, {Name: name + "*", Row: "2\n", Rate: -1}}

	var out bytes.Buffer
	(&checker{config: c, to: &out}).rows("a list", rows)
	require.Contains(t, out.String(), `row 1: /a\nok    all is well \x1b[2J\u202etxt: 5/s, saves up 5, does not wait`)
	r := new(readiness)
	r.shadows(&registry.Stats{Shadow: []string{name}})
	for _, text := range []string{out.String(), r.text.String()} {
		require.NotEmpty(t, text)
		for _, c := range text {
			require.True(t, c == '\n' || unicode.IsPrint(c), "%q", c)
		}
		require.NotContains(t, text, "\nok    all is well")
	}
}
