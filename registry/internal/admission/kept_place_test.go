package admission

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// A call that gets the place for which it has waited keeps it, while another call of the process asks for one.
func TestPlaceWhileAnotherAsks(t *testing.T) {
	places, err := semaphore.NewMemory(1)
	require.NoError(t, err)
	b, s := &bounds{most: 1, places: places}, new(Slot)
	s.inside.Add(1) // as enter does before it asks the backend
	s.asking.Add(1)
	p, err := s.await(t.Context(), b, 0, time.Second)
	require.NoError(t, err)
	require.NotNil(t, p, "the semaphore has granted it")
}
