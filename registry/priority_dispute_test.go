package registry_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A row that another configuration has overruled is put in force again after two loads, also if all of its calls have a lower priority.
func TestDisputeOfLowCalls(t *testing.T) {
	for _, p := range []tokenbucket.Priority{tokenbucket.Normal, tokenbucket.Low} {
		t.Run(p.String(), func(t *testing.T) {
			store := tokenbucket.NewMemoryStore()
			r, err := registry.New(registry.Static{{Name: "/a", Rate: 5, Version: 1}}, store, registry.WithInterval(time.Hour))
			require.NoError(t, err)
			defer r.Close()
			other, err := tokenbucket.NewSmoothBursty("/a", 1000, tokenbucket.WithStore(store), tokenbucket.WithVersion(9), tokenbucket.WithPriority(tokenbucket.Lowest))
			require.NoError(t, err)
			_, err = other.TryAcquire(t.Context(), 1, 0)
			require.NoError(t, err)
			for range 4 {
				a, err := r.Enter(gate.WithPriority(t.Context(), p), "/a")
				require.NoError(t, err)
				a.Leave()
				require.NoError(t, r.Reload(t.Context()))
			}
			_, err = other.TryAcquire(t.Context(), 1, 0)
			require.NoError(t, err)
			require.Equal(t, 5.0, other.InForce().Rate)
		})
	}
}
