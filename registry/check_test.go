package registry_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// TestCheck: Check returns the wrong field of a limit that no registry would put in force.
func TestCheck(t *testing.T) {
	size := 3.0
	for _, good := range []registry.Limit{{Name: "a", Rate: 5}, {Name: "a"}, {Name: "a", Disabled: true, MaxWait: 77 * time.Second}, {Name: "a", Rate: 5, Burst: &size}} {
		require.NoError(t, good.Check())
	}
	var bad *registry.RowError
	for field, limit := range map[string]registry.Limit{
		"name": {Rate: 5}, "max_wait": {Name: "a", MaxWait: -1}, "rate": {Name: "a", Rate: 0.5, Quota: true}, "burst": {Name: "a", Rate: 1, Burst: &size, Warmup: 1},
	} {
		require.ErrorAs(t, limit.Check(), &bad)
		require.Equal(t, field, bad.Field)
	}
	require.ErrorAs(t, (&registry.Limit{Name: "a", Rate: 1, Version: -1, Row: "7"}).Check(), &bad)
	require.Equal(t, "7", bad.Row)
	require.ErrorContains(t, bad.Err, "version -1")
}
