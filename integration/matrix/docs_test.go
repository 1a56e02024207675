package matrix

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The page lists what is refused, with the reason.
func TestRefusalsAreListed(t *testing.T) {
	page, err := os.ReadFile("../../docs/consistency.md")
	require.NoError(t, err)
	require.Contains(t, string(page), "| together | refused, because |\n| --- | --- |\n"+listed()+"\n", "docs/consistency.md, the table of what is refused")
}

// listed returns the rows of the table: the reasons, each with the pairs that it refuses.
func listed() string {
	pairs := map[string][]string{}
	for _, pair := range slices.Sorted(maps.Keys(refusals)) {
		pairs[refusals[pair]] = append(pairs[refusals[pair]], pair)
	}
	var rows strings.Builder
	for _, reason := range slices.Sorted(maps.Keys(pairs)) {
		fmt.Fprintf(&rows, "| %s | %s |\n", strings.Join(pairs[reason], "; "), reason)
	}
	return rows.String()
}
