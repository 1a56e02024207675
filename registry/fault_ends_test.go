package registry_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A fault ends with a load after which no call asks its limit, since nobody may ever repair the key.
func TestFaultEndsWithItsLimit(t *testing.T) {
	rate, keys := registry.Limit{Name: "/a", Rate: 5}, registry.Limit{Name: "/a", Rate: 5, PerKey: true}
	for name, c := range map[string]struct {
		row, next registry.Limit
		ends      bool
	}{
		"off":          {rate, registry.Limit{Name: "/a", Rate: 5, Disabled: true}, true},
		"rate 0":       {rate, registry.Limit{Name: "/a"}, true},
		"no rate":      {rate, registry.Limit{Name: "/a", NoRate: true, Window: time.Second, WindowLimit: 5}, true},
		"no keys":      {keys, rate, true},
		"other rate":   {rate, registry.Limit{Name: "/a", Rate: 6}, false},
		"other keys":   {keys, registry.Limit{Name: "/a", Rate: 6, PerKey: true}, false},
		"keys":         {rate, keys, false}, // calls of /a itself ask the bucket of the row
		"a row":        {registry.Limit{Name: "/other"}, rate, true},
		"no row":       {registry.Limit{Name: "/other"}, registry.Limit{Name: "/b", Rate: 5}, false},
		"a row with *": {registry.Limit{Name: "/other"}, registry.Limit{Name: "/*", Rate: 5}, true},
		"and a place":  {rate, registry.Limit{Name: "/a", Rate: 5, Concurrent: 1}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, call := &faulty{Store: tokenbucket.NewMemoryStore()}, "/a"
				if c.row.PerKey {
					call = "/a|k"
				}
				source := new(fake)
				source.set(c.row)
				r := open(t, source, store, registry.WithParts(), registry.WithUnknown(registry.Default(registry.Limit{Rate: 5})), registry.WithLocalWindows(), registry.WithLocalSemaphores())
				store.broken.Store(true)
				_, err := r.Enter(ctx, call)
				require.ErrorIs(t, err, tokenbucket.ErrCorruptState)
				require.Len(t, r.Stats().Faults, 1)
				source.set(c.next)
				require.NoError(t, r.Reload(ctx))
				require.Equal(t, c.ends, len(r.Stats().Faults) == 0)
			})
		})
	}
}
