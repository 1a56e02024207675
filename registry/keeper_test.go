package registry

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// A bucket that could not be made keeps no penalty: the next to ask does not get the one of before, which is the other kind's.
func TestKeeperThatCannotBeMade(t *testing.T) {
	r := local(t, Static{{Name: "/a", Row: "1", NoRate: true, Concurrent: 5}})
	e := r.limits.Load().rows["/a"]
	before, err := r.keeperOf(e, nil)
	require.NoError(t, err)
	good := r.options
	r.options = append(good[:len(good):len(good)], tokenbucket.WithStoreTimeout(-time.Second))
	e.limit.Shadow = true
	_, err = r.keeperOf(e, nil)
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	r.options = good
	after, err := r.keeperOf(e, nil)
	require.NoError(t, err)
	require.NotSame(t, before, after)
}
