package registry_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

func TestPenalties(t *testing.T) {
	for text, holds := range map[string][2]bool{"none": {}, "503": {false, true}, "429": {true, false}, "429,503": {true, true}} {
		p, ok := registry.ParsePenalty(text)
		require.True(t, ok, text)
		require.Equal(t, text, p.String())
		for _, byDefault := range []bool{false, true} {
			require.Equal(t, holds, [2]bool{p.Covers(429, byDefault), p.Covers(503, byDefault)}, text)
			require.False(t, p.Covers(500, byDefault))
		}
	}
	for _, text := range []string{"", "0", "503,429", "429, 503", "NONE", "invalid"} {
		_, ok := registry.ParsePenalty(text)
		require.False(t, ok, text)
	}
	limits, err := registry.New(registry.Static{
		{Name: "/a", Rate: 1, Penalty: registry.Penalty503}, {Name: "/b/*", Rate: 1}, {Name: "/c/*", Rate: 1, PerKey: true, Penalty: registry.PenaltyNone},
	}, tokenbucket.NewMemoryStore())
	require.NoError(t, err)
	defer limits.Close()
	for name, want := range map[string]struct {
		p   registry.Penalty
		own bool
		by  [2]bool
	}{
		"/a": {registry.Penalty503, true, [2]bool{false, true}}, "/b/x": {registry.PenaltyDefault, false, [2]bool{true, true}},
		"/c/x": {registry.PenaltyNone, true, [2]bool{}}, "/none": {registry.PenaltyDefault, true, [2]bool{true, true}},
	} {
		p, own := limits.Penalty(name)
		require.Equal(t, want.p, p, name)
		require.Equal(t, want.own, own, name)
		require.Equal(t, want.by, [2]bool{limits.Penalizes(name, 429), limits.Penalizes(name, 503)}, "in a program: %s", name)
	}
}
