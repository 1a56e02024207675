package registry_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A row that holds for no call is in force, and in the log once and in Stats, until its name is mended or it is off.
func TestUnmatched(t *testing.T) {
	source, log := new(fake), new(logged)
	const line = "registry: a row matches no call"
	asked := 0
	r := func() *registry.Registry {
		source.set(registry.Limit{Name: "/a ", Row: "7", Rate: 5}, registry.Limit{Name: "/b", Row: "8", Rate: 5})
		return open(t, source, tokenbucket.NewMemoryStore(), log.option(), registry.WithAllowEmpty(), registry.WithNames(func(row string) string {
			asked++
			if strings.HasSuffix(row, " ") {
				return "a path ends with no blank"
			}
			return ""
		}))
	}()
	require.NoError(t, r.Reload(ctx))
	require.Equal(t, 2, asked, "once for each row")
	require.Equal(t, 1, strings.Count(log.String(), line))
	s := r.Stats()
	require.Equal(t, 2, s.Limits)
	require.Empty(t, s.Rejected)
	require.Len(t, s.Unmatched, 1)
	require.EqualError(t, &s.Unmatched[0], `registry: row 7: bucket "/a ": name "/a ": want one that calls have: a path ends with no blank`)
	source.set(registry.Limit{Name: "/a", Row: "7", Rate: 5}, registry.Limit{Name: "/c ", Row: "8", Disabled: true})
	require.NoError(t, r.Reload(ctx))
	require.Empty(t, r.Stats().Unmatched)
	_, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithNames(nil))
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
}
